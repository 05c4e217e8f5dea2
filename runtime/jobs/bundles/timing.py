"""How long each graph of a bundle takes on this machine."""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from offramp.runtime.bundle import Block, Manifest, Segment
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError
from offramp.runtime.execution.route import threshold_inputs
from offramp.runtime.inputs import made_up_inputs
from offramp.runtime.scores import LARGEST


@dataclass(frozen=True)
class Timings:
    """Median seconds of each graph, by file, at several numbers of rows."""

    rows: tuple[int, ...]
    seconds: Mapping[str, tuple[float, ...]]

    def at(self, file: str, rows: float) -> float:
        """Expected seconds of a graph when `rows` rows are expected: linear between what was measured.

        Below one row it's the time of one row, times the chance that it comes at all.
        """
        if rows < self.rows[0]:
            return self.seconds[file][0] * rows / self.rows[0]
        return float(np.interp(rows, self.rows, self.seconds[file]))


def sizes_costing(cascade: Cascade, flops: float) -> dict[str, int]:
    """Axis sizes, the batch apart, at which a row that runs to the end costs about this many FLOPs.

    All axes grow and shrink together, in the proportions at which the bundle was verified.
    """
    typical = cascade.manifest.typical_sizes

    def scaled(factor: float) -> dict[str, int]:
        return {axis: max(1, round(size * factor)) for axis, size in typical.items()}

    if not typical:
        return {}
    low, high = 1 / max(typical.values()), 1024.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        if int(cascade.row_flops(scaled(middle))[-1]) < flops:
            low = middle
        else:
            high = middle
    return min((scaled(low), scaled(high)), key=lambda sizes: abs(int(cascade.row_flops(sizes)[-1]) - flops))


def time_graphs(
    cascade: Cascade,
    graphs: Sequence[Block],
    sizes: Mapping[str, int],
    *,
    rows: Sequence[int] = (1, 8, 32),
    rounds: int = 30,
    seconds: float = 20.0,
) -> Timings:
    """Run the graphs in turns, in random order, at each number of rows; medians of at least five rounds.

    sizes: of every symbolic axis but the batch. seconds: about how long this may take in all.
    """
    executor, medians = cascade.executor, dict[str, list[float]]((graph.file, []) for graph in graphs)
    for count in rows:
        state = dict(executor.put(made_up_inputs(cascade.manifest, {**sizes, "batch": count})))
        for block in cascade.manifest.blocks:
            state |= executor.run(block, state, block.outputs)
        runs = {
            graph.file: partial(executor.run, graph, state, _handed_on(cascade.manifest, graph)) for graph in graphs
        }
        for file, median in _in_turns(runs, rounds, seconds / len(rows)).items():
            medians[file].append(median)
    return Timings(tuple(rows), {file: tuple(values) for file, values in medians.items()})


def _in_turns(runs: Mapping[Any, Callable[[], Any]], rounds: int, seconds: float) -> dict[Any, float]:
    """Median seconds of each, run in turns in random order; at least five rounds after two to warm up."""
    rng = random.Random(0)
    taken: dict[Any, list[float]] = {name: [] for name in runs}
    order, deadline = list(runs), time.perf_counter() + seconds
    for done in range(rounds + 2):
        rng.shuffle(order)
        for name in order:
            started = time.perf_counter()
            runs[name]()
            if done >= 2:
                taken[name].append(time.perf_counter() - started)
        if done >= 6 and time.perf_counter() > deadline:
            break
    return {name: statistics.median(values) for name, values in taken.items()}


def time_cascade_graph(
    cascade: Cascade,
    sizes: Mapping[str, int],
    *,
    rows: Sequence[int] = (1, 8, 32),
    rounds: int = 30,
    seconds: float = 20.0,
    every_exit: bool = False,
) -> Timings:
    """What each block and segment takes inside the cascade graph, by file as `time_graphs`.

    The graph is run with everybody leaving at one exit and the others closed: what a block takes is the
    difference to the exit before. What an exit takes that nobody leaves at is measured by opening it, out of reach.
    every_exit: of the graph that gives what every exit says.
    """
    manifest, executor = cascade.manifest, cascade.executor
    cascade_graph = manifest.cascade
    if cascade_graph is None or not executor.runs_cascade_graph:
        raise InputError("no cascade graph is run here: time the bundle's blocks.")
    last = len(manifest.exits) - 1
    closed = [math.inf] * last
    rules: dict[tuple[str, int], list[float]] = {("through", last): closed}
    for j in range(last):
        rules["through", j] = [*closed[:j], -LARGEST, *closed[j + 1 :]]
        rules["asked", j] = [*closed[:j], LARGEST, *closed[j + 1 :]]
    graphs = [*manifest.blocks, *manifest.segments]
    found: dict[str, list[float]] = {graph.file: [] for graph in graphs}
    for count in rows:
        inputs = made_up_inputs(manifest, {**sizes, "batch": count})
        runs = {
            name: partial(
                executor.run_cascade_graph, inputs, threshold_inputs(cascade_graph, rule), every_exit=every_exit
            )
            for name, rule in rules.items()
        }
        spent = _in_turns(runs, rounds, seconds / len(rows))
        through = [spent["through", j] for j in range(last + 1)]
        for graph in graphs:
            if graph.exit is None:
                continue
            first = graph.first if isinstance(graph, Segment) else manifest.blocks.index(graph)
            took, earlier = through[graph.exit], sum(e.block < first for e in manifest.exits)
            if earlier:  # what came before, but not its head, which is among what was measured there
                head = max(0.0, spent["asked", earlier - 1] - through[last])
                took -= through[earlier - 1] - head
            found[graph.file].append(max(took, 0.0))
    return Timings(tuple(rows), {file: tuple(values) for file, values in found.items() if values})


def time_parts(
    cascade: Cascade, sizes: Mapping[str, int], *, rows: Sequence[int] = (1, 32), seconds: float = 20.0
) -> Timings:
    """What every block and segment takes on this machine, the way that the cascade would run it."""
    if cascade.executor.runs_cascade_graph:
        return time_cascade_graph(cascade, sizes, rows=rows, seconds=seconds)
    graphs = [*cascade.manifest.blocks, *cascade.manifest.segments]
    return time_graphs(cascade, graphs, sizes, rows=rows, seconds=seconds)


def _handed_on(manifest: Manifest, graph: Block) -> list[str]:
    """What serving fetches of a graph: its state, and its exit's label and score."""
    exit_ = manifest.exits[graph.exit] if graph.exit is not None else None
    gate = [] if exit_ is None else [exit_.label, exit_.score]
    return [name for name in graph.outputs if name in manifest.tensors or name in gate]
