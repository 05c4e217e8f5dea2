"""Patience: leave when the last k exits gave the same label (Zhou et al. 2020)."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Array, Ints
from offramp.runtime.errors import InputError
from offramp.runtime.thresholds.exit_share import cascade_inputs

State = dict[str, Array]


def patience_step(label: ArrayLike, state: Mapping[str, Array] | None) -> tuple[Ints, State]:
    """How many exits in a row, this one included, gave each row its label; and the state for the next exit.

    label: (n,). state: what the last exit returned, of the rows that went on; None at the first exit.
    """
    now = np.asarray(label).astype(np.int64)
    if state is None:
        agreeing = np.ones(len(now), np.int64)
    else:
        agreeing = np.where(now == state["patience_label"], state["patience_count"] + 1, 1)
    return agreeing, {"patience_label": now, "patience_count": agreeing}


def patience_exits(labels: ArrayLike, patience: int) -> Ints:
    """(N,) the first exit at which `patience` exits in a row agree, else the last one. labels: (J, N)."""
    answers = np.asarray(labels)
    if answers.ndim != 2 or not len(answers):
        raise InputError(f"labels: expected each exit's labels, shape (exits, rows), got {answers.shape}.")
    if patience < 1:
        raise InputError(f"patience: expected at least 1, got {patience!r}.")
    exits = np.full(answers.shape[1], len(answers) - 1)
    undecided = np.ones(answers.shape[1], bool)
    state: State | None = None
    for j, label in enumerate(answers):
        agreeing, state = patience_step(label, state)
        leaves = undecided & (agreeing >= patience)
        exits[leaves] = j
        undecided &= ~leaves
    return exits


@dataclass(frozen=True)
class Patience:
    """k agreeing exits, with cost (fraction of the full mean) and drop on the rows used; k = J never leaves
    early."""

    patience: int
    cost: float
    drop: float


def choose_patience(labels: ArrayLike, correct: ArrayLike, flops: ArrayLike, drop: float = 0.01) -> Patience:
    """The cheapest patience with accuracy drop ≤ `drop` against the last exit.

    labels, correct: (J, N). flops: (J,) or (J, N), cumulative. At k = J every row goes to the last exit, so
    one always qualifies. Without rows: k = J, NaN.
    """
    answers = np.asarray(labels)
    _, cost = cascade_inputs(np.zeros(answers.shape), flops)
    right = np.asarray(correct)
    if right.shape != answers.shape:
        raise InputError(f"correct: expected shape {answers.shape}, as labels has, got {right.shape}.")
    right = arrays.flags(right.reshape(-1), "correct").reshape(answers.shape)
    exits, n = answers.shape
    if not n:
        return Patience(exits, float("nan"), float("nan"))
    rows = np.arange(n)
    full = float(cost[-1].mean()) or 1.0
    found = []
    for k in range(1, exits + 1):
        at = patience_exits(answers, k)
        lost = float(right[-1].mean() - right[at, rows].mean())
        found.append(Patience(k, float(cost[at, rows].mean()) / full, lost))
    return min((one for one in found if one.drop <= drop + 1e-12), key=lambda one: one.cost)
