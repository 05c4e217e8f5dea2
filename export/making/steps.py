"""Steps that are done once: each leaves a file or folder, and a mark of what it was made from."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from offramp.runtime.errors import InputError
from offramp.runtime.files import write_atomically

_MARKS = "steps.json"
Say = Callable[[str], None]


class Steps:
    """Steps in a folder, one behind the other: one that changed is done again, and all that follow it.

    A mark is set once its step is whole, so a step that was cut short is begun again, or goes on if it can by itself.
    """

    def __init__(self, folder: Path, say: Say) -> None:
        self._folder, self._say = folder, say
        self._before = ""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._marks = msgspec.json.decode((folder / _MARKS).read_bytes(), type=dict[str, str])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            self._marks = {}

    def do(self, name: str, title: str, given: Any, make: Callable[[Path], None]) -> Path:
        """What step `name` makes: from before, if it was made of the same; else by make(path).

        given: all that decides the result, but for what the steps before it made.
        """
        path = self._folder / name
        mark = hashlib.sha256(json.dumps([self._before, name, given], sort_keys=True).encode()).hexdigest()
        self._before = mark
        if self._marks.get(name) == mark and path.exists():
            self._say(f"{title}: done before")
            return path
        self._say(f"{title} …")
        if self._marks.pop(name, None) is not None:
            self._write()
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        make(path)
        if not path.exists():
            raise InputError(f"{path} isn't there though it was just written: another program removed it.")
        self._marks[name] = mark
        self._write()
        return path

    def _write(self) -> None:
        write_atomically(self._folder / _MARKS, msgspec.json.encode(self._marks))
