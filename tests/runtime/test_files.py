"""Files are whole or absent, and a sealed document shows any changed byte."""

import json
import os
import signal
import subprocess
import sys

import pytest
from offramp.runtime import BundleError, InputError
from offramp.runtime.files import inside, new_folder, seal, unseal, write_atomically


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "f.json"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "out"

    def fail_halfway():
        with new_folder(target) as folder:
            (folder / "a").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []
    with new_folder(target) as folder:
        (folder / "a").write_text("whole")
        assert not target.exists()
    assert (target / "a").read_text() == "whole"
    with pytest.raises(InputError, match="already exists"), new_folder(target):
        pass
    with new_folder(target, replace=True) as folder:
        (folder / "b").write_text("new")
    assert [p.name for p in target.iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_process_killed_while_it_writes_leaves_the_old_folder(tmp_path):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom offramp.runtime.files import new_folder\n"
        "with new_folder(Path(sys.argv[1]), replace=True) as f:\n"
        "    (f / 'a').write_text('new'); print('ready', flush=True); time.sleep(60)\n"
    )
    target = tmp_path / "out"
    target.mkdir()
    (target / "a").write_text("old")
    with subprocess.Popen([sys.executable, "-c", script, str(target)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert (target / "a").read_text() == "old"


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", "a\\..\\x", "."])
def test_paths_that_leave_the_folder_are_refused(tmp_path, path):
    with pytest.raises(BundleError, match="leaves the bundle's folder"):
        inside(tmp_path, path, where="manifest.json")


def test_links_that_leave_the_folder_are_refused(tmp_path):
    root = tmp_path / "bundle"
    root.mkdir()
    (tmp_path / "secret").write_text("x")
    os.symlink(tmp_path / "secret", root / "weights.bin")
    with pytest.raises(BundleError, match="link"):
        inside(root, "weights.bin", where="manifest.json")


def test_every_changed_byte_of_a_sealed_document_is_seen():
    data = seal({"schema": "x", "name": "Ünïcode “quotes”", "values": [1.5, -2, "inf"], "empty": {}})
    digest = json.loads(data)["digest"]
    unseal(data, digest, where="f")
    for at in range(len(data)):
        for flip in (0x01, 0x20, 0x80):
            changed = bytearray(data)
            changed[at] ^= flip
            try:
                stated = json.loads(bytes(changed))["digest"]
            except (ValueError, KeyError):
                continue  # no longer the document at all: refused before the digest
            with pytest.raises(BundleError, match="doesn't match its digest"):
                unseal(bytes(changed), stated, where="f")
