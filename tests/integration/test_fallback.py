"""What runs is what it calls itself: nothing that was to run on a GPU goes on, unsaid, on the CPU."""

import pytest
from offramp.runtime import Cascade, InputError, RuntimeUnavailable, sample
from offramp.runtime.bundle import read_bundle

torch = pytest.importorskip("torch", reason="the device path runs on torch's memory")
onnxruntime = pytest.importorskip("onnxruntime")

from offramp.runtime.execution.device.executor import open_device  # noqa: E402
from offramp.runtime.execution.device.ort_graphs import OrtGraphs  # noqa: E402

CPU = "CPUExecutionProvider"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return read_bundle(sample.intents(tmp_path_factory.mktemp("fallback") / "intents"))


@pytest.mark.filterwarnings("ignore:Specified provider")
@pytest.mark.parametrize(
    ("providers", "unused"),
    [
        (["CUDAExecutionProvider", CPU], "CUDAExecutionProvider"),
        (
            ["TensorrtExecutionProvider", "CUDAExecutionProvider", CPU],
            "TensorrtExecutionProvider, CUDAExecutionProvider",
        ),
        ([CPU, "CUDAExecutionProvider"], "CUDAExecutionProvider"),
        ([("CUDAExecutionProvider", {"device_id": "0"}), CPU], "CUDAExecutionProvider"),
    ],
)
def test_a_provider_that_onnx_runtime_goes_on_without_is_refused(bundle, providers, unused):
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("it can be used here")
    graphs = OrtGraphs(bundle, torch.device("cpu"), providers)
    with pytest.raises(RuntimeUnavailable, match=rf"^ONNX Runtime can't use {unused} here, only \['CPU"):
        graphs.open(bundle.manifest.blocks[0])


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "torch:cuda"])
@pytest.mark.parametrize("first", [CPU, (CPU, {}), (CPU, {"arena_extend_strategy": "kNextPowerOfTwo"})])
@pytest.mark.parametrize("more", [[], ["CUDAExecutionProvider"]])
def test_providers_that_would_run_it_all_on_the_cpu_are_no_gpu(bundle, device, first, more):
    with pytest.raises(InputError, match=rf"^device is '{device}', but providers is .* on the CPU"):
        open_device(bundle, device, [first, *more])


@pytest.mark.parametrize("device", ["cuda", "torch:cuda", "cuda:7"])
def test_a_gpu_that_is_not_there_is_refused_and_never_the_cpu_instead(bundle, device):
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(RuntimeUnavailable, match=f"device is '{device}', but no CUDA GPU can be used here"):
        Cascade.load(bundle.path, device)


def test_a_cascade_says_where_it_runs(bundle):
    for device, says in (("cpu", CPU), ("torch:cpu", " cpu")):
        with Cascade.load(bundle.path, device) as cascade:
            assert says in cascade.fingerprint
            assert "cuda" not in cascade.fingerprint.lower()
