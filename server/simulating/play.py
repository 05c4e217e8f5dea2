"""One load at one operating point, simulated."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from offramp.runtime.arrays import Floats
from offramp.server.scheduling.job import Rows
from offramp.server.scheduling.outcome import Outcome
from offramp.server.scheduling.processors import Thread
from offramp.server.scheduling.scheduler import Batch, Place, Waiting, Way
from offramp.server.scheduling.simulator import Simulation
from offramp.server.scheduling.ways import StageWay
from offramp.server.simulating.front import RequestCost
from offramp.server.simulating.laboratory import Laboratory, Measured

_NO_FLOPS = np.zeros(1, np.int64)


@dataclass(frozen=True)
class Machine:
    """What is simulated. cores: that lanes, the event loop and the client share."""

    lanes: int
    cores: float
    max_queued_rows: int
    cost: RequestCost


@dataclass(frozen=True)
class Played:
    """latencies: seconds (n,) of the requests that count and were answered. seconds: that count. refused: of those
    that count. busy: the share of time that lanes were busy. event_loop: the same of the server's event loop.
    batch_rows: in the mean, in front of the first stage. carried: requests answered in the time that counts."""

    latencies: Floats
    seconds: float
    refused: int
    busy: float
    event_loop: float
    batch_rows: float
    carried: int


class _Job:
    """A request whose rows' exits are known beforehand."""

    priority = 5
    expired = False

    def __init__(self, due: float, exits: list[int], groups: Sequence[tuple[tuple[int, ...], list[int]]]) -> None:
        """groups: rows by their sizes."""
        self.due_, self.arrived, self.exits = due, due, exits
        self.rows = self.queued = self.unanswered = self.left = len(exits)
        self.waits: list[Any] = []
        self.work = self.waits_for = 0.0
        self.abandoned = self.refused = False
        self.groups = [Rows({}, None, ids, sizes, _NO_FLOPS) for sizes, ids in groups]  # type: ignore[arg-type]

    def over(self) -> bool:
        return self.abandoned


class _PlayedWay:
    """A real way without its graphs: rows leave from the exits that are known."""

    def __init__(self, real: Way) -> None:
        self.real, self.mixes = real, real.mixes
        stages = real.route.stages if isinstance(real, StageWay) else []
        self._exits = [stage.exit for stage in stages] or [None]
        self._costs: dict[tuple[tuple[int, ...], int], int] = {}
        self._waits: dict[tuple[int, ...], tuple[int, ...]] = {}

    def joins(self, stage: int) -> bool:
        return self.real.joins(stage)

    def flops(self, sizes: tuple[int, ...], stage: int) -> int:
        found = self._costs.get((sizes, stage))
        if found is None:
            found = self._costs[sizes, stage] = self.real.flops(sizes, stage)
        return found

    def waits_at(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return self.real.waits_at(sizes)

    def run(self, batch: Batch) -> Outcome:
        stage = batch.place.stage
        if stage == len(self._exits) - 1:
            settled = [(p.waiting.owner, p.source.ids[p.start : p.stop]) for p in batch.parts]
            return Outcome(settled)
        outcome, exit = Outcome(), self._exits[stage]
        for part in batch.parts:
            job, ids = part.waiting.owner, part.source.ids[part.start : part.stop]
            stay = ids if exit is None else [k for k in ids if job.exits[k] > exit]
            if len(stay) < len(ids):
                outcome.settled.append((job, [k for k in ids if job.exits[k] <= exit]))  # type: ignore[arg-type]
            if stay:
                rows = Rows({}, None, stay, part.source.sizes, _NO_FLOPS)  # type: ignore[arg-type]
                before = part.waiting.before + part.start
                waiting = Waiting(job, len(stay), rows, due=part.waiting.due, before=before, since=0.0)
                outcome.onward.append((Place(self, stage + 1, batch.place.sizes), waiting))
        return outcome


class Player:
    """Requests of a bank's rows, one operating point, one machine."""

    def __init__(self, laboratory: Laboratory, measured: Measured, machine: Machine, point: str, rows: int) -> None:
        """rows: in a request."""
        self._laboratory, self._measured, self._machine = laboratory, measured, machine
        self._point, self._rows = point, rows
        bank = laboratory.bank
        self._exits = bank.exits[point].tolist()
        sizes = [laboratory.padding.sizes(each) for each in bank.sizes]
        self._sizes = [sizes[pool] for pool in bank.pool.tolist()]
        self._ways: dict[Way, _PlayedWay] = {}
        self._sample, _ = laboratory.job(bank.query(np.array([0]), point))

    def open(self, arrivals: Floats, *, warm: float, seconds: float, seed: int | Sequence[int]) -> Played:
        """Requests that come when they come. Those of the first `warm` seconds don't count."""
        return self._play(arrivals.tolist(), 0, warm=warm, seconds=seconds, seed=seed)

    def closed(self, connections: int, *, warm: float, seconds: float, seed: int | Sequence[int]) -> Played:
        """So many connections, each of which asks again once it is answered."""
        return self._play([0.0] * connections, connections, warm=warm, seconds=seconds, seed=seed)

    def _play(
        self, arrivals: list[float], connections: int, *, warm: float, seconds: float, seed: int | Sequence[int]
    ) -> Played:
        rng = np.random.default_rng(seed)
        random = rng.random
        cost, machine, end = self._machine.cost, self._machine, warm + seconds
        jitters = {stage: rng.permutation(times.jitter).tolist() for stage, times in self._measured.times.items()}
        turns = dict.fromkeys(jitters, 0)
        latencies: list[float] = []
        carried = refused = 0
        through = self._laboratory.ways.through_graph

        def of_batch(batch: Batch, outcome: Outcome, busy: int) -> float:
            place, way = batch.place, batch.place.way
            assert isinstance(way, _PlayedWay)
            exits = [p.waiting.owner.exits[k] for p in batch.parts for k in p.source.ids[p.start : p.stop]]
            flops = self._laboratory.flops(Place(way.real, place.stage, place.sizes), exits)
            stage = way.real, place.stage
            while stage not in jitters:  # one that no row had come to when times were measured is as the one before it
                stage = way.real, stage[1] - 1
            jitter = jitters[stage]
            turns[stage] = turn = (turns[stage] + 1) % len(jitter)
            return float(self._measured.times[stage].seconds(batch.rows, flops) * jitter[turn])

        def ran(batch: Batch, outcome: Outcome) -> None:
            if outcome.settled and self._laboratory.ways.chooses:
                settled: list[tuple[Any, Any]] = list(outcome.settled)
                exits = np.array([job.exits[k] for job, ids in settled for k in ids])
                self._laboratory.ways.saw(batch, [exits])

        def told(job: Any, ids: Any, now: float) -> None:
            job.left -= len(ids)
            if not job.left:
                answer(job)

        simulation = Simulation(
            machine.lanes, of_batch, max_queued_rows=machine.max_queued_rows, told=told, ran=ran,
            cores=machine.cores, demand=self._measured.demand, disturbance=cost.disturbance,
        )  # fmt: skip
        front, client = Thread(simulation.processors), Thread(simulation.processors)

        def ask(due: float) -> None:
            job = self._job(due, rng)
            beside = cost.drawn(simulation.processors.pause, random())
            job.work, job.waits_for = beside * cost.work / 2, beside * (1 - cost.work)
            client.do(cost.client / 2, lambda: front.do(job.work, lambda: admit(job)))

        def admit(job: _Job) -> None:
            job.arrived = simulation.now
            simulation.admit(job, self._way(), job.groups)
            if job.refused:
                answer(job)

        def answer(job: _Job) -> None:
            front.do(job.work, lambda: client.do(cost.client / 2, lambda: wait(job)))

        def wait(job: _Job) -> None:
            simulation.at(simulation.now + job.waits_for, lambda: done(job))

        def done(job: _Job) -> None:
            nonlocal carried, refused
            now = simulation.now
            counts = job.due_ >= warm if not connections else warm <= now < end
            if counts and job.refused:
                refused += 1
            elif counts:
                latencies.append(now - job.due_)
                carried += now < end
            if connections and now < end:
                ask(now)

        for due in arrivals:
            simulation.at(due, _with(ask, due))
        simulation.run()
        self._laboratory.ways.through_graph = through
        last = max(simulation.now, 1e-9)
        rows = [batch.rows for _, _, batch in simulation.batches if not batch.place.stage]
        return Played(
            np.array(latencies),
            seconds,
            refused,
            sum(ended - began for began, ended, _ in simulation.batches) / (machine.lanes * last),
            front.spent / last,
            float(np.mean(rows)) if rows else math.nan,
            carried,
        )

    def _way(self) -> _PlayedWay:
        """The one that the engine would choose now."""
        way = self._laboratory.ways.of(self._sample, self._laboratory.points.cascade(self._point, self._last))
        found = self._ways.get(way)
        if found is None:
            found = self._ways[way] = _PlayedWay(way)
        return found

    @property
    def _last(self) -> int:
        return len(self._laboratory.points.exits) - 1

    def _job(self, due: float, rng: np.random.Generator) -> _Job:
        if self._rows == 1:
            row = int(rng.random() * len(self._exits))
            return _Job(due, [self._exits[row]], [(self._sizes[row], [0])])
        rows = rng.integers(0, len(self._exits), self._rows).tolist()
        groups: dict[tuple[int, ...], list[int]] = {}
        for k, row in enumerate(rows):
            groups.setdefault(self._sizes[row], []).append(k)
        return _Job(due, [self._exits[row] for row in rows], list(groups.items()))


def _with(ask: Callable[[float], None], due: float) -> Callable[[], None]:
    return lambda: ask(due)
