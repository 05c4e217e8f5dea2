"""Where kernel tests run: in Triton's interpreter on CPU, and, with `TRITON_INTERPRET=0 pytest -m cuda`, on a GPU."""

import os

import pytest


@pytest.fixture(
    params=[pytest.param("cpu", id="interpreter"), pytest.param("cuda", marks=pytest.mark.cuda)], scope="session"
)
def device(request) -> str:
    """The torch device whose tensors the kernels are given."""
    pytest.importorskip("torch", reason="kernels take torch tensors: a CUDA build of torch")
    pytest.importorskip("triton", reason="triton isn't installed: pip install triton (Linux)")
    import torch

    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA GPU here")
        if os.environ["TRITON_INTERPRET"] == "1":
            pytest.skip("TRITON_INTERPRET=1: set it to 0 to compile for the GPU")
    elif os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("TRITON_INTERPRET=0: kernels are compiled, and CPU tensors go to numpy")
    return request.param
