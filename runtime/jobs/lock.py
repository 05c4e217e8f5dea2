"""A lock that one process holds at a time: a file, let go of when the process ends, however it ends."""

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# Seconds between two looks at a lock that another process holds.
PAUSE = 0.05
_HELD = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK}
# A network disk without a lock service, or a system without the call.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}


def take(path: Path) -> IO[bytes] | None:
    """Hold the lock file, made if need be with its folder, until what is returned is closed; None if it is held.

    Where the disk has no locks there is none to wait for: the caller goes on, and keeping others away is his.
    """
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            if path.parent.exists():  # a file where the folder should be
                raise
            continue  # the folder was there, and gone before it could be looked at
        try:
            file = path.open("ab")
        except FileNotFoundError:  # its holder has just finished and removed the folder
            continue
        try:
            _hold(file)
            held, there = os.fstat(file.fileno()), path.stat()
            if (held.st_ino, held.st_dev) == (there.st_ino, there.st_dev):
                return file
            file.close()
        except FileNotFoundError:
            file.close()
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return file
            file.close()
            if error.errno in _HELD:
                return None
            raise


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait until nobody else holds the lock file, hold it, and leave neither it nor a folder made for it alone."""
    made = not path.parent.exists()
    while (file := take(path)) is None:
        time.sleep(PAUSE)
    try:
        yield
    finally:
        # Removed while held: whoever waits for it finds that its file is gone, and looks again.
        with suppress(OSError):
            path.unlink()
        file.close()
        if made:
            with suppress(OSError):
                path.parent.rmdir()


def _hold(file: IO[bytes]) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
