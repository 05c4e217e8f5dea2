"""Files are whole or absent, and a sealed document shows any changed byte."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest
from offramp.runtime import BundleError, InputError
from offramp.runtime.files import (
    NoRoom,
    PrivateCopy,
    check_new_folder,
    flush_to_disk,
    inside,
    new_folder,
    remove_abandoned,
    seal,
    sync_file,
    unseal,
    write_atomically,
)


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
        with new_folder(target, marker="a") as folder:
            (folder / "a").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []
    with new_folder(target, marker="a") as folder:
        (folder / "a").write_text("whole")
        assert not target.exists()
    assert (target / "a").read_text() == "whole"
    with pytest.raises(InputError, match="already exists"), new_folder(target, marker="a"):
        pass
    with new_folder(target, marker="a", replace=True) as folder:
        (folder / "b").write_text("new")
    assert [p.name for p in target.iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_process_killed_while_it_writes_leaves_the_old_folder(tmp_path):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom offramp.runtime.files import new_folder\n"
        "with new_folder(Path(sys.argv[1]), marker='a', replace=True) as f:\n"
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
    assert len(list(tmp_path.iterdir())) == 2, "what it had begun lies beside"
    with new_folder(target, marker="a", replace=True) as folder:
        (folder / "a").write_text("next")
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "and is gone after the next run"


def test_a_folder_moved_aside_by_a_killed_process_is_put_back(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    (tmp_path / f".out.{process.pid}-0123abcd.old").mkdir()
    (tmp_path / f".out.{process.pid}-0123abcd.old" / "a").write_text("old")

    def fail():
        with new_folder(tmp_path / "out", marker="a"):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (tmp_path / "out" / "a").read_text() == "old"


HOLD = {
    "a folder being made": """if True:
        with new_folder(path, marker="a") as folder:
            (folder / "a").write_text("half")
            wait()
    """,
    "a file being written": """if True:
        files.flush_to_disk = lambda handle: wait()
        files.write_atomically(path, b"new")
    """,
    "a folder moved aside": """if True:
        path.mkdir()
        (path / "a").write_text("old")
        from pathlib import Path
        really = Path.rename
        def rename(self, to):
            if to == path:
                wait()
            return really(self, to)
        Path.rename = rename
        with new_folder(path, marker="a", replace=True) as folder:
            (folder / "a").write_text("new")
    """,
}


@pytest.mark.parametrize("held", HOLD)
def test_what_another_container_is_writing_stays_though_its_process_number_is_nobodys_here(tmp_path, held):
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom offramp.runtime import files\n"
        "from offramp.runtime.files import new_folder\npath = Path(sys.argv[1])\n"
        "os.getpid = lambda: 2**22 + 1\ndef wait():\n    print('ready', flush=True)\n"
        f"    sys.stdin.read()\n{HOLD[held]}"
    )
    target = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "ready\n"
        there = sorted(p.name for p in tmp_path.iterdir())
        assert str(2**22 + 1) in there[0]
        remove_abandoned(target)
        assert sorted(p.name for p in tmp_path.iterdir()) == there
        other.communicate("")
    assert other.returncode == 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_process_left_goes_though_its_number_is_somebodys_again(tmp_path):
    for kind in ("tmp", "old"):
        (tmp_path / f".out.{os.getpid()}-0123abcd.{kind}").mkdir()
    (tmp_path / f".out.{os.getpid()}-89abcdef.tmp").write_bytes(b"half")
    (tmp_path / "out").mkdir()
    remove_abandoned(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF])
def test_where_nothing_can_be_held_work_is_done_and_nothing_of_others_removed(tmp_path, monkeypatch, number):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refused)
    theirs = tmp_path / ".out.1-0123abcd.tmp"
    theirs.mkdir()
    for replace in (False, True):
        with new_folder(tmp_path / "out", marker="a", replace=replace) as folder:
            (folder / "a").write_text("whole")
    write_atomically(tmp_path / "f.json", b"whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == [theirs.name, "f.json", "out"]


FSYNC = os.fsync


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EACCES, errno.EIO, errno.ENOSYS])
def test_a_folder_that_cannot_be_flushed_fails_nothing_that_is_in_force(tmp_path, monkeypatch, number):
    def fsync(handle):
        if os.path.isdir(f"/dev/fd/{handle}"):
            raise OSError(number, os.strerror(number))
        FSYNC(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "f.json", b"new")
    with new_folder(tmp_path / "out", marker="a") as folder:
        (folder / "a").write_text("whole")
    assert (tmp_path / "f.json").read_bytes() == b"new"
    assert (tmp_path / "out" / "a").read_text() == "whole"


def test_a_folder_that_may_be_written_but_not_listed_is_written(tmp_path, monkeypatch):
    opened = os.open

    def refused(path, flags, *more, **named):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "no")
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refused)
    write_atomically(tmp_path / "f.json", b"new")
    assert (tmp_path / "f.json").read_bytes() == b"new"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_disk_that_flushes_nothing_takes_files_and_folders(tmp_path, monkeypatch, number):
    def refused(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refused)
    write_atomically(tmp_path / "f.json", b"new")
    with new_folder(tmp_path / "out", marker="a") as folder:
        (folder / "a").write_text("whole")
    assert (tmp_path / "out" / "a").exists()


def test_a_handle_that_only_reads_is_exchanged_for_one_that_can_be_flushed(tmp_path, monkeypatch):
    import fcntl

    flushed = []

    def fsync(handle):
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "read-only")
        flushed.append(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / "f").write_bytes(b"whole")
    sync_file(tmp_path / "f")
    assert len(flushed) == 1
    assert (tmp_path / "f").read_bytes() == b"whole"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_to_flush_fails_the_write(tmp_path, monkeypatch, number):
    def failed(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failed)
    with pytest.raises(OSError, match=os.strerror(number)):
        write_atomically(tmp_path / "f.json", b"new")
    with pytest.raises(OSError, match=os.strerror(number)):
        flush_to_disk(0)
    assert list(tmp_path.iterdir()) == []


def test_overwriting_replaces_only_a_folder_of_the_same_kind_and_never_the_source(tmp_path):
    precious, same = tmp_path / "home", tmp_path / "same"
    precious.mkdir()
    same.mkdir()
    (precious / "thesis.txt").write_text("years")
    (same / "records.json").write_text("{}")
    with pytest.raises(InputError, match=r"home already exists, and has no records\.json"):
        check_new_folder(precious, marker="records.json", replace=True)
    with pytest.raises(InputError, match="is what is being read"):
        check_new_folder(same, marker="records.json", replace=True, keep=same)
    assert (precious / "thesis.txt").read_text() == "years"
    with new_folder(same, marker="records.json", replace=True):
        pass


@pytest.mark.parametrize("target", ["loop", "nowhere"])
def test_a_link_that_leads_nowhere_is_not_written_to(tmp_path, target):
    (tmp_path / "loop").symlink_to(target)
    with pytest.raises(InputError, match="a link that leads nowhere"):
        check_new_folder(tmp_path / "loop", marker="records.json", replace=True, keep=tmp_path)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", "a\\..\\x", "."])
def test_paths_that_leave_the_folder_are_refused(tmp_path, path):
    with pytest.raises(BundleError, match="leaves the bundle's folder"):
        inside(tmp_path, path, where="manifest.json")


def test_a_private_copy_that_a_killed_process_left_goes_and_one_that_lives_stays(tmp_path):
    program = """if True:
        import os, sys
        from pathlib import Path
        from offramp.runtime.files import PrivateCopy
        copy = PrivateCopy(Path(sys.argv[1]))
        print(copy.folder.parent.name, flush=True)
        sys.stdin.read()
        os._exit(1)
    """
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        name = other.stdout.readline().strip()
        living = PrivateCopy(tmp_path)
        assert {home.name for home in tmp_path.iterdir()} == {name, living.folder.parent.name}
        other.kill()
    PrivateCopy(tmp_path)
    assert [home.name for home in tmp_path.iterdir()] == [living.folder.parent.name]


def test_a_private_copy_that_finds_no_room_says_where(tmp_path):
    with pytest.raises(NoRoom, match="nowhere"):
        PrivateCopy(tmp_path / "nowhere")


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
