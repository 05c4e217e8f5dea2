"""The runtime is light: it loads nothing that an edge program wouldn't want."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOBS = "offramp.runtime.jobs"

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
    "sqlalchemy",
    "alembic",
)


@pytest.mark.parametrize(
    "module", ["offramp.runtime", "offramp.runtime.cli", "offramp.runtime.jobs", "offramp.runtime.online"]
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


def test_modules_take_the_jobs_from_their_modules_and_job_folders_look_one_way():
    """Seen from a folder of jobs, what it may import; the package itself is for users."""
    below = {
        "data": set(),
        "pages": set(),
        "recording": {"data"},
        "auditing": {"data", "pages"},
        "bundles": {"data", "pages"},
        "calibrating": {"data", "pages", "auditing", "bundles"},
        "benching": {"data", "pages", "calibrating"},
        "evaluating": {"data", "pages", "recording", "calibrating"},
    }
    found = []
    for path in (path for top in ("runtime", "server", "export", "kernels") for path in (ROOT / top).rglob("*.py")):
        folder = path.parent.name if path.parent.parent == ROOT / "runtime" / "jobs" else None
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.module if isinstance(node, ast.ImportFrom) else None
            if name == JOBS:
                found.append(f"{path} imports from the package")
            elif folder and name and name.startswith(f"{JOBS}."):
                other = name.removeprefix(f"{JOBS}.").partition(".")[0]
                if other in below and other != folder and other not in below[folder]:
                    found.append(f"{path} imports {name}")
    assert not found


def test_the_version_is_that_of_what_is_installed():
    from importlib.metadata import version

    import offramp.runtime

    assert offramp.runtime.__version__ == version("offramp")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = offramp.runtime.nothing
