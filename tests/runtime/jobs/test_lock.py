"""A lock that one process holds: nobody else gets it meanwhile, and it is let go of however its holder ends."""

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest
from offramp.runtime.jobs.lock import one_at_a_time, take

HOLD = (
    "import sys\nfrom pathlib import Path\nfrom offramp.runtime.jobs.lock import take\n"
    "held = take(Path(sys.argv[1])); print(held is not None, flush=True); sys.stdin.read()\n"
)


def holder(path):
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_what_another_process_holds_is_not_had_until_it_is_killed(tmp_path):
    path = tmp_path / "new" / "lock"
    with holder(path) as other:
        assert other.stdout.readline() == "True\n"
        assert take(path) is None
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        found = take(path)
        assert found is not None
        assert take(path) is None, "held within one process too"
        found.close()


def test_a_lock_file_left_behind_is_no_lock(tmp_path):
    (tmp_path / "lock").write_bytes(b"")
    with one_at_a_time(tmp_path / "lock"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_one_at_a_time_and_nobody_is_left_out(tmp_path):
    path, inside, most, done = tmp_path / "made" / "lock", [], [], []

    def work(k):
        for _ in range(5):
            with one_at_a_time(path):
                inside.append(k)
                most.append(len(inside))
                done.append(k)
                inside.remove(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert sorted(done) == sorted([*range(4)] * 5)


def test_neither_the_file_nor_a_folder_made_for_it_is_left(tmp_path):
    with one_at_a_time(tmp_path / "made" / "lock"):
        assert (tmp_path / "made" / "lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_stays(tmp_path):
    with one_at_a_time(tmp_path / "made" / "lock"):
        (tmp_path / "made" / "result").write_text("x")
    assert [p.name for p in (tmp_path / "made").iterdir()] == ["result"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_disk_without_locks_is_nobody_who_holds_one(tmp_path, monkeypatch, number):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refused)
    found = take(tmp_path / "new" / "lock")
    assert found is not None
    found.close()
    with one_at_a_time(tmp_path / "made" / "lock"):
        (tmp_path / "result").write_text("x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "result"]


def test_a_disk_that_fails_says_so_and_is_not_waited_for(tmp_path, monkeypatch):
    def failed(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("fcntl.flock", failed)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), one_at_a_time(tmp_path / "lock"):
        pass


def test_work_that_fails_lets_go(tmp_path):
    try:
        with one_at_a_time(tmp_path / "lock"):
            raise RuntimeError
    except RuntimeError:
        pass
    assert list(tmp_path.iterdir()) == []
    found = take(tmp_path / "lock")
    assert found is not None
    found.close()
