"""However offramp is installed from a clone, its bundle answers at every point, and the demo runs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from offramp.runtime import Cascade, sample

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FOLDERS = ("export", "kernels", "runtime", "server")
POINTS = """
import json, offramp.runtime as r
x, _ = r.sample.heldout()
with r.Cascade.load(r.sample.BUNDLE) as cascade:
    exits = {n: cascade.at(n).predict({"x": x}).exit.tolist() for n in cascade.operating_points}
print(json.dumps([r.__file__, exits]))
"""


@pytest.fixture
def clone(tmp_path):
    """The sources by themselves: an install may write into its clone."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / "clone").mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / "clone" / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / "clone" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "clone"


def uv() -> str:
    found = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        pytest.skip("uv isn't installed: pip install uv")
    return found


def by_pip(clone, site):
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target"]
    run([*command, str(site), str(clone)])


def by_uv(clone, site):
    """uv's files are links into its cache, which lies on the same disk here."""
    command = [uv(), "pip", "install", "--python", sys.executable, "--no-deps", "--no-build-isolation"]
    linked = ["--link-mode", "hardlink", "--cache-dir", str(clone.parent / "cache")]
    run([*command, *linked, "--target", str(site), str(clone)])
    files = [file for file in (site / "offramp" / "runtime" / "sample" / "digits").iterdir() if file.is_file()]
    assert files
    assert all(file.stat().st_nlink > 1 for file in files)


def by_copying(clone, site):
    for name in FOLDERS:
        shutil.copytree(clone / name, site / "offramp" / name)


def run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("install", [by_pip, by_uv, by_copying])
def test_an_install_answers_at_every_point_and_shows_the_demo(clone, tmp_path, install):
    site = tmp_path / "site"
    install(clone, site)
    elsewhere = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(site)}}
    file, exits = json.loads(run([sys.executable, "-c", POINTS], **elsewhere))
    assert Path(file).is_relative_to(site)
    with Cascade.load(sample.BUNDLE) as cascade:
        x, _ = sample.heldout()
        assert exits == {n: cascade.at(n).predict({"x": x}).exit.tolist() for n in cascade.operating_points}
    assert any(len(set(taken)) > 1 for taken in exits.values()), "rows leave at several exits"
    command = (
        [sys.executable, "-m", "offramp.runtime.cli"] if install is by_copying else [str(site / "bin" / "offramp")]
    )
    assert "sentences leave:" in run([*command, "demo", "--once"], **elsewhere)
