"""A real way without its graphs: rows leave from the exits that are known beforehand, and FLOPs are counted."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from offramp.runtime.cascade import Cascade
from offramp.server.operating_points import OperatingPoints
from offramp.server.patience import Patience
from offramp.server.query import Query
from offramp.server.scheduling.choice import Ways
from offramp.server.scheduling.job import Job, Rows
from offramp.server.scheduling.outcome import Outcome
from offramp.server.scheduling.padding import Padding
from offramp.server.scheduling.scheduler import Batch, Place, Waiting, Way
from offramp.server.scheduling.ways import StageWay

Groups = Sequence[tuple[tuple[int, ...], list[int]]]
"""Rows by their sizes."""

_NO_FLOPS = np.zeros(1, np.int64)


class PlayedJob:
    """A request whose rows' exits are known."""

    __slots__ = (
        *("abandoned", "arrived", "due_", "exits", "expired", "left", "priority", "queued", "refused", "rows"),
        *("unanswered", "waits"),
    )

    def __init__(self, due: float, exits: list[int]) -> None:
        self.due_ = self.arrived = due
        self.exits = exits
        self.rows = self.queued = self.unanswered = self.left = len(exits)
        self.waits: list[Any] = []
        self.priority = 5
        self.abandoned = self.refused = self.expired = False

    def over(self) -> bool:
        return self.abandoned


def group(ids: list[int], sizes: tuple[int, ...]) -> Rows:
    """Rows of a played job that have these sizes."""
    return Rows({}, None, ids, sizes, _NO_FLOPS)  # type: ignore[arg-type]


class PlayedWay:
    """What the engine's way decides, without running anything."""

    def __init__(self, real: Way, cascade: Cascade, padding: Padding) -> None:
        self._real, self._cascade, self._padding, self.mixes = real, cascade, padding, real.mixes
        self._staged = isinstance(real, StageWay)
        stages = real.route.stages if isinstance(real, StageWay) else []
        self._exits = [stage.exit for stage in stages] or [None]
        self._costs: dict[tuple[tuple[int, ...], int], int] = {}
        self._spent: dict[tuple[int, ...], list[int]] = {}

    def joins(self, stage: int) -> bool:
        return self._real.joins(stage)

    def waits_at(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return self._real.waits_at(sizes)

    def flops(self, sizes: tuple[int, ...], stage: int) -> int:
        found = self._costs.get((sizes, stage))
        if found is None:
            found = self._costs[sizes, stage] = self._real.flops(sizes, stage)
        return found

    def executed(self, batch: Batch) -> int:
        """What a batch costs, at its own sizes."""
        place = batch.place
        if self._staged:
            return batch.rows * self.flops(place.sizes, place.stage)
        spent = self._spent.get(place.sizes)
        if spent is None:
            named = self._padding.named(place.sizes)
            spent = self._spent[place.sizes] = self._cascade.row_flops(named).tolist()
        return sum([spent[p.waiting.owner.exits[k]] for p in batch.parts for k in p.source.ids[p.start : p.stop]])

    def run(self, batch: Batch) -> Outcome:
        stage = batch.place.stage
        if stage == len(self._exits) - 1:
            return Outcome([(p.waiting.owner, p.source.ids[p.start : p.stop]) for p in batch.parts])
        outcome, exit = Outcome(), self._exits[stage]
        for part in batch.parts:
            job, ids = part.waiting.owner, part.source.ids[part.start : part.stop]
            stay = ids if exit is None else [k for k in ids if job.exits[k] > exit]
            if len(stay) < len(ids):
                outcome.settled.append((job, [k for k in ids if job.exits[k] <= exit]))  # type: ignore[arg-type]
            if stay:
                before = part.waiting.before + part.start
                waiting = Waiting(
                    job, len(stay), group(stay, part.source.sizes), due=part.waiting.due, before=before, since=0.0
                )
                outcome.onward.append((Place(self, stage + 1, batch.place.sizes), waiting))
        return outcome


def played_way(cascade: Cascade, point: str, *, graph: bool) -> PlayedWay:
    """The way that the engine takes at a point. graph: through the cascade graph, where both are possible."""
    points, padding = OperatingPoints(cascade), Padding(cascade.manifest)
    last = len(points.exits) - 1
    at = points.cascade(point, last)
    job = Job(Query((), 1, point, last), at.route, Patience(60.0), 0.0)
    real = Ways(points, padding, "graph" if graph else "stages").of(job, at)
    return PlayedWay(real, cascade, padding)
