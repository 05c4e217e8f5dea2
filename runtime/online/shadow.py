"""Shadow runs: some rows that left early are run to the end after they were answered, to see what they missed.

They give agreement with the last exit, which needs no label, and the rows with all exits known that ranking (EEFP) and
thresholds are judged on.
"""

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from threading import Condition, Lock, Thread
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from offramp.runtime import arrays
from offramp.runtime.arrays import Bools
from offramp.runtime.errors import CascadeClosed
from offramp.runtime.predictions import Records

MOST_ROWS, MOST_BYTES = 1024, 64 * 2**20
"""Of inputs that wait to be run."""
# Rows that are run at once: whoever is to be answered meanwhile waits for no more than these.
_AT_ONCE = 32

_log = logging.getLogger("offramp.online")

Inputs = Mapping[str, NDArray[Any]]


@dataclass(eq=False, slots=True)
class _Gap:
    """left: rows that pass before the next one is hit, at this chance."""

    chance: float = 0.0
    left: int = 0
    lock: Lock = field(default_factory=Lock)


@dataclass(frozen=True)
class Shadow:
    """Draws rows for shadow runs, each by itself: it depends on nothing that is known of them.

    share: in [0, 1], of the rows that leave early.
    """

    share: float
    rng: np.random.Generator = field(default_factory=np.random.default_rng)
    _gap: _Gap = field(default_factory=_Gap, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        arrays.fraction(self.share, "shadow", low_open=False, high_open=False)

    def chance(self, early: int, room: float) -> float:
        """The probability with which each of so many rows is drawn, so that all who are find room.

        It is `share`, less where these would hardly fit (by five standard deviations), and 0 without room. It must not
        follow who was drawn: rows weigh by its inverse.
        """
        if early <= room or not self.share:
            return self.share
        # x drawn rows are x + 5√x at most.
        likely = ((sqrt(25 + 4 * room) - 5) / 2) ** 2
        return min(self.share, likely / early) if likely >= 1 else 0.0

    def draw(self, unfinished: ArrayLike, chance: float | None = None) -> Bools:
        """(N,) which rows are run to the end, of those that lack an exit. chance: default `share`."""
        lacks = np.asarray(unfinished, bool)
        hits = self.hits(len(lacks), self.share if chance is None else chance)
        return np.zeros(len(lacks), bool) if hits is None else np.asarray(lacks & hits)

    def hits(self, rows: int, chance: float) -> Bools | None:
        """(rows,) which are run to the end if they lack an exit; None where none is.

        Drawn is how many rows pass from one hit to the next, which is geometric: few are hit, and to draw for each row
        numpy lets go of Python's lock, and waits for it again. A gap has no memory, so another chance begins another.
        """
        if chance <= 0:
            return None
        with self._gap.lock:
            if self._gap.chance != chance:
                self._gap.chance, self._gap.left = chance, int(self.rng.geometric(chance)) - 1
            if self._gap.left >= rows:
                self._gap.left -= rows
                return None
            hits = np.zeros(rows, bool)
            while self._gap.left < rows:
                hits[self._gap.left] = True
                self._gap.left += int(self.rng.geometric(chance))
            self._gap.left -= rows
            return hits


@dataclass(frozen=True, eq=False)
class Waiting:
    """Rows of one call that were drawn. names: request id and row of each. run: gives the records of their inputs."""

    names: Sequence[tuple[str, int]]
    inputs: Inputs
    axes: Mapping[str, int]
    run: Callable[[Inputs], Records]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.inputs.values())


def rows_of(inputs: Inputs, axes: Mapping[str, int], rows: Any) -> dict[str, NDArray[Any]]:
    """Copies of some rows. axes: each input's batch axis."""
    return {name: np.take(a, rows, axis=axes[name]) for name, a in inputs.items()}


class ShadowRuns:
    """Rows that wait, and the thread that runs them one batch after the other.

    Its priority is that of any thread: with a lower one it would be held up by others with Python's lock in its hands.
    It begins with the first row. Any number of threads may use this. lost: rows that were drawn and not run.
    """

    def __init__(self, complete: Callable[[Sequence[str], Sequence[int], Any, Any], Any]) -> None:
        """complete: takes what all exits said of rows, as `Store.complete`."""
        self._queue = _Queue(complete)
        self._end = weakref.finalize(self, _close, self._queue, os.getpid())

    @property
    def lost(self) -> int:
        return self._queue.lost

    def room(self, row_bytes: float) -> float:
        """How many rows of this size find a place now."""
        return self._queue.room(row_bytes)

    def put(self, drawn: Waiting) -> bool:
        """Leave rows to be run; it waits for nothing. False, and they are lost, if there is no room."""
        return self._queue.put(drawn)

    def wait(self, seconds: float) -> bool:
        """Until nothing is left to run, or so many seconds; whether that is so."""
        return self._queue.wait(seconds)

    def close(self) -> None:
        """Finish the batch that runs; what waits behind it is lost."""
        self._end()


class _Queue:
    """What thread and owner share: the thread holds nothing else, so that an owner that is forgotten can go."""

    def __init__(self, complete: Callable[[Sequence[str], Sequence[int], Any, Any], Any]) -> None:
        self.lost = 0
        self.thread: Thread | None = None
        self._complete = complete
        self._waiting: deque[Waiting] = deque()
        self._rows = self._bytes = 0
        self._closed = False
        self._changed = Condition()

    def room(self, row_bytes: float) -> float:
        if self._closed:
            return 0
        return max(0.0, min(MOST_ROWS - self._rows, (MOST_BYTES - self._bytes) / max(row_bytes, 1)))

    def put(self, drawn: Waiting) -> bool:
        rows, size = len(drawn.names), drawn.nbytes
        with self._changed:
            if rows > self.room(size / max(rows, 1)):
                self.lost += rows
                return False
            self._waiting.append(drawn)
            self._rows += rows
            self._bytes += size
            if self.thread is None:
                self.thread = Thread(target=self._run, name="offramp-shadow", daemon=True)
                self.thread.start()
            self._changed.notify_all()
            return True

    def wait(self, seconds: float) -> bool:
        until = monotonic() + seconds
        with self._changed:
            while self._rows and (left := until - monotonic()) > 0:
                self._changed.wait(left)
            return not self._rows

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self.thread is not None:
            self.thread.join()

    def _run(self) -> None:
        while (drawn := self._come()) is not None:
            for start in range(0, len(drawn.names), _AT_ONCE):
                self._one(drawn, slice(start, start + _AT_ONCE))
            with self._changed:
                self._waiting.popleft()
                self._rows -= len(drawn.names)
                self._bytes -= drawn.nbytes
                self._changed.notify_all()

    def _come(self) -> Waiting | None:
        """Rows to run, once there are any; None when it has ended."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                self.lost += self._rows
                return None
            return self._waiting[0]

    def _one(self, drawn: Waiting, part: slice) -> None:
        names = drawn.names[part]
        try:
            if self._closed:
                raise CascadeClosed("closed before these rows' turn.")
            seen = drawn.run(rows_of(drawn.inputs, drawn.axes, range(len(drawn.names))[part]))
            self._complete([id for id, _ in names], [row for _, row in names], seen.score, list(seen.logits))
        except CascadeClosed:
            self.lost += len(names)
        except Exception as error:  # they were answered long ago, and nobody waits for this
            _log.warning("%d rows couldn't be run to the end: %s", len(names), error)
            self.lost += len(names)


def _close(queue: _Queue, process: int) -> None:
    if os.getpid() == process:  # a forked child has no such thread
        queue.close()
