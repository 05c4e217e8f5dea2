"""Progress on long work: a bar where someone is looking, a line now and then where not."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    def __call__(self, done: int, total: int) -> None: ...


@contextmanager
def bar(title: str) -> Iterator[Advance]:
    """A function to call with (done, total); it shows progress and the time left on stderr."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield _Lines(title)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(title)
        return
    with Progress(console=console) as progress:
        task = progress.add_task(title, start=False, total=None)
        begun = False

        def advance(done: int, total: int) -> None:
            nonlocal begun
            if begun:
                progress.update(task, completed=done, total=total)
            else:  # the time left counts from here, not from what an earlier run did
                progress.reset(task, start=True, completed=done, total=total)
                begun = True

        yield advance


class _Lines:
    """One line at the start of the last step, and every ten seconds before."""

    _EVERY = 10.0

    def __init__(self, title: str) -> None:
        self._title = title
        self._started = self._last = time.monotonic()
        self._first: int | None = None  # what was done before, by a run that was cut short

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._started = done, now
        if now - self._last < self._EVERY and done < total:
            return
        self._last = now
        spent = now - self._started
        made = done - self._first
        left = f", {spent / made * (total - done):.0f} s left" if made and done < total else f" in {spent:.1f} s"
        print(f"{self._title}: {done}/{total}{left}", file=sys.stderr)
