"""What is installed is what is in the tree, no more and no less, and the two light installs stay light."""

import os
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "export": "offramp/export",
    "kernels": "offramp/kernels",
    "runtime": "offramp/runtime",
    "server": "offramp/server",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"  # built from a copy: the tree stays as it is
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", *FOLDERS):
        (source / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    return next(out.glob("*.whl"))


def tree() -> set[str]:
    files = set()
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                files.add(f"{package}/{path.relative_to(ROOT / folder).as_posix()}")
    return files


def test_the_wheel_holds_exactly_the_trees_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == tree()


def test_the_packages_list_names_every_package():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    there = {
        ".".join((package.replace("/", "."), *init.parent.relative_to(ROOT / folder).parts))
        for folder, package in FOLDERS.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert listed == there


def test_the_wheel_alone_predicts(wheel, tmp_path):
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    code = (
        "import offramp.runtime as r\n"
        "x, y = r.sample.heldout()\n"
        "out = r.Cascade.load(r.sample.BUNDLE, operating_point='balanced').predict({'x': x})\n"
        "print(r.__file__, (out.label == y).mean())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    file, accuracy = done.stdout.split()
    assert file.startswith(str(tmp_path))
    assert float(accuracy) > 0.95


def test_the_suite_runs_against_what_it_was_told_to():
    import offramp.runtime

    expected = os.environ.get("OFFRAMP_EXPECT_FROM")
    if expected is None:
        assert Path(offramp.runtime.__file__).parent == ROOT / "runtime"
    else:
        assert Path(offramp.runtime.__file__).is_relative_to(Path(expected).resolve())


def test_the_base_and_cpu_extras_stay_small():
    def needs(extra: str | None) -> set[str]:
        found = set()
        for line in metadata.requires("offramp") or []:
            name, _, marker = line.partition(";")
            wanted = extra is not None and f'extra == "{extra}"' in marker.replace("'", '"')
            if ("extra" not in marker and extra is None) or wanted:
                found.add(name.split(">")[0].split("=")[0].split("[")[0].strip())
        return found

    assert needs(None) == {"numpy", "msgspec"}
    assert needs("cpu") == {"onnxruntime"}


def test_no_source_file_names_a_machine_or_pickles():
    for folder in (*FOLDERS, "examples", "benchmarks", "deploy"):
        for path in (ROOT / folder).rglob("*.py"):
            if ".venvs" in path.parts:  # the other servers' that were measured here
                continue
            text = path.read_text(encoding="utf-8")
            assert "import pickle" not in text, path
            assert "allow_pickle=True" not in text, path
            assert "torch.load(" not in text, path
