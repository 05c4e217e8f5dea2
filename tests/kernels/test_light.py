"""A machine without triton, torch or a GPU never imports them; the serving path never waits for the device."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVING = [*(ROOT / "kernels").glob("*.py"), *(ROOT / "runtime" / "execution" / "device").rglob("*.py")]


def test_arrays_are_gated_without_torch_or_triton():
    code = (
        "import sys, numpy as np\n"
        "import offramp.kernels as k\n"
        "z = np.random.default_rng(0).standard_normal((4, 5))\n"
        "out = k.exit_gate(z, threshold=0.0)\n"
        "k.gather([z], k.compact(out.leave).index, [0])\n"
        "print([m for m in ('torch', 'triton', 'onnx', 'onnxruntime') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_importing_the_kernels_triton_half_does_not_replace_the_function():
    code = (
        "import offramp.kernels, offramp.kernels.exit_gate, offramp.kernels.compact\n"
        "print(callable(offramp.kernels.exit_gate), callable(offramp.kernels.compact))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["True", "True"]


@pytest.mark.parametrize("path", SERVING, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_nothing_in_the_serving_path_waits_for_the_device(path):
    """No .item(), no .cpu() or .tolist() of a tensor's, no torch.cuda.synchronize(): events only."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        where = f"{path.name}:{node.lineno}: {ast.unparse(node)[:60]}"
        assert node.func.attr not in ("item", "cpu", "nonzero"), where
        if node.func.attr == "synchronize":
            assert "event" in ast.unparse(node.func.value), where
