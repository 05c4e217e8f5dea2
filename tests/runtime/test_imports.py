"""The runtime is light: it loads nothing that an edge program wouldn't want."""

import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "onnx",
    "onnx_ir",
    "scipy",
    "fastapi",
    "matplotlib",
    "pandas",
    "sklearn",
    "pyarrow",
    "rich",
    "networkx",
    "tokenizers",
    "PIL",
)


@pytest.mark.parametrize(
    "module", ["offramp.runtime", "offramp.runtime.cli", "offramp.runtime.jobs.calibrating.calibrate"]
)
def test_importing_the_runtime_loads_no_heavy_library(module):
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_predicting_loads_no_heavy_library_either():
    code = (
        "import sys\nfrom offramp.runtime import Cascade, sample\n"
        "x, _ = sample.heldout()\nCascade.load(sample.BUNDLE, operating_point='balanced').predict({'x': x})\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
