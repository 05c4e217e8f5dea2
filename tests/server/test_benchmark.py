"""benchmarks/serving.py runs from start to end with the nearest of the other servers, so that it does with all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "serving.py"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="CPU seconds are read from /proc")
def test_offramp_is_measured_against_fastapi(tmp_path):
    options = ["--peers", "fastapi", "--turns", "1", "--seconds", "1", "--connections", "2", "--as-it-comes"]
    command = [sys.executable, str(SCRIPT), *options, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    results = json.loads((tmp_path / "serving.json").read_text())["results"]
    reason = results["missing"].get("fastapi", "")
    if "can't be installed" in reason:
        pytest.skip(reason)
    assert not reason
    assert {line["server"] for line in results["lines"]} == {"offramp, full", "offramp, fast", "FastAPI, no batching"}
    assert results["same_labels"]["FastAPI, no batching"] == 1
    assert all(line["requests_per_second"] > 0 for line in results["lines"])
    assert results["cpu_of_a_request"]["ratio"] > 0
    assert set(results["open_loop"]["p99_ms"]) == {"offramp, full", "offramp, fast"}
    assert (tmp_path / "serving.png").stat().st_size
    assert "FastAPI, no batching" in done.stdout


def test_every_peer_has_its_file_and_what_it_needs_pinned():
    for script in (ROOT / "benchmarks" / "serving" / "peers").glob("*.py"):
        lines = script.with_suffix(".txt").read_text().splitlines()
        assert all("==" in line for line in lines), script
        assert any(line.lower().startswith(f"{script.stem}==") for line in lines), script
        assert not [line for line in lines if line.startswith(("torch==", "triton==", "nvidia-cu"))]
        assert str(os.sep) not in "".join(lines)
