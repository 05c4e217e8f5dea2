"""Files that are whole or absent: written under a temporary name, flushed, then renamed.

`seal` and `unseal` give a JSON document a digest of its own bytes, so that one changed byte anywhere in
it, the digest included, is seen when it is read.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from offramp.runtime.errors import BundleError, InputError

_BLANK = "0" * 64
# What a disk says that has no way to flush, rather than one that failed at it.
_NO_FLUSHING = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path`: at every moment a reader sees the old file or the new one, whole."""
    with _temporary(path, Path.touch) as temporary:
        try:
            with temporary.open("wb") as stream:
                stream.write(data)
                stream.flush()
                flush_to_disk(stream.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    _sync_folder(path.parent)


@contextmanager
def new_folder(path: Path, *, marker: str, replace: bool = False, keep: Path | None = None) -> Iterator[Path]:
    """A temporary folder beside `path` that becomes `path` when the block ends without an error.

    replace: an existing `path` is moved aside, and removed only once the new one is in place; but only a
    folder of the same kind, one that holds the file `marker`, and never `keep`, what is being read.
    Raises InputError if `path` exists and isn't to be replaced.
    """
    check_new_folder(path, marker=marker, replace=replace, keep=keep)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path)
    with _temporary(path, Path.mkdir) as temporary:
        try:
            yield temporary
            put_in_place(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def put_in_place(whole: Path, path: Path) -> None:
    """Make the folder `whole` be `path`, on the same disk. What was there is moved aside first, removed last."""
    old = _beside(path, "old")
    for file in whole.rglob("*"):
        if file.is_file():
            sync_file(file)
    held = None
    if path.exists():
        with suppress(_Taken):
            held = _hold(path)  # nobody puts it back meanwhile
    try:
        if path.exists():
            path.rename(old)
        whole.rename(path)
    finally:
        _let_go(held)
    shutil.rmtree(old, ignore_errors=True)
    _sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Return when the file's content is on the disk."""
    try:
        with path.open("rb") as stream:
            flush_to_disk(stream.fileno())
    except OSError as error:
        if error.errno != errno.EBADF:  # somewhere only what can be written can be flushed
            raise
        with path.open("r+b") as stream:
            flush_to_disk(stream.fileno())


def flush_to_disk(handle: int) -> None:
    """fsync, where the disk has it: one that doesn't keeps what it is given as well as it can."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FLUSHING:
            raise


def check_new_folder(path: Path, *, marker: str, replace: bool = False, keep: Path | None = None) -> None:
    """Refuse, before any work is done, what `new_folder` would refuse."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if not path.exists() and not path.is_symlink():
        return
    if not path.exists():
        raise InputError(f"{path} is a link that leads nowhere: choose another place, or remove it.")
    if keep is not None and path.resolve() == keep.resolve():
        raise InputError(f"{path} is what is being read: choose another place for the result.")
    if not (path / marker).is_file():
        raise InputError(
            f"{path} already exists, and has no {marker}, so it isn't what would be written here: it won't be "
            "overwritten. Choose another place."
        )
    if not replace:
        raise InputError(
            f"{path} already exists: choose another place, or replace it by --overwrite (overwrite=True in Python)."
        )


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.{kind}")


@contextmanager
def _temporary(path: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """A new file or folder beside `path`, which `remove_abandoned` leaves alone as long as this process lives."""
    while True:
        made = _beside(path, "tmp")
        make(made)
        try:
            held = _hold(made)
            break
        except _Taken:  # by one who took it for abandoned before it could be held
            continue
    try:
        yield made
    finally:
        _let_go(held)


class _Taken(Exception):
    """Another process holds it, or has just removed it."""


def _hold(path: Path) -> int | None:
    """Hold what lies at `path`, wherever it is moved to; None where system or disk can't say who holds what.

    A process number wouldn't do: another container's are others, and its folder may be this one. Raises _Taken.
    """
    try:
        import fcntl
    except ImportError:
        return None
    handle = None
    try:
        handle = os.open(path, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), path.stat()):
            return handle
        raise FileNotFoundError
    except OSError as error:
        _let_go(handle)
        if isinstance(error, BlockingIOError | FileNotFoundError):
            raise _Taken from error
        return None


def _let_go(held: int | None) -> None:
    if held is not None:
        os.close(held)


def remove_abandoned(path: Path) -> None:
    """Temporary folders that a killed process left beside `path`. One that was moved aside is put back first."""
    pattern = re.compile(re.escape(f".{path.name}.") + r"\d+-[0-9a-f]{8}\.(tmp|old)")
    for other in path.parent.iterdir():
        found = pattern.fullmatch(other.name)
        if found is None:
            continue
        try:
            held = _hold(other)
        except _Taken:
            continue
        if held is None:
            continue
        try:
            if found[1] == "old" and not path.exists():
                other.rename(path)
            elif other.is_dir() and not other.is_symlink():
                shutil.rmtree(other, ignore_errors=True)
            else:
                with suppress(OSError):
                    other.unlink()
        finally:
            _let_go(held)


def _sync_folder(path: Path) -> None:
    """What has just been renamed stays so in a crash. It is in force already, so nothing here may call it failed."""
    if os.name != "posix":
        return
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def inside(root: Path, relative: str, *, where: str) -> Path:
    """`root / relative`, or BundleError if that names something outside `root`.

    A link is followed wherever it leads: caches and volumes are made of them, and digests say what must be there.
    """
    pure = PurePosixPath(relative)
    if pure.is_absolute() or ".." in pure.parts or "\\" in relative or "\0" in relative or not pure.parts:
        raise BundleError(f"{where} names the path {relative!r}, which leaves the bundle's folder.")
    return root.joinpath(*pure.parts)


def seal(document: dict[str, Any]) -> bytes:
    """The document as JSON bytes whose field "digest" is the SHA-256 of these bytes with the digest blanked."""
    blank = json.dumps({**document, "digest": _BLANK}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    head, middle, tail = blank.rpartition(f'"digest": "{_BLANK}"')
    return f"{head}{middle.replace(_BLANK, sha256(blank.encode()))}{tail}".encode()


def unseal(data: bytes, digest: str, *, where: str) -> None:
    """Check the bytes of a sealed document against the digest it carries; BundleError if they differ."""
    head, found, tail = data.rpartition(f'"digest": "{digest}"'.encode())
    blank = head + found.replace(digest.encode(), _BLANK.encode()) + tail
    if not found or len(digest) != 64 or sha256(blank) != digest:
        raise BundleError(
            f"{where}: its content doesn't match its digest, so it was damaged or edited. "
            "Restore the file, or write it again with offramp."
        )


class NoRoom(Exception):
    """A private copy can't be made where it was tried."""


def private_places() -> Iterator[Path]:
    """Where private copies may be: the user's temporary folder, then memory, where the system has it as a folder."""
    with suppress(OSError):
        yield Path(tempfile.gettempdir())
    if (memory := Path("/dev/shm")).is_dir():
        yield memory


class PrivateCopy:
    """Files copied to a folder of our own, which goes when the last one who holds this does, or the process ends.

    ONNX Runtime maps weights, refuses ones that are linked, and opens graphs late. Mapped from here, no file that is
    truncated or replaced can change an answer or kill the process, and unlike in memory, pages that nobody needs can
    go. Its own way to take weights from memory doesn't reach the graphs inside a graph, and copied them a session.
    """

    _PREFIX = "offramp-copy-"

    def __init__(self, place: Path) -> None:
        """Raises NoRoom where no folder can be made."""
        try:
            home = Path(tempfile.mkdtemp(prefix=self._PREFIX, dir=place))
            self.folder = home / "files"
            self.folder.mkdir()
        except OSError as error:
            raise NoRoom(f"{place}: {error.strerror}") from error
        lock = _locked(home)
        self._end = weakref.finalize(self, _remove_own, home, os.getpid(), lock)
        self._sweep(place)

    def add(self, name: str, source: Path) -> str:
        """Copy a file, and return the SHA-256 of what was copied. Raises OSError for its reading, NoRoom."""
        target = inside(self.folder, name, where=str(source))
        digest = hashlib.sha256()
        with source.open("rb") as given:
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                made = target.open("xb", buffering=0)
            except OSError as error:
                raise NoRoom(f"{target.parent}: {error.strerror}") from error
            with made:
                while piece := given.read(2**20):
                    digest.update(piece)
                    left = memoryview(piece)
                    try:
                        while len(left):
                            left = left[made.write(left) :]
                    except OSError as error:
                        raise NoRoom(f"{target.parent}: {error.strerror}") from error
        return digest.hexdigest()

    def _sweep(self, place: Path) -> None:
        """Remove what killed processes left. Whoever lives, in whichever container, holds the lock of its own."""
        with suppress(OSError, ImportError):
            import fcntl

            for other in place.glob(f"{self._PREFIX}*/lock"):
                with suppress(OSError), other.open("rb") as stream:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(other.parent, ignore_errors=True)


def _locked(home: Path) -> int | None:
    """Lock a folder as one that is in use, as long as this process lives; None where that can't be done.

    The file has its name only once it is locked: nobody takes a folder that is being made for an abandoned one.
    """
    handle = None
    try:
        import fcntl

        handle = os.open(home / "unlocked", os.O_CREAT | os.O_RDONLY, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (home / "unlocked").rename(home / "lock")
    except (OSError, ImportError):
        if handle is not None:
            os.close(handle)
        return None
    return handle


def _remove_own(home: Path, process: int, lock: int | None) -> None:
    if process != os.getpid():  # a forked child that ends: its parent still reads these
        return
    shutil.rmtree(home, ignore_errors=True)
    if lock is not None:
        with suppress(OSError):
            os.close(lock)
