"""The leave rule outside the graphs: a row leaves at the first exit whose score reaches its threshold."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime.arrays import Array, Bools, Ints, numbers
from offramp.runtime.errors import InputError

# Right after a run of ONNX Runtime a call into numpy costs ten times what it does in a hot loop; a few rows are
# compared faster one by one.
FEW_ROWS = 8


# Scores are float32 and saturate there, in the graphs and outside.
_LARGEST = float(np.finfo(np.float32).max)


def effective(threshold: float) -> float:
    """A threshold as the graphs, which compare in float32, can hold it: beyond ±3.4e38 it is ±inf.

    No score lies beyond, so such a threshold says what infinity says: closed, or open to every row.
    """
    return threshold if abs(threshold) <= _LARGEST or math.isnan(threshold) else math.copysign(math.inf, threshold)


@lru_cache(maxsize=64)
def _all(rows: int, value: bool) -> Bools:
    """A shared constant, so it is read-only."""
    constant = np.full(rows, value)
    constant.flags.writeable = False
    return constant


def reached(score: Array, threshold: float) -> Bools:
    """(n,) whether scores (n,) reach a threshold, perhaps read-only.

    +inf is an exit that is switched off: no score reaches it. Every row reaches −inf, one with a NaN score too; a NaN
    reaches nothing else. Compared in float64: a float32 score against a rounded threshold would move ties.
    """
    rows, threshold = len(score), effective(threshold)
    if math.isinf(threshold):
        return _all(rows, threshold < 0)
    if rows <= FEW_ROWS:
        those = [s >= threshold for s in score.tolist()]
        if not any(those):
            return _all(rows, False)
        if all(those):
            return _all(rows, True)
    return np.asarray(score, np.float64) >= threshold


def leave_at(scores: Array, thresholds: ArrayLike) -> Ints:
    """(N,) the exit that each row leaves at: the first j whose score (J, N) reaches thresholds[j], else the last.

    thresholds: (J,). Raises InputError for another number of them, or a NaN among them.
    """
    bars = numbers(thresholds, "thresholds")
    if bars.shape != scores.shape[:1] or np.isnan(bars).any():
        raise InputError(f"thresholds: expected {len(scores)} numbers, none of them NaN, got {bars.tolist()}.")
    exits: Ints = np.full(scores.shape[1], len(bars) - 1, np.int64)
    for j in range(len(bars) - 2, -1, -1):
        exits[reached(scores[j], float(bars[j]))] = j
    return exits
