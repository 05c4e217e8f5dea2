"""Prediction ensembling over exits: each exit answers with the geometric mean of all exits so far."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import scores
from offramp.runtime.arrays import Array, Floats
from offramp.runtime.errors import InputError

State = dict[str, Array]


def ensemble_step(logits: ArrayLike, state: Mapping[str, Array] | None) -> tuple[Floats, State]:
    """Logits whose softmax is the (normalised) geometric mean of this exit's and all earlier probabilities.

    logits: (n, C). state: what the last exit returned, of the rows that went on; None at the first exit. A
    class that any exit so far gives probability 0 has probability 0.
    """
    logs = scores.log_softmax(np.asarray(logits).astype(np.float64))
    if state is None:
        total, count = logs, np.ones(len(logs), np.int64)
    else:
        total, count = state["ensemble_logs"] + logs, state["ensemble_count"] + 1
    return np.asarray(total / count[:, None]), {"ensemble_logs": total, "ensemble_count": count}


def running_geometric_mean(logits: ArrayLike) -> Floats:
    """(J, N, C) logits of the exits -> (J, N, C) logits of the mean over exits 0…j."""
    z = np.asarray(logits)
    if z.ndim != 3:
        raise InputError(f"logits: expected shape (exits, rows, classes), got {z.shape}.")
    out = np.empty(z.shape)
    state: State | None = None
    for j, one in enumerate(z):
        out[j], state = ensemble_step(one, state)
    return out
