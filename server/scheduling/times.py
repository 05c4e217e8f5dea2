"""What stages take on this machine, and which way is therefore the cheaper."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from offramp.runtime.cascade import Cascade
from offramp.runtime.execution.route import Route
from offramp.runtime.inputs import made_up_inputs
from offramp.runtime.jobs.bundles.timing import time_cascade_graph, time_graphs
from offramp.runtime.points import full

ROWS = (1, 4, 16)
"""Numbers of rows that stages are timed with."""

_BETWEEN = 8e-4  # seconds that a batch takes in the engine beside its graph: .4 to .8 ms for MiniLM on two cores
_ROUNDS = 6
_CLEARLY = 0.95  # of the other way's time, to change over


@dataclass(frozen=True)
class StageTimes:
    """Seconds that stages take, at ROWS rows.

    flops: of one row in each stage, at the sizes that were timed. graph: (K, R), inside the cascade graph; None where
    there is none. alone: (K, R), each as a graph of its own.
    """

    flops: tuple[int, ...]
    graph: tuple[tuple[float, ...], ...] | None
    alone: tuple[tuple[float, ...], ...]

    def of_stage(self, stage: int, rows: float) -> float:
        """Of one stage by itself, for so many rows of the sizes that were timed."""
        return _at(self.alone[stage], rows)

    def of_graph(self, through: Sequence[float]) -> float:
        """Of the cascade graph, if so many rows go through each stage."""
        assert self.graph is not None
        return sum(_at(line, rows) for line, rows in zip(self.graph, through, strict=True))

    def graph_is_cheaper(self, reach: Sequence[float], rows: float, before: bool) -> bool:
        """Whether rows are better run through the cascade graph than stage by stage.

        reach: the share of rows that comes to each stage. rows: in a batch in front of the first. Stage by stage,
        later ones fill up to as many again. before: what has been chosen so far; a small gain doesn't change it.
        """
        graph = self.of_graph([share * rows for share in reach])
        stages = sum(share * (self.of_stage(k, rows) + _BETWEEN) for k, share in enumerate(reach))
        return graph * _CLEARLY < stages if before else graph < _CLEARLY * stages


def _at(line: Sequence[float], rows: float) -> float:
    """Linear between what was timed, and on from there as between the last two."""
    if rows <= ROWS[0]:
        return line[0] * rows
    if rows >= ROWS[-1]:
        slope = (line[-1] - line[-2]) / (ROWS[-1] - ROWS[-2])
        return line[-1] + max(slope, 0.0) * (rows - ROWS[-1])
    return float(np.interp(rows, ROWS, line))


def time_stages(cascade: Cascade, route: Route, seconds: float, *, every_exit: bool = False) -> StageTimes | None:
    """Time a route's stages, and the same blocks inside the cascade graph if that has an exit behind each.

    seconds: about how long it may take; None where a few rounds would take far longer. every_exit: as graphs are run
    where it is kept what every exit says.
    """
    manifest, sizes = cascade.manifest, cascade.manifest.typical_sizes
    inputs = made_up_inputs(manifest, {**sizes, "batch": 1})
    whole = cascade.at(full(len(manifest.exits)))
    whole.predict(inputs)
    began = time.perf_counter()
    whole.predict(inputs)
    if (time.perf_counter() - began) * sum(ROWS) * 2 * _ROUNDS > 4 * seconds:
        return None
    graphs = [stage.graph for stage in route.stages]
    alone = time_graphs(cascade, graphs, sizes, rows=ROWS, rounds=_ROUNDS, seconds=seconds / 2)
    inside = None
    executor = cascade.executor
    if executor.gives_every_exit if every_exit else executor.runs_cascade_graph:
        found = time_cascade_graph(
            cascade, sizes, rows=ROWS, rounds=_ROUNDS, seconds=seconds / 2, every_exit=every_exit
        ).seconds
        if all(graph.file in found for graph in graphs):
            inside = tuple(found[graph.file] for graph in graphs)
    return StageTimes(route.costs(sizes).stages, inside, tuple(alone.seconds[graph.file] for graph in graphs))
