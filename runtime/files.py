"""Files that are whole or absent: written under a temporary name, flushed, then renamed.

`seal` and `unseal` give a JSON document a digest of its own bytes, so that one changed byte anywhere in
it, the digest included, is seen when it is read.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from offramp.runtime.errors import BundleError, InputError

_BLANK = "0" * 64


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path`: at every moment a reader sees the old file or the new one, whole."""
    temporary = _beside(path, "tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
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
    temporary = _beside(path, "tmp")
    temporary.mkdir()
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
    if path.exists():
        path.rename(old)
    whole.rename(path)
    shutil.rmtree(old, ignore_errors=True)
    _sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Return when the file's content is on the disk."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def check_new_folder(path: Path, *, marker: str, replace: bool = False, keep: Path | None = None) -> None:
    """Refuse, before any work is done, what `new_folder` would refuse."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if not path.exists() and not path.is_symlink():
        return
    if keep is not None and path.resolve() == keep.resolve():
        raise InputError(f"{path} is what is being read: choose another place for the result.")
    if not replace:
        raise InputError(f"{path} already exists and is not empty: choose another place, or ask to overwrite it.")
    if not (path / marker).is_file():
        raise InputError(f"{path} has no {marker}, so it isn't what would be written here: it won't be overwritten.")


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.{kind}")


def remove_abandoned(path: Path) -> None:
    """Temporary folders that a killed process left beside `path`. One that was moved aside is put back first."""
    pattern = re.compile(re.escape(f".{path.name}.") + r"(\d+)-[0-9a-f]{8}\.(tmp|old)")
    for other in path.parent.iterdir():
        found = pattern.fullmatch(other.name)
        if found is None or _lives(int(found[1])):
            continue
        if found[2] == "old" and not path.exists():
            other.rename(path)
        elif other.is_dir() and not other.is_symlink():
            shutil.rmtree(other, ignore_errors=True)
        else:
            with suppress(OSError):
                other.unlink()


def _lives(process: int) -> bool:
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _sync_folder(path: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def inside(root: Path, relative: str, *, where: str) -> Path:
    """`root / relative`, or BundleError if that leaves `root` by "..", an absolute path or a link."""
    pure = PurePosixPath(relative)
    if pure.is_absolute() or ".." in pure.parts or "\\" in relative or "\0" in relative or not pure.parts:
        raise BundleError(f"{where} names the path {relative!r}, which leaves the bundle's folder.")
    path = root.joinpath(*pure.parts)
    if not path.resolve().is_relative_to(root.resolve()):
        raise BundleError(f"{where} names the path {relative!r}, a link that leaves the bundle's folder.")
    return path


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
