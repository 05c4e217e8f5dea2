"""The engine: rows wait here for their turn, run off the event loop, and come back as answers.

`Engine` is all that the protocols know. `DirectEngine` runs each request by itself; one that batches rows
of several requests fits behind the same three verbs.
"""

import asyncio
import math
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from offramp.runtime.errors import Stopped
from offramp.runtime.execution.answers import Answers
from offramp.runtime.inputs import rows_of
from offramp.server.errors import QueueFull, Unavailable
from offramp.server.metrics import Metrics
from offramp.server.operating_points import OperatingPoints
from offramp.server.patience import Patience
from offramp.server.query import PRIORITIES, Answer, Query

# A request runs in pieces of at most this many rows: eight of the cascade's batches, since the few half-filled ones
# at a piece's end cost under 2%. And of at most so many FLOPs, or as many as lately ran in so many seconds: one whose
# client has left stops soon, however long its rows are, and what a batch needs beside its rows stays small.
_PIECE, _PIECE_FLOPS, _PIECE_SECONDS = 1024, 32 * 10**9, 0.25
_LAST_BATCH = 0.5  # seconds that lanes get for what they have begun when nobody waits for it any more
_SHUTTING_DOWN = "the server is shutting down."


class Engine(Protocol):
    """What a protocol needs of an engine."""

    @property
    def ready(self) -> bool:
        """Whether `infer` takes new queries."""

    async def infer(self, query: Query, patience: Patience) -> Answer:
        """Answer a query.

        Raises QueueFull, Unavailable at once when they apply, whatever else is running. Cancelling the call takes
        the rows out of the queue, or stops them soon if they are running; so does patience that is over.
        """

    async def close(self, within: float) -> None:
        """Take no more queries, answer the ones that are here, and stop.

        within: seconds; what isn't answered by then raises Unavailable.
        """

    @property
    def stopped(self) -> bool:
        """Whether nothing runs any more."""


@dataclass(eq=False)
class _Job:
    query: Query
    loop: asyncio.AbstractEventLoop
    answer: "asyncio.Future[Answer]"
    arrived: float
    patience: Patience
    abandoned: bool = False  # set by the event loop, read by the lane between two batches

    def over(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.abandoned or self.patience.over

    def resolve(self, answer: Answer | BaseException) -> None:
        """Hand the outcome to the event loop; from a lane."""

        def set_result() -> None:
            if self.answer.done():
                return
            if isinstance(answer, BaseException):
                self.answer.set_exception(answer)
            else:
                self.answer.set_result(answer)

        try:
            self.loop.call_soon_threadsafe(set_result)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self.abandoned = True


@dataclass
class _Speed:
    """Rows, or FLOPs, a second, lately."""

    per_second: float = 0.0
    _weight: float = field(default=0.3, repr=False)

    def saw(self, amount: int, seconds: float) -> None:
        now = amount / max(seconds, 1e-9)
        self.per_second += (now - self.per_second) * (self._weight if self.per_second else 1.0)

    def seconds_for(self, amount: int) -> float:
        return min(amount / self.per_second, 60.0) if self.per_second else 1.0


def rows_at_once(row_flops: int, flops_per_second: float = 0.0) -> int:
    """Rows of a piece: a long row costs more, and who leaves waits for one piece to end.

    flops_per_second: what has run lately, 0 if nothing has.
    """
    most = max(_PIECE_FLOPS, flops_per_second * _PIECE_SECONDS)
    return max(1, min(_PIECE, int(most / max(row_flops, 1))))


class DirectEngine:
    """Runs each query by itself, in lanes: threads of their own, so the event loop is never held up.

    The queue is bounded in rows. Within a priority, first come, first served.
    """

    def __init__(
        self,
        points: OperatingPoints,
        metrics: Metrics,
        *,
        lanes: int = 1,
        max_queued_rows: int = 65_536,
    ) -> None:
        self._points = points
        self._metrics = metrics
        self._max_queued_rows = max_queued_rows
        self._lane_count = lanes
        self._lanes: list[threading.Thread] = []
        self._change = threading.Condition()  # guards everything below
        self._waiting: dict[int, OrderedDict[_Job, None]] = {p: OrderedDict() for p in PRIORITIES}
        self._queued_rows = 0
        self._unfinished = 0
        self._open, self._last = True, math.inf
        self._jobs: set[_Job] = set()  # of callers that wait; the event loop's alone
        self._rows, self._flops = _Speed(), _Speed()

    @property
    def ready(self) -> bool:
        return self._open

    @property
    def queued_rows(self) -> int:
        """Rows that wait; those that run have left the queue."""
        return self._queued_rows

    async def infer(self, query: Query, patience: Patience) -> Answer:
        if not self._open:
            raise Unavailable(_SHUTTING_DOWN)
        job = self._admit(query, patience)
        self._jobs.add(job)
        try:
            return await job.answer
        finally:
            self._jobs.discard(job)
            self._withdraw(job)

    async def close(self, within: float = math.inf) -> None:
        first, self._open = self._open, False
        # Who closes again waits no longer than who closed first.
        last = self._last = min(self._last, time.monotonic() + within)
        while self._unfinished and time.monotonic() < last:
            await asyncio.sleep(0.02)
        for job in self._jobs:
            if not job.answer.done():
                job.answer.set_exception(Unavailable(_SHUTTING_DOWN))
        with self._change:
            self._change.notify_all()
        if first:
            last = max(last, time.monotonic() + _LAST_BATCH)
        while not self.stopped and time.monotonic() < last:
            await asyncio.sleep(0.005)

    @property
    def stopped(self) -> bool:
        return not any(lane.is_alive() for lane in self._lanes)

    def _admit(self, query: Query, patience: Patience) -> _Job:
        loop = asyncio.get_running_loop()
        job = _Job(query, loop, loop.create_future(), time.monotonic(), patience)
        with self._change:
            if self._queued_rows + query.rows > self._max_queued_rows:
                raise QueueFull(
                    f"the queue is full: {self._queued_rows} rows wait, {query.rows} more would pass "
                    f"{self._max_queued_rows}. Try again later.",
                    self._rows.seconds_for(self._queued_rows),
                )
            self._waiting[query.priority][job] = None
            self._count(query.rows)
            self._unfinished += 1
            self._start_lanes()
            self._change.notify()
        return job

    def _withdraw(self, job: _Job) -> None:
        """The caller is done with a job: answered, timed out or cancelled."""
        with self._change:
            job.abandoned = True
            if job in self._waiting[job.query.priority]:
                del self._waiting[job.query.priority][job]
                self._count(-job.query.rows)
                self._unfinished -= 1

    def _count(self, rows: int) -> None:
        self._queued_rows += rows
        self._metrics.queued(self._queued_rows)

    def _start_lanes(self) -> None:
        # On the first query rather than at construction: a fork in between would lose the threads.
        while len(self._lanes) < self._lane_count:
            lane = threading.Thread(target=self._lane, name=f"offramp-lane-{len(self._lanes)}", daemon=True)
            self._lanes.append(lane)
            lane.start()

    def _lane(self) -> None:
        while (job := self._next()) is not None:
            started = time.monotonic()
            self._metrics.waited(started - job.arrived)
            try:
                answer = self._run(job)
                if answer is not None:
                    self._rows.saw(job.query.rows, time.monotonic() - started)
                    job.resolve(answer)
            except BaseException as error:
                job.resolve(error)
            finally:
                with self._change:
                    self._unfinished -= 1
                del job

    def _next(self) -> _Job | None:
        """The job whose turn it is; waits for one. None when the engine has closed."""
        with self._change:
            while True:
                for level in self._waiting.values():
                    if level:
                        job, _ = level.popitem(last=False)
                        self._count(-job.query.rows)
                        return job
                if not self._open:
                    return None
                self._change.wait()

    def _run(self, job: _Job) -> Answer | None:
        """Answer a job, piece by piece; None if its caller leaves or its time is over meanwhile."""
        query = job.query
        cascade = self._points.cascade(query.operating_point, query.max_exit)
        answers = Answers(query.rows, len(cascade.classes) if query.probabilities else None)
        fetch = ("probabilities",) if query.probabilities else ()
        for group in query.groups:
            at, row_flops = 0, int(cascade.row_flops(group.sizes)[query.max_exit])
            while at < len(group.positions):
                rows = slice(at, at + rows_at_once(row_flops, self._flops.per_second))
                piece = rows_of(group.arrays, cascade.manifest, rows.start, rows.stop)
                started = time.monotonic()
                try:
                    out = cascade.predict(piece, fetch=fetch, stop=job.over)
                except Stopped:
                    return None
                self._flops.saw(sum(out.executed), time.monotonic() - started)
                self._metrics.ran(out.executed)
                answers.place(group.positions[rows], out)
                at = rows.stop
        if job.over():
            return None
        whole = sum(int(cascade.row_flops(group.sizes)[-1]) * len(group.positions) for group in query.groups)
        return Answer.of(answers, flops_full=whole)
