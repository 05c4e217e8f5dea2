"""benchmarks/gpu.py runs from start to end, without a GPU, so that it's sure to where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_every_step_of_the_gpu_benchmark_runs_at_toy_sizes():
    pytest.importorskip("triton", reason="triton isn't installed: pip install triton (Linux)")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--cpu-check"], capture_output=True, text=True, env={**os.environ}, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for heading in (
        "worst difference to float64",
        "empty launch",
        "waits for the hardest",
        "gather us",
        "of bandwidth",
    ):
        assert heading in done.stdout


def test_without_a_gpu_the_benchmark_says_so():
    torch = pytest.importorskip("torch", reason="the benchmark times torch too")
    pytest.importorskip("triton", reason="triton isn't installed: pip install triton (Linux)")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "no CUDA GPU here" in done.stderr
