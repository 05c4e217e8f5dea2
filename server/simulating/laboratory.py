"""What batches take here: run by the engine's own ways, on real rows, one at a time and as many as there are lanes."""

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from offramp.runtime.cascade import Cascade
from offramp.server.operating_points import OperatingPoints
from offramp.server.scheduling.choice import Ways
from offramp.server.scheduling.job import Job, Rows
from offramp.server.scheduling.outcome import Outcome
from offramp.server.scheduling.padding import Padding
from offramp.server.scheduling.scheduler import Batch, Part, Place, Waiting, Way
from offramp.server.scheduling.ways import StageWay
from offramp.server.simulating.bank import Bank
from offramp.server.simulating.times import BatchTimes, Timed, fit

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_LONGEST = 0.04  # seconds: the scheduler makes batches of 25 ms, and no larger ones are of interest
_BATCHES = 5  # of each number of rows, and each again
_TOGETHER_ROWS = (2, 4, 8, 16)

Stage = tuple[Way, int]


@dataclass(frozen=True)
class Measured:
    """times: by way and stage. busy: cores that a batch was billed for. demand: that it asks for, see `measure`.
    slower: how many times as long batches took when all lanes ran at once."""

    times: dict[Stage, BatchTimes]
    busy: float
    demand: float
    slower: float


class Laboratory:
    """The engine's ways over a cascade, without its threads and its clock."""

    def __init__(self, cascade: Cascade, bank: Bank, batching: str, *, seed: int = 0) -> None:
        self.cascade, self.bank = cascade, bank
        self.points = OperatingPoints(cascade)
        self.padding = Padding(cascade.manifest)
        self.ways = Ways(self.points, self.padding, batching)
        self.ways.measure(1.0)
        self._rng = np.random.default_rng(seed)
        self._flops: dict[tuple[int, ...], list[int]] = {}

    def job(self, query: Any) -> tuple[Job, Way]:
        cascade = self.points.cascade(query.operating_point, query.max_exit)
        job = Job(query, cascade.route, SimpleNamespace(over=False), 0.0)  # type: ignore[arg-type]
        return job, self.ways.of(job, cascade)

    def groups(self, job: Job) -> list[Rows]:
        """A job's rows as they come to the queue."""
        return [
            Rows(g.arrays, None, g.positions, self.padding.sizes(g.sizes), job.route.costs(g.sizes).exits)
            for g in job.query.groups
        ]

    def exit_flops(self, sizes: tuple[int, ...]) -> list[int]:
        """(J,) what leaving at each exit costs at a batch's sizes."""
        found = self._flops.get(sizes)
        if found is None:
            found = self._flops[sizes] = self.cascade.row_flops(self.padding.named(sizes)).tolist()
        return found

    def flops(self, place: Place, exits: Sequence[int]) -> float:
        """What a batch costs. exits: those that its rows leave from."""
        if isinstance(place.way, StageWay):
            return float(len(exits) * place.way.flops(place.sizes, place.stage))
        spent = self.exit_flops(place.sizes)
        return float(sum([spent[j] for j in exits]))

    def measure(self, points: Sequence[str], lanes: int, cores: float, *, rows: int = 1) -> Measured:
        """A few seconds. points: whose rows are run. rows: in a request."""
        ran: dict[Stage, list[tuple[Batch, Timed]]] = {}
        for way, names in self._ways_of(points).items():
            self._time(way, names, rows, ran)
        times = {stage: fit([timed for _, timed in those]) for stage, those in ran.items()}
        alone = [one for (_, stage), those in ran.items() if not stage for one in those]
        busy, slower = self._together(alone, lanes)
        # Threads of one batch wait for each other now and then, so what it keeps busy is what lanes take from each
        # other rather than what it is billed for.
        demand = max(slower * cores / lanes, 1.0) if slower > 1.05 else busy
        return Measured(times, busy, min(demand, cores), slower)

    def _ways_of(self, points: Sequence[str]) -> dict[Way, list[str]]:
        """The ways that rows of these points may take, whatever is chosen meanwhile."""
        found: dict[Way, list[str]] = defaultdict(list)
        before = self.ways.through_graph
        for through in {before, *((False, True) if self.ways.chooses else ())}:
            self.ways.through_graph = through
            for name in points:
                _, way = self.job(self.bank.query(np.array([0]), name))
                found[way].append(name)
        self.ways.through_graph = before
        return found

    def _time(self, way: Way, points: list[str], rows: int, ran: dict[Stage, list[tuple[Batch, Timed]]]) -> None:
        survivors: dict[int, list[tuple[Place, Waiting]]] = defaultdict(list)
        stage = 0
        while True:
            timed = ran[way, stage] = []
            for count in _ROWS:
                if stage and not survivors[stage]:
                    break
                batches = [
                    self._front(way, points[k % len(points)], count, rows)
                    if not stage
                    else self._later(survivors[stage], count)
                    for k in range(_BATCHES)
                ]
                way.run(batches[0])  # what is made at the first run isn't what serving pays
                spent = []
                flops_of = [self._flops_of(batch) for batch in batches]
                for batch, flops in zip(batches, flops_of, strict=True):
                    took = []
                    for _ in range(2):
                        began = time.perf_counter()
                        outcome: Outcome = way.run(batch)
                        took.append(time.perf_counter() - began)
                    spent += took
                    timed.append((batch, Timed(batch.rows, flops, tuple(took))))
                    if stage == batch.place.stage:
                        survivors[stage + 1] += outcome.onward
                if np.median(spent) > _LONGEST:
                    break
            if not timed:
                del ran[way, stage]
            stage += 1
            if not survivors[stage]:
                return

    def _front(self, way: Way, point: str, count: int, rows: int) -> Batch:
        """A batch in front of the first stage: rows of neighbouring sizes, as the scheduler takes them."""
        weights = self._row_flops()
        first = int(self._rng.integers(len(weights)))
        if self._rng.random() < 0.5:
            near = np.argsort(np.abs(weights - weights[first]), kind="stable")[: 4 * count]
        else:
            near = np.arange(len(weights))
        chosen = self._rng.choice(near, count, replace=len(near) < count)
        together = rows if way.mixes else count
        parts: list[Part] = []
        sizes: list[tuple[int, ...]] = []
        for start in range(0, count, together):
            job, _ = self.job(self.bank.query(chosen[start : start + together], point))
            for group in self.groups(job):
                if not way.mixes and parts and group.sizes != parts[0].source.sizes:
                    continue
                waiting = Waiting(job, len(group), group, due=0.0, since=0.0)
                parts.append(Part(waiting, 0, len(group), group))
                sizes.append(way.waits_at(group.sizes))
        place = Place(way, 0, tuple(map(max, zip(*sizes, strict=True))))
        return Batch(place, parts, sum(part.stop for part in parts))

    def _later(self, survivors: list[tuple[Place, Waiting]], count: int) -> Batch:
        """A batch in front of a later stage, of survivors that are there; again and again where they are few."""
        place = survivors[int(self._rng.integers(len(survivors)))][0]
        there = [waiting for other, waiting in survivors if other == place]
        parts: list[Part] = []
        left = count
        while left:
            waiting = there[int(self._rng.integers(len(there)))]
            taken = min(left, waiting.rows)
            parts.append(Part(waiting, 0, taken, waiting.source))
            left -= taken
        return Batch(place, parts, count)

    def _row_flops(self) -> Any:
        each = np.array([self.exit_flops(self.padding.sizes(sizes))[-1] for sizes in self.bank.sizes], np.float64)
        return each[self.bank.pool]

    def _flops_of(self, batch: Batch) -> float:
        if isinstance(batch.place.way, StageWay):
            return self.flops(batch.place, range(batch.rows))
        batch.place.way.run(batch)  # its rows' exits are known then
        exits = [e for p in batch.parts for e in p.waiting.owner.answers.exit[p.source.ids[p.start : p.stop]].tolist()]
        return self.flops(batch.place, exits)

    def _together(self, timed: list[tuple[Batch, Timed]], lanes: int) -> tuple[float, float]:
        """Cores that one batch keeps busy alone; and how many times as long batches take when all lanes run."""
        batches = [batch for batch, one in timed if one.rows in _TOGETHER_ROWS] or [batch for batch, _ in timed]
        batches = [batches[k] for k in self._rng.permutation(len(batches))[:24]]

        def run() -> None:
            for batch in batches:
                batch.place.way.run(batch)

        alone, several, busy = [], [], []
        for _ in range(3):
            began, spent = time.perf_counter(), time.process_time()
            run()
            alone.append(time.perf_counter() - began)
            busy.append((time.process_time() - spent) / alone[-1])
            threads = [threading.Thread(target=run) for _ in range(lanes)]
            began = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            several.append(time.perf_counter() - began)
        return float(np.median(busy)), float(np.median(several) / np.median(alone))
