"""What a command prints, and what becomes of it where it can't be taken: a full disk, a closed descriptor, letters
that the terminal's encoding lacks."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO, cast

from offramp.runtime.errors import OutputLost

# What commands draw with, for a stream that has none of it.
_PLAINLY = {"…": "...", **dict.fromkeys("█▉▊▋▌", "#"), **dict.fromkeys("▍▎▏", "")}


class _Guarded:
    """A stream that takes every letter, and whose failures are told from those of the files that a command works on."""

    def __init__(self, stream: TextIO | None) -> None:
        """stream: None, Python's way to say that the descriptor is closed, takes nothing."""
        self._stream = stream

    def write(self, text: str) -> int:
        if self._stream is None:
            raise OutputLost("stdout is closed")
        with _told():
            try:
                return self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(_spelled(text, self._stream.encoding, _PLAINLY))
                return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            with _told():
                self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def print_json(text: str) -> None:
    """JSON to stdout, newline and all; letters that its encoding lacks as JSON's own escapes, which mean the same."""
    sys.stdout.write(_spelled(text, getattr(sys.stdout, "encoding", None) or "utf-8", {}))


def _spelled(text: str, encoding: str, plainly: Mapping[str, str]) -> str:
    """A text as an encoding can have it. plainly: what stands for a letter that it lacks, JSON's escape by default."""

    def fits(part: str) -> bool:
        try:
            part.encode(encoding)
        except UnicodeEncodeError:
            return False
        return True

    if fits(text):
        return text
    return "".join(one if fits(one) else plainly.get(one, json.dumps(one)[1:-1]) for one in text)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeError):
            raise
        raise OutputLost(getattr(error, "strerror", None) or str(error)) from error


@contextmanager
def output() -> Iterator[None]:
    """Run a command with a stdout that is written out at its end, however it ends. Raises OutputLost."""
    guarded = _Guarded(sys.stdout)
    try:
        with redirect_stdout(cast(TextIO, guarded)):
            try:
                yield
            finally:
                guarded.flush()
    except OutputLost:
        discard()
        raise


def discard() -> None:
    """Let nothing more be written to stdout: what is left in its buffer would fail once more at the exit."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
