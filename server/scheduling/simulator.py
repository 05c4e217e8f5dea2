"""The scheduler's own code under a clock that isn't real: policies are tried a thousand times faster, always alike.

A simulation runs `Dispatch` with lanes that are only numbers. What a batch does is said by its way, which may be a
real one or a simulated one; how long it takes is said by whoever simulates.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.server.errors import QueueFull
from offramp.server.scheduling.dispatch import Dispatch
from offramp.server.scheduling.job import Rows
from offramp.server.scheduling.outcome import Outcome
from offramp.server.scheduling.scheduler import Batch, Place, Waiting, Way

Do = Callable[[], None]
Seconds = Callable[[Batch, Outcome, int], float]
"""How long a batch takes: the batch, what becomes of it, and how many lanes are busy with it among them."""

_NO_FLOPS = np.zeros(1, np.int64)


@dataclass(eq=False)
class Asked:
    """A simulated request.

    rows: how many. leaves: (rows,) the stage behind which each leaves. sizes: of the symbolic axes. cancelled: seconds
    after its arrival at which its client leaves, or its time is over; None if it stays.
    """

    arrived: float
    leaves: NDArray[np.int64]
    sizes: tuple[int, ...] = ()
    priority: int = 5
    cancelled: float | None = None
    rows: int = field(init=False)
    queued: int = field(init=False)
    unanswered: int = field(init=False)
    settled: NDArray[np.float64] = field(init=False)
    waits: list[Any] = field(init=False, default_factory=list)
    abandoned: bool = field(init=False, default=False)
    expired: bool = field(init=False, default=False)
    refused: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.rows = self.queued = self.unanswered = len(self.leaves)
        self.settled = np.full(self.rows, np.nan)  # when each row was answered

    @property
    def answered(self) -> float:
        """When its last row was; NaN if it never was."""
        return float(self.settled.max())

    def over(self) -> bool:
        return self.abandoned

    def group(self) -> Rows:
        return Rows({}, None, np.arange(self.rows), self.sizes, _NO_FLOPS)


def _note(job: Any, ids: Any, now: float) -> None:
    job.settled[ids] = now


class Simulation:
    """Requests, lanes and a clock."""

    def __init__(
        self,
        lanes: int,
        seconds: Seconds,
        *,
        max_queued_rows: int = 65_536,
        told: Callable[[Any, Any, float], None] | None = None,
        rouse: Callable[[bool, Do], None] | None = None,
    ) -> None:
        """told: called with a job, the ids of its rows that have just been answered, and the time. rouse: called for
        each lane that has something to do, with whether it slept, otherwise it has just ended a batch, and with what
        is to be called when it begins; lanes begin at once without it.
        """
        self._told, self._rouse = told or _note, rouse
        self.dispatch = Dispatch(max_queued_rows)
        self.now = 0.0
        self.batches: list[tuple[float, float, Batch]] = []  # when it began, when it ended, what it was
        self._seconds, self._lanes = seconds, lanes
        self._busy = self._waking = 0
        self._events: list[tuple[float, int, Do]] = []
        self._numbers = itertools.count()

    def at(self, when: float, do: Do) -> None:
        """Have something done at a time."""
        heapq.heappush(self._events, (when, next(self._numbers), do))

    def ask(self, job: Any, way: Way, groups: Sequence[Rows]) -> None:
        """A job that comes at its `arrived`. One that is turned away is `refused`."""

        self.at(job.arrived, lambda: self.admit(job, way, groups))

    def admit(self, job: Any, way: Way, groups: Sequence[Rows]) -> None:
        """A job that comes now."""
        try:
            self.dispatch.admit(job, way, list(groups))
        except QueueFull:
            job.refused = True

    def forget(self, job: Any, when: float) -> None:
        """Its client leaves."""
        self.at(when, lambda: self.dispatch.forget(job))

    def run(self) -> None:
        """Until nothing happens any more."""
        events = self._events
        while events:
            self.now, _, do = heapq.heappop(events)
            do()
            if not events or events[0][0] > self.now:
                self._wake()

    def _wake(self) -> None:
        """Idle lanes see to what waits: one for each row, as the engine wakes one for each request."""
        for _ in range(self._lanes - self._busy - self._waking):
            if self._waking >= len(self.dispatch):
                return
            self._call(True)

    def _call(self, slept: bool) -> None:
        self._waking += 1
        if self._rouse is None:
            self._begin()
        else:
            self._rouse(slept, self._begin)

    def _begin(self) -> None:
        """An idle lane takes what is next."""
        self._waking -= 1
        taken = self.dispatch.take(self.now)
        if taken is None:
            return
        batch, _ = taken
        self._busy += 1
        outcome: Outcome = batch.place.way.run(batch)
        self.batches.append((self.now, math.nan, batch))
        ended = partial(self._end, len(self.batches) - 1, outcome)
        self.at(self.now + self._seconds(batch, outcome, self._busy), ended)

    def _end(self, number: int, outcome: Outcome) -> None:
        self._busy -= 1
        began, _, batch = self.batches[number]
        self.batches[number] = began, self.now, batch
        self.dispatch.ran(batch, outcome, began, self.now)
        for job, ids in outcome.settled:
            if not job.over():
                self._told(job, ids, self.now)
        if self._rouse is not None and self._waking < len(self.dispatch):
            self._call(False)


class SimulatedWay:
    """Rows of `Asked` requests, through a cascade graph or stage by stage.

    row_flops: what one row costs in each stage, at some sizes.
    """

    mixes = True

    def __init__(
        self, row_flops: Callable[[tuple[int, ...]], Sequence[int]], *, stages: bool, padded: bool = True
    ) -> None:
        """stages: whether rows go stage by stage. padded: whether rows of several sizes may share a batch."""
        self._row_flops, self.stages, self._padded = row_flops, stages, padded

    def waits_at(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return sizes

    def joins(self, stage: int) -> bool:
        return self._padded and not self.stages

    def flops(self, sizes: tuple[int, ...], stage: int) -> int:
        costs = self._row_flops(sizes)
        return int(costs[stage]) if self.stages else int(sum(costs))

    def run(self, batch: Batch) -> Outcome:
        outcome, k = Outcome(), batch.place.stage
        last = len(self._row_flops(batch.place.sizes)) - 1
        for part in batch.parts:
            job, ids = part.waiting.owner, part.source.ids[part.start : part.stop]
            gone = job.leaves[ids] <= k if self.stages and k < last else np.ones(len(ids), bool)
            if gone.any():
                outcome.settled.append((job, ids[gone]))
            if not gone.all():
                rows = Rows({}, None, ids[~gone], part.source.sizes, _NO_FLOPS)
                before = part.waiting.before + part.start
                place = Place(self, k + 1, batch.place.sizes)
                outcome.onward.append(
                    (place, Waiting(job, len(rows), rows, due=part.waiting.due, before=before, since=0.0))
                )
        return outcome

    def through(self, batch: Batch) -> list[int]:
        """Rows of a batch that go through each stage that it runs."""
        leaves = np.concatenate([p.waiting.owner.leaves[p.source.ids[p.start : p.stop]] for p in batch.parts])
        if self.stages:
            return [batch.rows]
        return [int(np.count_nonzero(leaves >= k)) for k in range(len(self._row_flops(batch.place.sizes)))]
