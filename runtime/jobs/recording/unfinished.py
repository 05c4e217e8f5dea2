"""Work that survives being killed: a hidden folder beside the result, with a lock and a journal of what is done."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from offramp.runtime.errors import InputError
from offramp.runtime.files import check_new_folder, put_in_place, remove_abandoned, write_atomically
from offramp.runtime.jobs.lock import take

JOURNAL = "journal.json"
_LOCK = "lock"


class Unfinished:
    """The hidden folder `.NAME.unfinished`: `work` becomes the result, the journal says how far it is.

    Held by one process at a time. It outlives the process, unless `discard` or `finish` ends it.
    """

    def __init__(self, target: Path, marker: str, replace: bool) -> None:
        self._target, self._marker, self._replace = target, marker, replace
        self.folder = folder_of(target)
        self.work = self.folder / "work"

    def read(self, kind: type[Any]) -> Any:
        """The journal of an earlier process, or None where there is none that can be read."""
        try:
            return msgspec.json.decode((self.folder / JOURNAL).read_bytes(), type=kind)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def write(self, journal: Any) -> None:
        write_atomically(self.folder / JOURNAL, msgspec.json.encode(journal))

    def restart(self) -> None:
        """Forget what an earlier process did."""
        (self.folder / JOURNAL).unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()

    def finish(self) -> None:
        """`work` is whole: make it the result."""
        # Somebody else may have written there meanwhile.
        check_new_folder(self._target, marker=self._marker, replace=self._replace)
        put_in_place(self.work, self._target)
        self.discard()

    @property
    def kept(self) -> str | None:
        """A sentence on where finished work is; None where there is none. What `work` has counts by the journal."""
        others = (path for path in self.folder.iterdir() if path != self.work and path.name != _LOCK)
        done = any(one.is_file() for path in others for one in (path, *path.rglob("*")))
        return f"What is finished is kept in {self.folder}: the same command goes on from there." if done else None

    def discard(self) -> None:
        for path in self.folder.iterdir():
            if path.name == _LOCK:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        # The lock goes last: whoever waits for it finds that its file is gone, and looks again.
        with suppress(OSError):
            (self.folder / _LOCK).unlink()
            self.folder.rmdir()


def folder_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.unfinished")


@contextmanager
def unfinished(target: Path, *, marker: str, replace: bool, keep: Path | None = None) -> Iterator[Unfinished]:
    """Hold the unfinished work for `target`. marker, replace, keep: as for `files.new_folder`.

    A KeyboardInterrupt from inside gets a note that says where finished work is kept.
    Raises InputError if another process holds it, or `target` exists and isn't to be replaced.
    """
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    found = Unfinished(target, marker, replace)
    lock = take(found.folder / _LOCK)
    if lock is None:
        raise InputError(f"{target}: another process is writing it. Wait for it to end, or choose another place.")
    try:
        remove_abandoned(target)
        try:
            check_new_folder(target, marker=marker, replace=replace, keep=keep)
        except InputError:
            if not found.work.exists():  # just made, or left by a process killed after its result was in place
                found.discard()
            raise
        yield found
    except KeyboardInterrupt as stopped:
        if found.kept:
            stopped.add_note(found.kept)
        raise
    finally:
        lock.close()
