"""Early-exit metrics: does the right row leave at the right exit?

scores, correct: (J, N), exits by rows, shallow first; higher score = more confident. cost: (J,) or (J, N),
the cumulative cost of leaving at each exit, in FLOPs, milliseconds or any unit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Array, Bools, Floats, Ints
from offramp.runtime.errors import InputError
from offramp.runtime.metrics.selective import auroc
from offramp.runtime.thresholds import geometric_shares, leave_at, reached, thresholds_for_shares

Metric = TypeVar("Metric", bound=Callable[..., Any])


def _rows_last(metric: Metric) -> Metric:
    """Tells `bootstrap` that the rows are on the last axis."""
    metric.__dict__["rows_axis"] = -1
    return metric


def _correct(correct: ArrayLike) -> Bools:
    right = np.asarray(correct)
    if right.ndim != 2 or not right.shape[0]:
        raise InputError(f"correct: expected shape (exits, rows), got {right.shape}.")
    return arrays.flags(right.reshape(-1), "correct").reshape(right.shape)


def _scores(scores: ArrayLike, shape: tuple[int, ...]) -> Array:
    s = np.asarray(scores)
    if s.shape != shape or s.dtype.kind not in "fiu":
        raise InputError(f"scores: expected numbers of shape {shape}, as correct has, got {s.shape} of {s.dtype}.")
    arrays.refuse_nan(np.isnan(s).any(axis=0), "scores")
    return s


def _cost(cost: ArrayLike, shape: tuple[int, ...]) -> Floats:
    c = arrays.numbers(cost, "cost")
    c = np.broadcast_to(c[:, None], shape) if c.shape == shape[:1] else c
    if c.shape != shape or not np.isfinite(c).all():
        raise InputError(f"cost: expected finite numbers of shape {shape[:1]} or {shape}, got shape {c.shape}.")
    return c


def leave_here(correct: ArrayLike) -> Bools:
    """ȳ (J, N): exit j is right, or every deeper exit is wrong too. All true at the last exit. EEFP section 4."""
    right = _correct(correct)
    someone_deeper = np.zeros_like(right)
    someone_deeper[:-1] = np.logical_or.accumulate(right[::-1])[::-1][1:]
    return right | ~someone_deeper


@_rows_last
def eefp(scores: ArrayLike, correct: ArrayLike, *, weights: ArrayLike | None = None) -> Floats:
    """Early-exit failure prediction, one value an exit: AUROC of the score against `leave_here`.

    An exit should be confident where it is right, or where nobody deeper would be right either. All N rows
    count at every exit. Returns (J,) in [0, 1]; NaN where one side is empty, which the last exit always is.
    weights: (N,) ≥ 0, what each row stands for.
    Source: Kubaty et al. 2025, section 4.
    """
    target = leave_here(correct)
    every = zip(_scores(scores, target.shape), target, strict=True)
    return np.array([auroc(s, y, weights=weights) for s, y in every])


@_rows_last
def eef1(scores: ArrayLike, correct: ArrayLike, thresholds: ArrayLike) -> Floats:
    """F1 of leaving (score_j ≥ thresholds[j]) against `leave_here`, on the rows that reach each exit.

    thresholds: (J,), or (J − 1,) without the last exit's, where every row leaves. Returns (J,) in [0, 1]: 1
    at the last exit; NaN where nobody arrives, or nobody leaves nor should. EEF1 is the mean: `eef1_mean`.
    Source: Kubaty et al. 2025, appendix D.
    """
    target = leave_here(correct)
    s = _scores(scores, target.shape)
    bars = _bars(thresholds, len(s))
    out = np.full(len(s), np.nan)
    playing = np.ones(s.shape[1], bool)
    for j in range(len(s)):
        leaves = reached(s[j], float(bars[j])) if j < len(s) - 1 else np.ones_like(playing)
        right = int((leaves & target[j] & playing).sum())
        all_marks = int((leaves & playing).sum()) + int((target[j] & playing).sum())
        if all_marks:
            out[j] = 2 * right / all_marks
        playing &= ~leaves
    if s.shape[1]:
        out[-1] = 1.0
    return out


def _bars(thresholds: ArrayLike, exits: int) -> Floats:
    bars = arrays.numbers(thresholds, "thresholds")
    if bars.shape == (exits - 1,):
        bars = np.append(bars, -np.inf)
    if bars.shape != (exits,) or np.isnan(bars).any():
        raise InputError(f"thresholds: expected {exits} numbers (or {exits - 1}), got shape {bars.shape}.")
    return bars


@_rows_last
def eef1_mean(scores: ArrayLike, correct: ArrayLike, thresholds: ArrayLike) -> float:
    """EEF1: the mean of `eef1` over the exits where it is defined, the last one (always 1) among them."""
    each = eef1(scores, correct, thresholds)
    return float(np.nanmean(each)) if not np.isnan(each).all() else float("nan")


@dataclass(frozen=True)
class CostAccuracy:
    """One point for each set of thresholds: accuracy and mean cost a row, (K,) each."""

    thresholds: Floats
    cost: Floats
    accuracy: Floats


def cost_accuracy(
    scores: ArrayLike,
    correct: ArrayLike,
    cost: ArrayLike,
    thresholds: ArrayLike | None = None,
    points: int = 40,
) -> CostAccuracy:
    """The cost–accuracy curve.

    thresholds: (K, J); by default those of `points` exit shares, from all rows at the first exit to all at
    the last. NaN without rows.
    """
    right = _correct(correct)
    s, c = _scores(scores, right.shape), _cost(cost, right.shape)
    if thresholds is None:
        bars = np.array([thresholds_for_shares(s, geometric_shares(len(s), q)) for q in _spread(points)]).reshape(
            -1, len(s)
        )
    else:
        bars = np.array([_bars(one, len(s)) for one in np.atleast_2d(arrays.numbers(thresholds, "thresholds"))])
    rows = np.arange(s.shape[1])
    spent, hit = np.full(len(bars), np.nan), np.full(len(bars), np.nan)
    if len(rows):
        for i, one in enumerate(bars):
            exits = leave_at(s, one)
            spent[i], hit[i] = c[exits, rows].mean(), right[exits, rows].mean()
    return CostAccuracy(bars, spent, hit)


def _spread(points: int) -> Floats:
    """log q from −12 to 12, denser around 0 where most of the curve is."""
    return 12 * np.linspace(-1, 1, points) ** 3


@dataclass(frozen=True)
class Oracle:
    """Leaving at the shallowest right exit, or at once where no exit is right: the best any rule can do.

    exits: (N,). accuracy: share of rows some exit gets right. cost: mean cost a row.
    """

    exits: Ints
    accuracy: float
    cost: float


def oracle(correct: ArrayLike, cost: ArrayLike) -> Oracle:
    """The oracle exit of every row. NaN accuracy and cost without rows."""
    right = _correct(correct)
    c = _cost(cost, right.shape)
    exits: Ints = right.argmax(axis=0)
    if not right.shape[1]:
        return Oracle(exits, float("nan"), float("nan"))
    return Oracle(exits, float(right.any(axis=0).mean()), float(c[exits, np.arange(c.shape[1])].mean()))


@dataclass(frozen=True)
class OracleGap:
    """What a rule leaves on the table: oracle accuracy − accuracy (≥ 0), cost / oracle cost (any sign of gap)."""

    accuracy: float
    cost_ratio: float


def gap_to_oracle(correct: ArrayLike, cost: ArrayLike, exits: ArrayLike) -> OracleGap:
    """How far leaving at `exits` (N,) is from the oracle."""
    right = _correct(correct)
    c = _cost(cost, right.shape)
    best = oracle(right, c)
    chosen = arrays.labels(exits, right.shape[1], right.shape[0], "exits")
    rows = np.arange(right.shape[1])
    if not len(rows):
        return OracleGap(float("nan"), float("nan"))
    spent = float(c[chosen, rows].mean())
    return OracleGap(best.accuracy - float(right[chosen, rows].mean()), spent / best.cost if best.cost else np.nan)


def agreement(labels: ArrayLike) -> Floats:
    """(J, J) share of rows on which two exits give the same label; labels (J, N). NaN without rows."""
    answers = np.asarray(labels)
    if answers.ndim != 2:
        raise InputError(f"labels: expected each exit's labels, shape (exits, rows), got {answers.shape}.")
    if not answers.shape[1]:
        return np.full((len(answers),) * 2, np.nan)
    return np.array([[float((a == b).mean()) for b in answers] for a in answers])


@_rows_last
def overthinking(correct: ArrayLike) -> float:
    """Share of rows that some earlier exit gets right and the last one wrong, in [0, 1]. NaN without rows."""
    right = _correct(correct)
    return float((right[:-1].any(axis=0) & ~right[-1]).mean()) if right.shape[1] else float("nan")


def expected_loss(predicted: ArrayLike, labels: ArrayLike, loss: ArrayLike, abstain: ArrayLike | None = None) -> float:
    """Mean loss[label, predicted] over rows by a user's loss matrix (C, C), rows the truth.

    With `abstain` (N,) flags the matrix is (C, C + 1), its last column the price of not answering. Rows
    labelled −1 are left out. NaN without rows.
    """
    matrix = arrays.numbers(loss, "loss")
    extra = 0 if abstain is None else 1
    if matrix.ndim != 2 or matrix.shape[1] != matrix.shape[0] + extra or not np.isfinite(matrix).all():
        shape = "(classes, classes)" if abstain is None else "(classes, classes + 1)"
        raise InputError(f"loss: expected finite numbers of shape {shape}, got shape {matrix.shape}.")
    classes = len(matrix)
    truth = arrays.labels(labels, classes=classes)
    answer = arrays.labels(predicted, len(truth), classes, "predicted")
    if abstain is not None:
        answer = np.where(arrays.flags(abstain, "abstain", len(truth)), classes, answer)
    known = truth >= 0
    return float(matrix[truth[known], answer[known]].mean()) if known.any() else float("nan")
