"""How long rows take under a rule: one formula, for times measured here and for times that were given."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import mul
from pathlib import Path

import numpy as np
from offramp.runtime.arrays import Array, Floats, Ints
from offramp.runtime.bundle import Manifest
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError
from offramp.runtime.execution.stages import plan
from offramp.runtime.jobs.bundles.timing import Timings, sizes_costing, time_parts
from offramp.runtime.points import open_exits
from offramp.runtime.predictions import Records
from offramp.runtime.thresholds import leave_at


@dataclass(frozen=True)
class StageTime:
    """Milliseconds of a stage, by how many rows are expected there.

    after: rows come to it that didn't leave at this exit or before; −1: every row does.
    """

    after: int
    ms: Callable[[float], float]


@dataclass(frozen=True)
class TimeModel:
    """Expected time: Σ, over the stages that the open exits need, of the stage's time at the rows expected there.

    exit_ms: (J,) milliseconds of one row by itself that leaves at each exit, all exits open. stages: those that run
    with these exits open. source: "measured" or "given".
    """

    exit_ms: tuple[float, ...]
    stages: Callable[[tuple[int, ...]], Sequence[StageTime]]
    source: str = "measured"

    @classmethod
    def measured(cls, manifest: Manifest, timings: Timings) -> "TimeModel":
        """From times of every block and segment of a bundle: a head whose exit is closed isn't paid for."""
        ends = [e.block for e in manifest.exits]

        def measured_ms(file: str, rows: float) -> float:
            return 1e3 * timings.at(file, rows)

        @cache
        def stages(asked: tuple[int, ...]) -> list[StageTime]:
            return [
                StageTime(sum(end < stage.blocks[0] for end in ends) - 1, partial(measured_ms, stage.graph.file))
                for stage in plan(manifest, asked)
            ]

        all_open = tuple(range(len(ends)))
        return cls(tuple(_ms(stages(all_open), np.array([j]), 1) for j in all_open), stages)

    @classmethod
    def given(cls, times: Sequence[float], exits: int) -> "TimeModel":
        """From the milliseconds of leaving at each exit, which nobody says heads apart from: they're always paid.

        Raises InputError unless there is one number an exit, finite and never falling.
        """
        t = np.asarray(times, np.float64)
        if t.shape != (exits,) or not np.isfinite(t).all() or (t < 0).any() or (np.diff(t) < 0).any():
            raise InputError(
                f"times: expected {exits} cumulative milliseconds, one an exit, never falling; got {times}."
            )
        until = [*t.tolist(), 0.0]  # until[-1]: before the first exit

        def stages(asked: tuple[int, ...]) -> list[StageTime]:
            stops = sorted({*asked, exits - 1})
            return [
                StageTime(before, partial(mul, until[stop] - until[before]))
                for before, stop in zip([-1, *stops], stops, strict=False)
            ]

        return cls(tuple(t.tolist()), stages, "given")

    def leaving(self, opened: tuple[int, ...]) -> tuple[float, ...]:
        """(J,) milliseconds of one row by itself that leaves at each exit, if these exits are open (and no other)."""
        return tuple(_ms(self.stages(opened), np.array([j]), 1) for j in range(len(self.exit_ms)))

    def ms(self, score: Array, thresholds: Sequence[float], rows: float = 1) -> float:
        """Expected milliseconds of `rows` rows that come together and leave as the recorded ones would.

        score: (J, N) recorded. thresholds: one an exit; +inf closes it.
        """
        return _ms(self.stages(open_exits(thresholds)), leave_at(score, thresholds), rows)

    def spent(self, score: Array, thresholds: Sequence[float]) -> Floats:
        """(N,) milliseconds of each recorded row by itself; their mean is `ms`."""
        return np.array(self.leaving(open_exits(thresholds)))[leave_at(score, thresholds)]


def _ms(stages: Iterable[StageTime], left: Ints, rows: float) -> float:
    return sum(stage.ms(float((left > stage.after).mean()) * rows) for stage in stages)


def measure_times(bundle: str | Path, records: Records | None = None) -> TimeModel:
    """The time model of a bundle's graphs for one row by itself on this machine; takes some five seconds.

    records: the row is as large as theirs are on average, by their FLOPs; else as the bundle was verified.
    """
    with Cascade.load(bundle) as cascade:
        sizes = cascade.manifest.typical_sizes
        if records is not None and len(records):
            sizes = sizes_costing(cascade, float(np.mean(records.flops[-1])))
        return TimeModel.measured(cascade.manifest, time_parts(cascade, sizes, rows=(1,), seconds=5.0))
