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

from offramp.runtime.execution.answers import Answers
from offramp.runtime.inputs import rows_of
from offramp.server.errors import DeadlinePassed, QueueFull, Unavailable
from offramp.server.metrics import Metrics
from offramp.server.operating_points import OperatingPoints
from offramp.server.query import PRIORITIES, Answer, Query

# A request runs in pieces of this many rows, so that one whose client has left stops soon. Eight of the
# cascade's batches: the few half-filled batches at a piece's end cost under 2%.
_PIECE = 1024


class Engine(Protocol):
    """What a protocol needs of an engine."""

    @property
    def ready(self) -> bool:
        """Whether `infer` takes new queries."""

    async def infer(self, query: Query) -> Answer:
        """Answer a query.

        Raises QueueFull, Unavailable, DeadlinePassed at once when they apply, whatever else is running.
        Cancelling the call takes the rows out of the queue, or stops them soon if they are running.
        """

    async def close(self) -> None:
        """Take no more queries, answer the ones that are here, and stop."""


@dataclass(eq=False)
class _Job:
    query: Query
    loop: asyncio.AbstractEventLoop
    answer: "asyncio.Future[Answer]"
    arrived: float
    deadline: float
    abandoned: bool = False  # set by the event loop, read by the lane between two pieces

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
    """Rows a second, lately."""

    rows_per_second: float = 0.0
    _weight: float = field(default=0.3, repr=False)

    def saw(self, rows: int, seconds: float) -> None:
        now = rows / max(seconds, 1e-9)
        self.rows_per_second += (now - self.rows_per_second) * (self._weight if self.rows_per_second else 1.0)

    def seconds_for(self, rows: int) -> float:
        return min(rows / self.rows_per_second, 60.0) if self.rows_per_second else 1.0


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
        timeout: float = math.inf,
    ) -> None:
        self._points = points
        self._metrics = metrics
        self._max_queued_rows = max_queued_rows
        self._timeout = timeout
        self._lane_count = lanes
        self._lanes: list[threading.Thread] = []
        self._change = threading.Condition()  # guards everything below
        self._waiting: dict[int, OrderedDict[_Job, None]] = {p: OrderedDict() for p in PRIORITIES}
        self._queued_rows = 0
        self._unfinished = 0
        self._open = True
        self._speed = _Speed()
        metrics.watch_queue(lambda: self._queued_rows)

    @property
    def ready(self) -> bool:
        return self._open

    @property
    def queued_rows(self) -> int:
        """Rows that wait; those that run have left the queue."""
        return self._queued_rows

    async def infer(self, query: Query) -> Answer:
        if not self._open:
            raise Unavailable("the server is shutting down.")
        job = self._admit(query)
        try:
            async with asyncio.timeout_at(job.loop.time() + job.deadline - time.monotonic()):
                return await job.answer
        except TimeoutError as error:
            raise DeadlinePassed(f"timeout: no answer within {job.deadline - job.arrived:g} s, given up.") from error
        finally:
            self._withdraw(job)

    async def close(self) -> None:
        self._open = False
        while self._unfinished:
            await asyncio.sleep(0.02)
        with self._change:
            self._change.notify_all()
        for lane in self._lanes:
            await asyncio.to_thread(lane.join)
        self._lanes.clear()

    def _admit(self, query: Query) -> _Job:
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        timeout = self._timeout if query.timeout is None else query.timeout
        job = _Job(query, loop, loop.create_future(), now, now + timeout)
        with self._change:
            if self._queued_rows + query.rows > self._max_queued_rows:
                raise QueueFull(
                    f"the queue is full: {self._queued_rows} rows wait, {query.rows} more would pass "
                    f"{self._max_queued_rows}. Try again later.",
                    self._speed.seconds_for(self._queued_rows),
                )
            self._waiting[query.priority][job] = None
            self._queued_rows += query.rows
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
                self._queued_rows -= job.query.rows
                self._unfinished -= 1

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
                    self._speed.saw(job.query.rows, time.monotonic() - started)
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
                        self._queued_rows -= job.query.rows
                        return job
                if not self._open:
                    return None
                self._change.wait()

    def _run(self, job: _Job) -> Answer | None:
        """Answer a job, piece by piece; None if its caller leaves or its deadline passes meanwhile."""
        query = job.query
        cascade = self._points.cascade(query.operating_point, query.max_exit)
        answers = Answers(query.rows, len(cascade.classes) if query.probabilities else None)
        fetch = ("probabilities",) if query.probabilities else ()
        for group in query.groups:
            for start in range(0, len(group.positions), _PIECE):
                if job.abandoned or time.monotonic() >= job.deadline:
                    return None
                piece = rows_of(group.arrays, cascade.manifest, start, start + _PIECE)
                out = cascade.predict(piece, fetch=fetch)
                self._metrics.ran(out.executed)
                answers.place(group.positions[start : start + _PIECE], out)
        whole = sum(int(cascade.row_flops(group.sizes)[-1]) * len(group.positions) for group in query.groups)
        return Answer.of(answers, flops_full=whole)
