"""The engine: rows of many requests wait here, run together off the event loop, and are answered when they leave.

`Engine` is all that the protocols know.
"""

import asyncio
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from offramp.runtime.execution.answers import Ids
from offramp.server.errors import SHUTTING_DOWN, Unavailable
from offramp.server.metrics import Metrics
from offramp.server.operating_points import OperatingPoints
from offramp.server.patience import Patience
from offramp.server.query import Answer, Query
from offramp.server.recalibration.keeping import Keeping
from offramp.server.scheduling.choice import Ways
from offramp.server.scheduling.dispatch import Dispatch
from offramp.server.scheduling.job import Job, Rows
from offramp.server.scheduling.outcome import Left, Outcome
from offramp.server.scheduling.padding import Padding
from offramp.server.scheduling.scheduler import Batch, Way

_LAST_BATCH = 0.5  # seconds that lanes get for what they have begun when nobody waits for it any more
# What takes less runs in the event loop: to wake a lane and be told takes .25 ms, where a small model's row takes .16,
# and more for each request that the loop has to read and answer meanwhile, for it has Python's lock then.
_SHORT, _SHORT_REQUEST = 0.001, 0.0003  # with .5 ms the digits' rows went to lanes where the machine was slow
_HERE = -1  # the event loop as a lane
_log = logging.getLogger("uvicorn.error.offramp")
Told = Callable[[Job, Ids], None]


class Engine(Protocol):
    """What a protocol needs of an engine."""

    @property
    def ready(self) -> bool:
        """Whether `infer` takes new queries, and those that are here get on."""

    def check_room(self, rows: int) -> None:
        """Raises QueueFull, Unavailable if a query of so many rows couldn't be taken now; any thread may ask."""

    async def infer(self, query: Query, patience: Patience, told: Told | None = None) -> Answer:
        """Answer a query.

        told: called with the job and the ids of its rows, each time that some have been answered.

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


@dataclass(frozen=True)
class Overload:
    """operating_point: for requests that name none, while at least so many rows wait."""

    operating_point: str
    rows: int


class _Caller:
    """Who waits for a job, and where."""

    def __init__(self, told: Told | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[Answer] = self.loop.create_future()
        self.told = told


class BatchingEngine:
    """Batches of all requests' rows, run by lanes: threads that pick their work themselves under one lock."""

    def __init__(
        self,
        points: OperatingPoints,
        metrics: Metrics,
        *,
        lanes: int = 1,
        max_queued_rows: int = 65_536,
        batching: str = "auto",
        stalled_after: float = 60.0,
        overload: Overload | None = None,
        keeping: Keeping | None = None,
    ) -> None:
        """max_queued_rows: that may wait in all. batching: one of BATCHING. stalled_after: seconds that a batch may
        run until the engine isn't ready any more. keeping: has what exits say of answered rows.
        """
        self._points, self._metrics, self._overload, self._keeping = points, metrics, overload, keeping
        self._lane_count, self._stalled_after = lanes, stalled_after
        self._last_exit = len(points.exits) - 1
        self._padding = Padding(points.cascade(points.default, self._last_exit).manifest)
        self._ways = Ways(points, self._padding, batching)
        metrics.batching(self._ways.through_graph)
        self._lanes: list[threading.Thread] = []
        self._change = threading.Condition()  # guards everything below
        self._dispatch = Dispatch(max_queued_rows, metrics.queued)
        self._unfinished = 0
        self._began: dict[int, float] = {}  # since when each busy lane runs its batch
        self._given_back = False  # whether what waits is left to the event loop, though a lane is idle
        self._loop: asyncio.AbstractEventLoop | None = None  # from which the newest job came
        self._open, self._last = True, math.inf
        self._callers: dict[Job, _Caller] = {}  # changed by the event loop alone

    @property
    def ready(self) -> bool:
        stuck = time.monotonic() - self._stalled_after
        return self._open and not any(began < stuck for began in list(self._began.values()))

    @property
    def queued_rows(self) -> int:
        """Rows that wait; those that run have left the queue."""
        return self._dispatch.queued_rows

    def measure(self, seconds: float = 1.0) -> None:
        """Time what blocks take here, before the first query: how rows are batched is decided by that."""
        self._ways.measure(seconds)

    def check_room(self, rows: int) -> None:
        if not self._open:
            raise Unavailable(SHUTTING_DOWN)
        self._dispatch.check_room(rows)

    async def infer(self, query: Query, patience: Patience, told: Told | None = None) -> Answer:
        if not self._open:
            raise Unavailable(SHUTTING_DOWN)
        job, way = self._job(query, patience)
        if not query.rows:
            return job.answer()
        caller = self._callers[job] = _Caller(told)
        timer = None
        try:
            if self._admit(job, way):
                await asyncio.sleep(0)  # whoever else is at the door comes in
                if job.queued:  # no other's batch has taken it along
                    self._run_here_or_wake_a_lane(way)
            if query.deadline is not None:
                timer = caller.loop.call_later(query.deadline, self._expire, job)
            return await caller.answer
        finally:
            if timer is not None:
                timer.cancel()
            del self._callers[job]
            self._withdraw(job)

    async def close(self, within: float = math.inf) -> None:
        first, self._open = self._open, False
        # Who closes again waits no longer than who closed first.
        last = self._last = min(self._last, time.monotonic() + within)
        while self._unfinished and time.monotonic() < last:
            await asyncio.sleep(0.02)
        for caller in self._callers.values():
            if not caller.answer.done():
                caller.answer.set_exception(Unavailable(SHUTTING_DOWN))
        with self._change:
            self._change.notify_all()
        if first:
            last = max(last, time.monotonic() + _LAST_BATCH)
        while not self.stopped and time.monotonic() < last:
            await asyncio.sleep(0.005)

    @property
    def stopped(self) -> bool:
        return not any(lane.is_alive() for lane in self._lanes)

    def _job(self, query: Query, patience: Patience) -> tuple[Job, Way]:
        if query.seen is not None:
            return self._shadow(query, patience)
        point, overload = query.operating_point, self._overload
        if overload is not None and not query.named and self.queued_rows >= overload.rows:
            point = overload.operating_point
        cascade = self._points.cascade(point, query.max_exit)
        job = Job(query, cascade.route, patience, time.monotonic())
        job.point, job.version = point, self._points.version
        if point != query.operating_point or query.max_exit != self._last_exit:
            job.own = self._points.cascade(query.operating_point, self._last_exit).route
        return job, self._ways.of(job, cascade)

    def _shadow(self, query: Query, patience: Patience) -> tuple[Job, Way]:
        cascade = self._points.whole()
        job = Job(query, cascade.route, patience, time.monotonic())
        return job, self._ways.of(job, cascade)

    def _admit(self, job: Job, way: Way) -> bool:
        """A job's rows come to the queue. Returns whether the event loop may run them; else a lane has been told."""
        groups = [
            Rows(g.arrays, None, g.positions, self._padding.sizes(g.sizes), job.route.costs(g.sizes).exits)
            for g in job.query.groups
        ]
        job.flops_full = sum(int(rows.flops[-1]) * len(rows) for rows in groups)
        with self._change:
            self._dispatch.admit(job, way, groups)
            self._unfinished += 1
            job.admitted = True
            self._loop = self._callers[job].loop
            self._start_lanes()
            short = self._is_short(way)
            if not short:
                self._change.notify()
            return short

    def _is_short(self, way: Way) -> bool:
        """Whether the event loop may run all that waits: no lane is at work, and it takes less than a lane would cost.

        Where rows take less than the Python code of their requests, as those of small models do, that is so however
        many wait. In lanes they would take turns with the loop for Python's lock: at half of what two cores carry,
        requests to the digits' CNN waited twice as long at the median, and longer.
        """
        waits = self._keeping is not None and self._keeping.durable  # for the disk, which the event loop mustn't
        if waits or self._began:
            return False
        return self._dispatch.expected_seconds(way) < _SHORT + _SHORT_REQUEST * self._dispatch.queued_jobs

    def _run_here_or_wake_a_lane(self, way: Way) -> None:
        """In the event loop: what takes less than it takes to wake a thread and to be told runs here."""
        with self._change:
            self._given_back = False
            taken = self._dispatch.take(time.monotonic()) if self._is_short(way) else None
            if taken is None:
                self._change.notify()
                return
            self._began[_HERE] = time.monotonic()
        self._work(_HERE, *taken, self._settle)

    def _withdraw(self, job: Job) -> None:
        """The caller is done with a job: answered, timed out or cancelled."""
        with self._change:
            if job.admitted:
                self._dispatch.forget(job)
                self._unfinished -= 1

    def _expire(self, job: Job) -> None:
        """In the event loop: a job's deadline has passed. Once each row has any answer, that is what it gets."""
        with self._change:
            answered = self._dispatch.expire(job)
        if answered:
            self._finish(job)

    def _start_lanes(self) -> None:
        # On the first query rather than at construction: a fork in between would lose the threads.
        while len(self._lanes) < self._lane_count:
            number = len(self._lanes)
            lane = threading.Thread(target=self._lane, args=(number,), name=f"offramp-lane-{number}", daemon=True)
            self._lanes.append(lane)
            lane.start()

    def _lane(self, number: int) -> None:
        while (taken := self._next(number)) is not None:
            self._work(number, *taken, self._tell)
            del taken

    def _work(self, number: int, batch: Batch, begun: list[Job], tell: Callable[[list[tuple[Job, Ids]]], None]) -> None:
        """Run a batch. number: of the lane that does. tell: who is to hear of answered rows."""
        try:
            self._run_and_tell(number, batch, begun, tell)
        except Exception as error:  # a lane that ended with it would leave all its requests to wait, and the next
            _log.exception("a batch of %d rows was given up", batch.rows)
            with self._change:
                self._began.pop(number, None)
            for job in {id(part.waiting.owner): part.waiting.owner for part in batch.parts}.values():
                self._fail(job, error)

    def _run_and_tell(
        self, number: int, batch: Batch, begun: list[Job], tell: Callable[[list[tuple[Job, Ids]]], None]
    ) -> None:
        started = self._began[number]
        self._metrics.batch(batch.rows, batch.place.stage)
        for job in begun:
            if job.query.seen is None:  # a shadow run may wait for as long as there is anything else
                self._metrics.waited(started - job.arrived)
        outcome = self.run_batch(batch)
        if self._keeping is not None:  # before anybody is told: a label may come at once
            for left in outcome.left:
                self._keep(self._keeping, left)
        with self._change:
            del self._began[number]
            here = number == _HERE
            late = self._dispatch.ran(batch, outcome, started, time.monotonic(), undisturbed=here)
            if self._ways.saw(batch, [job.answers.exit[ids] for job, ids in outcome.settled]):
                self._metrics.batching(self._ways.through_graph)
            if outcome.onward or (here and self.queued_rows):  # who came meanwhile has woken nobody
                self._change.notify()
            given_back = self._given_back = not here and self.queued_rows > 0 and self._is_short(batch.place.way)
        if outcome.executed:
            self._metrics.ran(outcome.executed)
        tell(outcome.settled)
        if given_back:
            self._give_back(batch.place.way)
        for job in late:
            self._call(job, partial(self._finish, job))

    def _give_back(self, way: Way) -> None:
        """In a lane: what has come meanwhile is short, and the event loop runs it, once it has heard of the answers.

        Otherwise rows that went to lanes once, for an odd batch's sake, would go there until nobody asks for a moment.
        """
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._run_here_or_wake_a_lane, way)
        except RuntimeError:  # the loop is closed
            with self._change:
                self._given_back = False

    def _keep(self, keeping: Keeping, left: Left) -> None:
        """Rows have left: they are kept, and those that are to be run to the end come back when nobody else waits."""
        for job, ids in keeping.keep(left):
            self._call(job, partial(keeping.run_to_the_end, job.query, ids, self.infer))

    def _next(self, number: int) -> tuple[Batch, list[Job]] | None:
        """The batch whose turn it is, and the jobs that it begins; waits for one. None when the engine has closed."""
        with self._change:
            while True:
                taken = None if self._given_back else self._dispatch.take(time.monotonic())
                if taken is not None:
                    self._began[number] = time.monotonic()
                    return taken
                if not self._open and not self._unfinished:
                    return None
                self._change.wait(None if self._open else 0.1)

    def run_batch(self, batch: Batch) -> Outcome:
        """Run a batch. If that fails, whose rows are to blame is found out by running each request's by themselves."""
        try:
            outcome: Outcome = batch.place.way.run(batch)
            return outcome
        except Exception as error:
            if len({id(part.waiting.owner) for part in batch.parts}) == 1:
                self._fail(batch.parts[0].waiting.owner, error)
                return Outcome()
        whole = Outcome()
        for part in batch.parts:
            whole.add(self.run_batch(Batch(batch.place, [part], part.stop - part.start)))
        return whole

    def _fail(self, job: Job, error: BaseException) -> None:
        def set_exception() -> None:
            caller = self._callers.get(job)
            if caller is not None and not caller.answer.done():
                caller.answer.set_exception(error)

        self._call(job, set_exception)

    def _tell(self, settled: list[tuple[Job, Ids]]) -> None:
        """Hand answered rows to the event loop, all of a batch at once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Job, Ids]]] = defaultdict(list)
        for job, ids in settled:
            caller = self._callers.get(job)
            if caller is not None:
                by_loop[caller.loop].append((job, ids))
        for those in by_loop.values():
            self._call(those[0][0], partial(self._settle, those))

    def _call(self, job: Job, do: Callable[[], None]) -> None:
        caller = self._callers.get(job)
        if caller is None:
            return
        try:
            caller.loop.call_soon_threadsafe(do)
        except RuntimeError:  # the loop is closed: nobody waits any more
            job.abandoned = True

    def _settle(self, settled: list[tuple[Job, Ids]]) -> None:
        """In the event loop: rows have their last answer."""
        for job, ids in settled:
            caller = self._callers.get(job)
            if caller is None:
                continue
            job.left -= len(ids)
            if caller.told is not None:
                caller.told(job, ids)
            if not job.left and not caller.answer.done():
                caller.answer.set_result(job.answer())

    def _finish(self, job: Job) -> None:
        """In the event loop: what a job has by now is its answer."""
        caller = self._callers.get(job)
        if caller is not None and not caller.answer.done():
            with job.lock:
                job.answers = job.answers.copy()  # a batch may still be under way
            caller.answer.set_result(job.answer())
