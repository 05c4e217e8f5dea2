"""Which rows run next: the queues of an engine, and nothing of its threads, clocks or graphs.

Rows wait at places: in front of a stage, at one size. A batch is formed when somebody is free to run it, of the rows
at one place that are due first, whatever requests they belong to. So a batch never waits for a timer; under load
batches fill up because rows come while another one runs.

When a row is due. The k-th row of a request is due k times as long after the request's arrival as a row takes here
at present (the `spacing`): a request of ten thousand rows has its turn as if its rows had come one by one at full
speed. A lone row that comes later is due at its arrival, in front of all that the long request couldn't have had by
then anyway; and rows that are due stay due, so nobody starves. A level of priority is so many seconds of head start.

Everything here runs under one lock of its owner's, or in one thread; time comes from outside, so that the simulator
runs this very code.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

HEAD_START = 0.5
"""Seconds that a level of priority is worth."""

_TURN = 8  # rows that a request has beyond its turn: to alternate row by row takes longer


class Way(Protocol):
    """How rows get from their inputs to their answers: a cascade graph, or stages one by one."""

    @property
    def mixes(self) -> bool:
        """Whether rows of several requests may share a batch."""

    def joins(self, stage: int) -> bool:
        """Whether rows of several sizes may, the smaller ones filled up."""

    def flops(self, sizes: tuple[int, ...], stage: int) -> int:
        """What one row of these sizes costs in a stage, or in all if there is only one."""

    def waits_at(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes at whose place rows of these sizes wait in front of the first stage."""

    def run(self, batch: "Batch") -> Any:
        """Run a batch; what has become of its rows."""


class Place(NamedTuple):
    """Where rows wait. sizes: of the symbolic axes, the batch apart, as they are padded there."""

    way: Way
    stage: int
    sizes: tuple[int, ...]


class Owner(Protocol):
    """Whose rows they are."""

    def over(self) -> bool:
        """Whether nobody waits for them any more."""


class Waiting:
    """Consecutive rows of one request at one place."""

    __slots__ = ("before", "due", "owner", "rows", "since", "source", "taken")

    def __init__(self, owner: Any, rows: int, source: Any, *, due: float, before: int = 0, since: float) -> None:
        """source: what its owner finds the rows by. due: of the request's first row; before: how many of its rows come
        before these. since: when they came to this place.
        """
        self.owner, self.rows, self.source = owner, rows, source
        self.due, self.before, self.since = due, before, since
        self.taken = 0

    @property
    def left(self) -> int:
        return self.rows - self.taken

    def next_due(self, spacing: float) -> float:
        """Of the first that hasn't been taken."""
        return self.due + (self.before + self.taken) * spacing


class Part(NamedTuple):
    """Rows start…stop of some waiting ones, taken into a batch. source: theirs, which may be forgotten meanwhile."""

    waiting: Waiting
    start: int
    stop: int
    source: Any


@dataclass(frozen=True)
class Batch:
    """Rows to run together. rows: how many they are."""

    place: Place
    parts: list[Part]
    rows: int


class _Queue:
    """The rows at one place, those first that are due first."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.rows = 0
        self.heap: list[tuple[float, int, Waiting]] = []

    def push(self, waiting: Waiting, number: int, spacing: float) -> None:
        heapq.heappush(self.heap, (waiting.next_due(spacing), number, waiting))

    def drop_dead(self) -> None:
        """Until the first is alive."""
        while self.heap and (not self.heap[0][2].left or self.heap[0][2].owner.over()):
            _, _, waiting = heapq.heappop(self.heap)
            self.forget(waiting)

    def forget(self, waiting: Waiting) -> None:
        """Its rows are not to run, and what it refers to goes at once; its place in the heap when its turn comes."""
        self.rows -= waiting.left
        waiting.taken, waiting.source = waiting.rows, None

    @property
    def due(self) -> float:
        return self.heap[0][0]

    @property
    def since(self) -> float:
        return self.heap[0][2].since


class Scheduler:
    """The rows that wait, and which of them are next."""

    def __init__(
        self,
        limit: Callable[[Place], int],
        linger: Callable[[], float] = lambda: 0.0,
        worth: Callable[[Way], float] = lambda way: 0.0,
        spacing: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """limit: the most rows of a batch at a place. linger: seconds that survivors of a batch may wait for others
        in front of the next stage, as long as there is anything else to run. worth: FLOPs that could have been run in
        the time that a batch takes beside its rows, so many may be spent on filling up rows to save one. spacing:
        seconds that a row takes at present.
        """
        self._limit, self._linger, self._worth, self._spacing = limit, linger, worth, spacing
        self._queues: dict[Place, _Queue] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return sum(queue.rows for queue in self._queues.values())

    def add(self, place: Place, waiting: Waiting) -> None:
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = _Queue(place)
        queue.push(waiting, next(self._numbers), self._spacing())
        queue.rows += waiting.left

    def flops_in_front_of(self, way: Way) -> int | None:
        """At most, for all rows that wait; None if any of them waits somewhere else."""
        flops = 0
        for place, queue in self._queues.items():
            if place.way is not way or place.stage:
                return None
            flops += queue.rows * way.flops(place.sizes, 0)
        return flops

    def forget(self, place: Place, waiting: Waiting) -> int:
        """Nobody wants these rows any more. Returns how many had not been taken."""
        left = waiting.left
        if left and (queue := self._queues.get(place)) is not None:
            queue.forget(waiting)
        return left

    def take(self, now: float) -> Batch | None:
        """The batch that is next, removed from its queue; None if nothing waits. now: as in `since`."""
        queue = self._next(now)
        if queue is None:
            return None
        place, limit = queue.place, max(1, self._limit(queue.place))
        parts = self._from(queue, limit)
        rows = sum(part.stop - part.start for part in parts)
        if rows < limit and place.sizes and place.way.mixes and place.way.joins(place.stage):
            place, rows = self._join(place, parts, rows, limit)
        return Batch(place, parts, rows)

    def _from(self, queue: _Queue, limit: int) -> list[Part]:
        """Up to so many rows of a queue."""
        parts: list[Part] = []
        rows, spacing = 0, self._spacing()
        while rows < limit:
            queue.drop_dead()
            if not queue.heap:
                break
            due, number, waiting = queue.heap[0]
            if rows and not queue.place.way.mixes and waiting.owner is not parts[0].waiting.owner:
                break
            heapq.heappop(queue.heap)
            until = (queue.due - due) / spacing if queue.heap and spacing else math.inf
            count = min(limit - rows, waiting.left, _TURN + math.floor(min(until, waiting.left)))
            parts.append(Part(waiting, waiting.taken, waiting.taken + count, waiting.source))
            waiting.taken += count
            rows += count
            if waiting.left:
                queue.push(waiting, number, spacing)
        queue.rows -= rows
        if not queue.heap:
            del self._queues[queue.place]
        return _joined(parts)

    def _join(self, place: Place, parts: list[Part], rows: int, limit: int) -> tuple[Place, int]:
        """Take rows of other sizes along, nearest sizes first, as long as filling up costs less than a batch more."""
        way, stage = place.way, place.stage
        worth = self._worth(way)
        if not worth:
            return place, rows
        cost = way.flops(place.sizes, stage)
        others = [
            (abs(way.flops(queue.place.sizes, stage) - cost), number, queue)
            for number, queue in enumerate(self._alive())
            if queue.place.way is way and queue.place.stage == stage
        ]
        for _, _, queue in sorted(others):
            count = min(queue.rows, limit - rows)
            if count <= 0:
                break
            sizes = tuple(map(max, place.sizes, queue.place.sizes))
            filled = way.flops(sizes, stage)
            spent = rows * (filled - cost) + count * (filled - way.flops(queue.place.sizes, stage))
            if spent < worth:
                more = self._from(queue, count)
                parts += more
                rows += sum(part.stop - part.start for part in more)
                place, cost = Place(way, stage, sizes), filled
        return place, rows

    def _next(self, now: float) -> _Queue | None:
        """Full batches first, the deepest of them; then what is due first in front; survivors when nothing is there.

        In front means the first stage. Survivors wait for others there, but not for longer than they may linger.
        """
        alive = list(self._alive())
        if not alive:
            return None
        if len(alive) == 1:
            return alive[0]
        deeper = [queue for queue in alive if queue.place.stage]
        full = [queue for queue in deeper if queue.rows >= self._limit(queue.place)]
        if full:
            return max(full, key=lambda queue: queue.place.stage)
        late = [queue for queue in deeper if now - queue.since >= self._linger()]
        front = [queue for queue in alive if not queue.place.stage]
        if late or front:
            return min(late + front, key=lambda queue: queue.due)
        return min(deeper, key=lambda queue: (queue.place.stage, queue.due))

    def _alive(self) -> Iterator[_Queue]:
        for place, queue in list(self._queues.items()):
            queue.drop_dead()
            if queue.heap:
                yield queue
            else:
                del self._queues[place]


def _joined(parts: list[Part]) -> list[Part]:
    """Parts of one request that follow on each other as one."""
    made = parts[:1]
    for part in parts[1:]:
        last = made[-1]
        if part.waiting is last.waiting:
            made[-1] = Part(last.waiting, last.start, part.stop, last.source)
        else:
            made.append(part)
    return made


def due(arrived: float, priority: int) -> float:
    """When a request's first row is due."""
    return arrived + priority * HEAD_START
