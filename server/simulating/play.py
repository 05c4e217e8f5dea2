"""One load at one operating point, simulated."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from offramp.runtime.arrays import Floats
from offramp.server.scheduling.outcome import Outcome
from offramp.server.scheduling.scheduler import Batch
from offramp.server.scheduling.simulator import Do, Simulation
from offramp.server.simulating.played import PlayedJob, PlayedWay, group
from offramp.server.simulating.samples import Level, Moment, PointTimes

_MOMENT = 0.1  # seconds of the record that are gone through in a row
_STEP = 0.02  # of a rate's logarithm, that make another level
_SETTLED = 0.2  # simulated seconds after which a closed loop's rate is known


@dataclass(frozen=True)
class Played:
    """latencies: seconds (n,) of the requests that count and were answered. seconds: that count. refused: of those
    that count. busy: the share of time that lanes were busy. batch_rows: in the mean, in front of the first stage.
    carried: requests answered in the time that counts."""

    latencies: Floats
    seconds: float
    refused: int
    busy: float
    batch_rows: float
    carried: int


class Player:
    """Requests of a bank's rows at one operating point."""

    def __init__(
        self,
        way: PlayedWay,
        times: PointTimes,
        exits: Sequence[int],
        sizes: Sequence[tuple[int, ...]],
        *,
        lanes: int,
        max_queued_rows: int = 65_536,
        rows: int = 1,
    ) -> None:
        """exits, sizes: of the rows that requests are made of. rows: in a request."""
        self._way, self._times, self._rows = way, times, rows
        self._exits, self._sizes = list(exits), list(sizes)
        self._lanes, self._max_queued_rows = lanes, max_queued_rows

    def open(self, arrivals: Floats, *, warm: float, seconds: float, seed: int | Sequence[int]) -> Played:
        """Requests that come when they come. Those of the first `warm` seconds don't count."""
        rate = len(arrivals) / (warm + seconds)
        return _Play(self, arrivals.tolist(), 0, rate, warm, seconds, seed).played()

    def closed(self, connections: int, *, warm: float, seconds: float, seed: int | Sequence[int]) -> Played:
        """So many connections, each of which asks again once it is answered."""
        return _Play(self, [0.0] * connections, connections, math.inf, warm, seconds, seed).played()


class _Play:
    """The requests of one load, from their clients and back."""

    def __init__(
        self,
        player: Player,
        arrivals: list[float],
        connections: int,
        rate: float,
        warm: float,
        seconds: float,
        seed: int | Sequence[int],
    ) -> None:
        self._way, self._times, self._rows = player._way, player._times, player._rows
        self._exits, self._sizes = player._exits, player._sizes
        self._arrivals, self._connections, self._rate = iter(arrivals), connections, rate
        self._warm, self._end, self._length = warm, warm + seconds, seconds
        self._random = random.Random(int(np.random.default_rng(seed).integers(2**62))).random
        self._done = self._carried = self._refused = 0
        self._latencies: list[float] = []
        self._until = 0.0  # when the moment is over
        self._seen: tuple[float, Level] = (math.nan, self._times.levels[-1])
        self._lanes = player._lanes
        self._simulation = Simulation(
            player._lanes, self._seconds, max_queued_rows=player._max_queued_rows, told=self._told, rouse=self._rouse
        )

    def played(self) -> Played:
        for _ in range(max(1, self._connections)):
            self._next()
        self._simulation.run()
        batches = self._simulation.batches
        rows = [batch.rows for _, _, batch in batches if not batch.place.stage]
        busy = sum(ended - began for began, ended, _ in batches)
        return Played(
            np.array(self._latencies),
            self._length,
            self._refused,
            busy / (self._lanes * max(self._simulation.now, 1e-9)),
            float(np.mean(rows)) if rows else math.nan,
            self._carried,
        )

    def _next(self) -> None:
        """The next arrival is waited for."""
        due = next(self._arrivals, None)
        if due is not None:
            self._simulation.at(due, partial(self._ask, due))

    def _ask(self, due: float) -> None:
        if not self._connections:
            self._next()
        moment = self._now()
        arrived = self._simulation.now + moment.next(self._level.onward)
        self._simulation.at(arrived, partial(self._admit, PlayedJob(due, [])))

    def _now(self) -> Moment:
        """The moment of the record that is gone through now."""
        now = self._simulation.now
        if now >= self._until:
            self._until = now + _MOMENT
            self._level = self._at(self._rate)
            self._moment = Moment(self._random() * self._level.seconds)
        return self._moment

    def _admit(self, job: PlayedJob) -> None:
        job.arrived = self._simulation.now
        count = len(self._exits)
        rows = [int(self._random() * count) for _ in range(self._rows)]
        job.exits[:] = [self._exits[row] for row in rows]
        job.rows = job.queued = job.unanswered = job.left = len(rows)
        by_sizes: dict[tuple[int, ...], list[int]] = {}
        for k, row in enumerate(rows):
            by_sizes.setdefault(self._sizes[row], []).append(k)
        self._simulation.admit(job, self._way, [group(ids, sizes) for sizes, ids in by_sizes.items()])
        if job.refused:
            self._answer(job)

    def _at(self, rate: float) -> Level:
        step = round(math.log(rate) / _STEP) if math.isfinite(rate) else rate
        if self._seen[0] != step:
            self._seen = step, self._times.at(rate)
        return self._seen[1]

    def _seconds(self, batch: Batch, outcome: Outcome, busy: int) -> float:
        moment, lines, ratios = self._now(), self._times.lines, self._level.batches
        # A stage that no row had come to when times were measured is as the one before it.
        line = lines[min(batch.place.stage, len(lines) - 1)]
        expected = line.seconds(batch.rows, self._way.executed(batch))
        return expected * moment.next(ratios[min(busy, len(ratios)) - 1], expected)

    def _rouse(self, slept: bool, begin: Do) -> None:
        moment = self._now()
        pause = moment.next(self._level.woken if slept else self._level.turned)
        self._simulation.at(self._simulation.now + pause, begin)

    def _told(self, job: Any, ids: Any, now: float) -> None:
        job.left -= len(ids)
        if not job.left:
            self._answer(job)

    def _answer(self, job: PlayedJob) -> None:
        moment = self._now()
        self._simulation.at(self._simulation.now + moment.next(self._level.back), partial(self._return, job))

    def _return(self, job: PlayedJob) -> None:
        self._done += 1
        now = self._simulation.now
        counts = self._warm <= now < self._end if self._connections else job.due_ >= self._warm
        if counts and job.refused:
            self._refused += 1
        elif counts:
            self._latencies.append(now - job.due_)
            self._carried += now < self._end
        if self._connections and now < self._end:
            if now > _SETTLED:
                self._rate = self._done / now
            self._simulation.at(now, partial(self._ask, now))
