"""What each exit said, told apart: the cascade graph gives it of all exits in a row."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import CascadeGraph
from offramp.runtime.execution.answers import Ids


def each_exit(
    graph: CascadeGraph,
    thresholds: NDArray[np.float32],
    gate: NDArray[np.int32],
    scores: NDArray[np.float32],
    logits: NDArray[np.float32],
) -> Iterator[tuple[int, Ids, NDArray[np.float32], NDArray[np.float32]]]:
    """The exits that ran, shallow to deep: (exit of the manifest, rows that it ran for, their scores, their logits).

    thresholds: (N, gates - 1), or (1, gates - 1) for all rows, as the graph was given them: an exit ran for the rows
    that reached it if it was open to any of them. gate: (N,) where each row left, the graph's "exit". scores (R,),
    logits (R, C): EVERY_EXIT_OUTPUTS. What is given of them are parts, not copies; rows are ascending positions.
    """
    shared, everybody = len(thresholds) == 1, np.arange(len(gate))
    first, last = (gate.item(),) * 2 if len(gate) == 1 else (gate.min(initial=graph.gates), gate.max(initial=-1))
    bars = thresholds[0].tolist() if shared else []
    start = 0 if graph.exits[0] == 0 else len(gate)  # gate 0 is there, whoever repacked the bundle closed it or not
    for exit, number in enumerate(graph.exits):
        if number > last:
            return
        rows = everybody if number <= first else np.flatnonzero(gate >= number)
        ran = number == graph.gates - 1 or (bars[number] if shared else thresholds[rows, number].min()) < math.inf
        if ran or number == 0:
            stop = start + len(rows)
            if ran:
                yield exit, rows, scores[start:stop], logits[start:stop]
            start = stop
