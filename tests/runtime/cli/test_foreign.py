"""What a command says where the terminal lacks the letters, and where offramp was copied rather than installed."""

import errno
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from offramp.runtime import sample
from offramp.runtime.bundle import UNKNOWN_VERSION
from offramp.runtime.files import seal

NAMES = ["кот", "café", "\U0001f600", "你好", 'a"b', *"56789"]


@pytest.fixture(scope="module")
def renamed(tmp_path_factory):
    """The digits' bundle, its classes called by names that few code pages have."""
    home = tmp_path_factory.mktemp("bundle") / "b"
    home.mkdir()
    for file in sample.BUNDLE.rglob("*"):
        if file.is_file() and file.name != "manifest.json" and "history" not in file.parts:
            (home / file.relative_to(sample.BUNDLE)).parent.mkdir(parents=True, exist_ok=True)
            (home / file.relative_to(sample.BUNDLE)).write_bytes(file.read_bytes())
    (home / "calibration.json").unlink()
    manifest = json.loads((sample.BUNDLE / "manifest.json").read_text(encoding="utf-8"))
    (home / "manifest.json").write_bytes(seal(manifest | {"classes": NAMES}))
    return home


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    x, labels = sample.heldout()
    path = tmp_path_factory.mktemp("data") / "d.npz"
    np.savez(path, x=x[:200], labels=labels[:200])
    return path


def offramp(*arguments, encoding="utf-8", before=""):
    code = f"import sys\n{before}\nfrom offramp.runtime.cli import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout.decode(encoding)


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "cp1251", "cp932", "utf-8"])
def test_answers_are_json_whatever_letters_stdout_lacks(renamed, data, encoding):
    lines = [json.loads(line) for line in offramp("predict", renamed, data, encoding=encoding).splitlines()]
    assert len(lines) == 200
    assert {line["class"] for line in lines} == set(NAMES)
    assert all(line["class"] == NAMES[line["label"]] for line in lines)


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
@pytest.mark.parametrize("command", ["evaluate", "inspect"])
def test_json_of_the_jobs_is_the_same_whatever_letters_stdout_lacks(renamed, data, command, encoding):
    more = {"evaluate": [data, "--json"], "inspect": ["--no-times", "--json"]}[command]
    found, expected = (json.loads(offramp(command, renamed, *more, encoding=e)) for e in (encoding, "utf-8"))
    assert found.keys() == expected.keys()


UNINSTALLED = """if True:
    from importlib import metadata
    def version(name, really=metadata.version):
        if name == "offramp":
            raise metadata.PackageNotFoundError(name)
        return really(name)
    metadata.version = version
"""


@pytest.mark.parametrize("command", [["version"], ["--version"], ["doctor"]])
def test_without_metadata_the_version_is_unknown(command):
    assert UNKNOWN_VERSION in offramp(*command, before=UNINSTALLED)


def test_without_metadata_every_job_does_its_work(data, tmp_path):
    bundle = tmp_path / "b"
    shutil.copytree(sample.BUNDLE, bundle)
    offramp("predict", bundle, data, before=UNINSTALLED)
    offramp("record", bundle, data, "--out", tmp_path / "r", before=UNINSTALLED)
    offramp("calibrate", bundle, tmp_path / "r", "--budget", "half=0.5", before=UNINSTALLED)
    assert UNKNOWN_VERSION in json.loads((bundle / "calibration.json").read_bytes())["producer"]


POOR_DISK = """if True:
    import errno, fcntl, os
    def flock(handle, how):
        raise OSError({number}, os.strerror({number}))
    def fsync(handle, really=os.fsync):
        if os.path.isdir(f"/dev/fd/{{handle}}"):
            raise OSError(errno.EINVAL, "a folder")
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "read-only")
        really(handle)
    fcntl.flock, os.fsync = flock, fsync
"""


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_on_a_disk_without_locks_or_flushing_every_job_does_its_work(data, tmp_path, number):
    bundle, disk = tmp_path / "b", POOR_DISK.format(number=number)
    shutil.copytree(sample.BUNDLE, bundle)
    offramp("record", bundle, data, "--out", tmp_path / "r", before=disk)
    offramp("record", bundle, data, "--out", tmp_path / "r", "--overwrite", before=disk)
    offramp("calibrate", bundle, tmp_path / "r", "--budget", "half=0.5", before=disk)
    offramp("rollback", bundle, before=disk)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "r"]
