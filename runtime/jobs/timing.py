"""How long each graph of a bundle takes on this machine."""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import Block, Manifest
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError

Arrays = dict[str, NDArray[Any]]


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


def made_up_inputs(manifest: Manifest, sizes: Mapping[str, int]) -> Arrays:
    """Inputs of the model's types and these axis sizes: normal floats, ones for integers. Time, not answers."""
    rng = np.random.default_rng(0)
    arrays: Arrays = {}
    for given in manifest.inputs:
        missing = [d for d in given.shape if isinstance(d, str) and d not in sizes]
        if missing:
            raise InputError(
                f"sizes lacks the axis {missing[0]!r} of input {given.name!r}: for example {missing[0]}=32."
            )
        shape = [sizes[d] if isinstance(d, str) else d for d in given.shape]
        floats = np.dtype(given.dtype).kind == "f"
        arrays[given.name] = (rng.standard_normal(shape) if floats else np.ones(shape)).astype(given.dtype)
    return arrays


def typical_sizes(manifest: Manifest) -> dict[str, int]:
    """Axis sizes, the batch apart, at which the bundle was verified."""
    verified = manifest.verified.get("sizes") or [{}]
    sizes = {axis: int(size) for axis, size in verified[0].items() if axis in manifest.axes and axis != "batch"}
    return {axis: sizes.get(axis, 32) for axis in manifest.axes if axis != "batch"}


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
    rng = random.Random(0)
    medians: dict[str, list[float]] = {graph.file: [] for graph in graphs}
    for count in rows:
        state: Arrays = made_up_inputs(cascade.manifest, {**sizes, "batch": count})
        for block in cascade.manifest.blocks:
            state |= cascade.run_graph(block, state, block.outputs)
        outputs = {graph.file: _handed_on(cascade.manifest, graph) for graph in graphs}
        taken: dict[str, list[float]] = {graph.file: [] for graph in graphs}
        order, deadline = list(graphs), time.perf_counter() + seconds / len(rows)
        for done in range(rounds + 2):
            rng.shuffle(order)
            for graph in order:
                started = time.perf_counter()
                cascade.run_graph(graph, state, outputs[graph.file])
                if done >= 2:  # the first rounds warm up
                    taken[graph.file].append(time.perf_counter() - started)
            if done >= 6 and time.perf_counter() > deadline:
                break
        for file, values in taken.items():
            medians[file].append(statistics.median(values))
    return Timings(tuple(rows), {file: tuple(values) for file, values in medians.items()})


def _handed_on(manifest: Manifest, graph: Block) -> list[str]:
    """What serving fetches of a graph: its state, and its exit's label and score."""
    exit_ = manifest.exits[graph.exit] if graph.exit is not None else None
    gate = [] if exit_ is None else [exit_.label, exit_.score]
    return [name for name in graph.outputs if name in manifest.tensors or name in gate]
