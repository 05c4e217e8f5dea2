"""From a request's arrival to its rows' last answers, without threads and clocks: what engine and simulator share.

Everything here runs under one lock of its owner's, or in one thread; the time now comes from outside.
"""

import math
from collections.abc import Callable

from offramp.server.errors import QueueFull
from offramp.server.scheduling.job import Job, Rows
from offramp.server.scheduling.outcome import Outcome
from offramp.server.scheduling.scheduler import Batch, Place, Scheduler, Waiting, Way, due
from offramp.server.scheduling.speed import Speed


class Dispatch:
    """The rows of all requests that are here."""

    def __init__(self, max_queued_rows: int, counted: Callable[[int], None] = lambda rows: None) -> None:
        """max_queued_rows: that may wait for their first batch. counted: told how many do, when that changes."""
        self._max_queued_rows, self._counted = max_queued_rows, counted
        self.speed = Speed()
        self._scheduler = Scheduler(self._limit, self._linger, self.speed.worth, self.speed.row_seconds)
        self.queued_rows = 0
        self.queued_jobs = 0
        """Those of whose rows none has run."""

    def __len__(self) -> int:
        """Rows that wait anywhere, survivors of batches among them."""
        return len(self._scheduler)

    def check_room(self, rows: int) -> None:
        """Raises QueueFull if the queue has no room for so many rows more."""
        if self.queued_rows + rows > self._max_queued_rows:
            raise QueueFull(
                f"the queue is full: {self.queued_rows} rows wait, {rows} more would pass {self._max_queued_rows}. "
                "Try again later.",
                self.speed.seconds_for(self.queued_rows),
            )

    def admit(self, job: Job, way: Way, groups: list[Rows]) -> None:
        """A job's rows come to the queue, those of one shape in a group. Raises QueueFull."""
        rows = job.queued
        self.check_room(rows)
        first, before = due(job.arrived, job.priority), 0
        for group in groups:
            waiting = Waiting(job, len(group), group, due=first, before=before, since=job.arrived)
            self._add(Place(way, 0, way.waits_at(group.sizes)), waiting)
            before += len(group)
        self.queued_jobs += 1
        self._count(rows)

    def expected_seconds(self, way: Way) -> float:
        """What all that waits should take as one batch; infinite if any of it isn't in front of this way."""
        flops = self._scheduler.flops_in_front_of(way)
        return math.inf if flops is None else self.speed.expected_seconds(way, flops)

    def take(self, now: float) -> tuple[Batch, list[Job]] | None:
        """The batch that is next, and those jobs of whose rows none has run before; None if nothing waits."""
        batch = self._scheduler.take(now)
        if batch is None:
            return None
        begun: list[Job] = []
        if not batch.place.stage:
            for part in batch.parts:
                job: Job = part.waiting.owner
                if job.queued == job.rows:
                    begun.append(job)
                    self.queued_jobs -= 1
                job.queued -= part.stop - part.start
            self._count(-batch.rows)
        return batch, begun

    def ran(
        self, batch: Batch, outcome: Outcome, started: float, ended: float, *, undisturbed: bool = False
    ) -> list[Job]:
        """A batch has run. Returns the jobs whose deadline had passed and whose rows all have some answer now.

        undisturbed: as `Speed.ran` takes it.
        """
        row_flops = self._row_flops(batch.place)
        self.speed.ran(batch.place, batch.rows, row_flops, ended - started, undisturbed=undisturbed)
        answered = sum(len(ids) for _, ids in outcome.settled)
        if answered:
            self.speed.answered(answered, ended - started)
        for job, rows in outcome.first:
            job.unanswered -= rows
        for place, waiting in outcome.onward:
            waiting.since = ended
            if not (waiting.owner.expired or waiting.owner.over()):
                self._add(place, waiting)
        return [job for job, _ in outcome.first if job.expired and not job.unanswered]

    def forget(self, job: Job) -> None:
        """Nobody waits for a job any more: what hasn't run yet never will."""
        job.abandoned = True
        for place, waiting in job.waits:
            self._scheduler.forget(place, waiting)
        job.waits.clear()
        self.queued_jobs -= job.queued == job.rows > 0
        self._count(-job.queued)
        job.queued = 0

    def expire(self, job: Job) -> bool:
        """A job's deadline has passed: rows that have any answer go no further. Returns whether all have one."""
        job.expired = True
        for place, waiting in job.waits:
            if place.stage:
                self._scheduler.forget(place, waiting)
        return not job.unanswered

    def _add(self, place: Place, waiting: Waiting) -> None:
        self._scheduler.add(place, waiting)
        waiting.owner.waits.append((place, waiting))

    def _count(self, rows: int) -> None:
        if rows:
            self.queued_rows += rows
            self._counted(self.queued_rows)

    def _row_flops(self, place: Place) -> int:
        return place.way.flops(place.sizes, place.stage)

    def _limit(self, place: Place) -> int:
        return self.speed.rows_at_once(place, self._row_flops(place))

    def _linger(self) -> float:
        return 2 * self.speed.batch_seconds
