"""Which way a request's rows go."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.cascade import Cascade
from offramp.runtime.execution.route import Route
from offramp.runtime.gate import Gate
from offramp.runtime.points import OperatingPoint
from offramp.server.operating_points import OperatingPoints
from offramp.server.scheduling.job import Job
from offramp.server.scheduling.padding import Padding
from offramp.server.scheduling.scheduler import Batch, Way
from offramp.server.scheduling.times import StageTimes, time_stages
from offramp.server.scheduling.ways import AloneWay, GraphWay, StageWay

BATCHING = ("auto", "graph", "stages")
"""How rows of several requests are batched: decided from what is measured, always through the cascade graph where the
bundle has one, or always stage by stage."""

_KEPT = 0.98  # of what was seen, with each batch
_LOOKED_AT_EVERY = 32  # batches


class Ways:
    """The ways that a bundle's rows can go, and which is taken now."""

    def __init__(self, points: OperatingPoints, padding: Padding, batching: str = "auto") -> None:
        cascade = points.cascade(points.default, len(points.exits) - 1)
        self._points, self._padding, self.batching = points, padding, batching
        self._keeps = points.learning is not None  # what every exit says
        self._manifest, self._executor = cascade.manifest, cascade.executor
        exits = len(points.exits)
        self._graph: GraphWay | None = None
        runs = self._executor.gives_every_exit if self._keeps else self._executor.runs_cascade_graph
        if self._manifest.cascade is not None and runs and exits > 1:
            whole = Gate(OperatingPoint((*[0.0] * (exits - 1), -math.inf)), exits)
            route = Route(self._manifest, whole)
            self._graph = GraphWay(self._executor, route, padding, keeps=self._keeps)
            # By a way of their own shadow runs are in nobody's batch: each lasts as long as its slowest row.
            self._behind = GraphWay(self._executor, route, padding, keeps=self._keeps)
        self._stages: dict[tuple[int, ...], StageWay] = {}
        self._alone: dict[int, AloneWay] = {}
        early = {j for point in points.points.values() for j in point.exits[:-1]}
        self._shared = tuple(sorted(early | {exits - 1}))  # exits that any operating point leaves at
        self._cascade = cascade
        self.through_graph = self._graph is not None and batching != "stages"
        self._times: StageTimes | None = None
        self._left = np.zeros(exits)  # rows by the exit they left from, lately
        self._rows, self._batches = 0.0, 0

    def measure(self, seconds: float) -> None:
        """Time both ways, if there is a choice; it's made anew then, again and again, as traffic changes.

        seconds: about how long it may take.
        """
        if self._graph is not None and self.batching == "auto" and len(self._shared) > 1:
            route = self._stage_way(self._shared).route
            self._times = time_stages(self._cascade, route, seconds, every_exit=self._keeps)

    @property
    def chooses(self) -> bool:
        """Whether the choice may change."""
        return self._times is not None and self._times.graph is not None

    def saw(self, batch: Batch, exits: list[NDArray[Any]]) -> bool:
        """A batch has run. exits: those that its rows left from, in parts. Returns whether the choice has changed."""
        if self._times is None or not self.chooses or not exits:
            return False
        self._left = self._left * _KEPT + np.bincount(np.concatenate(exits), minlength=len(self._left))
        if not batch.place.stage:
            self._rows += (batch.rows - self._rows) * (1 - _KEPT if self._batches else 1)
            self._batches += 1
        if self._batches % _LOOKED_AT_EVERY or batch.place.stage:
            return False
        reach = [float(self._left[j:].sum() / self._left.sum()) for j in (0, *(e + 1 for e in self._shared[:-1]))]
        before = self.through_graph
        self.through_graph = self._times.graph_is_cheaper(reach, self._rows, before)
        return self.through_graph != before

    def of(self, job: Job, cascade: Cascade) -> Way:
        """The way of a job's rows, whose rule is `cascade`'s."""
        route = job.route
        if route.needs_routing or not self._manifest.rows_independent:
            return self._alone.setdefault(id(cascade), AloneWay(cascade, self._padding, keeps=self._keeps))
        if len(route.stages) == 1 and not job.anytime:
            return self._stage_way(route.gate.point.exits)
        if self._graph is not None and self.through_graph and route.threshold_inputs is not None and not job.anytime:
            return self._graph if job.query.seen is None else self._behind
        exits = route.gate.point.exits
        return self._stage_way(self._shared if set(exits) <= set(self._shared) else exits)

    def _stage_way(self, exits: tuple[int, ...]) -> StageWay:
        way = self._stages.get(exits)
        if way is None:
            last = len(self._points.exits) - 1
            bars = tuple(-math.inf if j == last else 0.0 if j in exits else math.inf for j in range(last + 1))
            route = Route(self._manifest, Gate(OperatingPoint(bars), last + 1))
            way = self._stages[exits] = StageWay(self._executor, route, self._padding, keeps=self._keeps)
        return way
