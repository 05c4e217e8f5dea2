"""Calibration metrics: how far stated confidence is from what happened.

All take (N, C) probabilities with (N,) labels; those about the top class also (N,) confidences with (N,) 0/1
correctness. Computed in float64, rows labelled −1 left out, `weights` (N,) ≥ 0 optional. Bins are
right-closed ((b − 1)/M, b/M], 0 in the first, 1 in the last, empty ones count nothing. Without rows every
metric is NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays, scores
from offramp.runtime.arrays import Array, Floats, Ints
from offramp.runtime.errors import InputError
from offramp.runtime.metrics.bins import check_bins, equal_mass, equal_width
from offramp.runtime.metrics.pairs import Pairs, classified, labelled, pairs, refuse_outside
from offramp.runtime.metrics.resampling import Resampled, resampled

NAN = float("nan")


# ---------------------------------------------------------------- top-1 confidence


def _bin_residuals(rows: Pairs, bins: int) -> Floats:
    """(M,) Σ w(c − t) of each equal-width bin."""
    number = equal_width(rows.confidence, check_bins(bins))
    return arrays.group_sums(number, rows.residual, bins)


def _binned(reduce_bins: Callable[[Array], Array]) -> Callable[..., Resampled]:
    """Bootstrap of a metric that is a function of the bins' residual sums over the total weight."""

    def prepare(
        probabilities: ArrayLike, labels: ArrayLike, bins: int = 15, *, weights: ArrayLike | None = None
    ) -> Resampled:
        rows = pairs(probabilities, labels, weights)
        in_bin = np.zeros((len(rows), check_bins(bins)))
        in_bin[np.arange(len(rows)), equal_width(rows.confidence, bins)] = rows.residual
        mass = np.ones(len(rows)) if rows.weights is None else rows.weights

        def many(counts: Floats) -> Floats:
            return np.asarray(reduce_bins(counts @ in_bin)) / (counts @ mass)

        return Resampled(len(rows), many)

    return prepare


@resampled(_binned(lambda sums: np.abs(sums).sum(axis=1)))
def ece(probabilities: ArrayLike, labels: ArrayLike, bins: int = 15, *, weights: ArrayLike | None = None) -> float:
    """Expected calibration error Σ_m |B_m|/N·|conf_m − acc_m| of the top class, in [0, 1]. Guo et al. 2017."""
    rows = pairs(probabilities, labels, weights)
    return float(np.abs(_bin_residuals(rows, bins)).sum() / rows.mass) if len(rows) else NAN


@resampled(_binned(lambda sums: sums.sum(axis=1)))
def mcs(probabilities: ArrayLike, labels: ArrayLike, bins: int = 15, *, weights: ArrayLike | None = None) -> float:
    """Miscalibration score Σ_m |B_m|/N·(conf_m − acc_m), in [−1, 1]: + over-confident, − under-confident.

    The bins cancel: it is mean confidence minus accuracy. cwMCS eq. 5.
    """
    rows = pairs(probabilities, labels, weights)
    return float(_bin_residuals(rows, bins).sum() / rows.mass) if len(rows) else NAN


def ace(probabilities: ArrayLike, labels: ArrayLike, bins: int = 15, *, weights: ArrayLike | None = None) -> float:
    """Adaptive ECE: equal-mass bins, the stable order cut like np.array_split, in [0, 1]. Nixon et al. 2019.

    With more bins than rows each row is its own bin.
    """
    rows = pairs(probabilities, labels, weights)
    if not len(rows):
        return NAN
    bins = min(check_bins(bins), len(rows))
    sums = np.bincount(equal_mass(rows.confidence, bins), rows.residual, minlength=bins)
    return float(np.abs(sums).sum() / rows.mass)


def mce(
    probabilities: ArrayLike,
    labels: ArrayLike,
    bins: int = 15,
    *,
    min_count: int = 5,
    weights: ArrayLike | None = None,
) -> float:
    """Maximum over bins of |conf_m − acc_m|, in [0, 1]; bins with fewer than `min_count` rows are ignored.

    NaN when no bin has that many.
    """
    rows = pairs(probabilities, labels, weights)
    number = equal_width(rows.confidence, check_bins(bins))
    sums = np.bincount(number, rows.residual, minlength=bins)
    mass = np.bincount(number, rows.weights, minlength=bins)
    used = (np.bincount(number, minlength=bins) >= max(1, min_count)) & (mass > 0)
    return float(np.abs(sums[used] / mass[used]).max()) if used.any() else NAN


def accuracy(probabilities: ArrayLike, labels: ArrayLike, *, weights: ArrayLike | None = None) -> float:
    """Share of rows whose top class is the label, in [0, 1]."""
    rows = pairs(probabilities, labels, weights)
    return float(np.average(rows.correct, weights=rows.weights)) if len(rows) else NAN


@dataclass(frozen=True)
class Reliability:
    """What a reliability diagram shows, one entry a bin; confidence and accuracy are NaN in empty bins."""

    edges: Floats
    count: Ints
    confidence: Floats
    accuracy: Floats


def reliability(
    probabilities: ArrayLike, labels: ArrayLike, bins: int = 15, *, weights: ArrayLike | None = None
) -> Reliability:
    """Mean confidence and accuracy of each equal-width bin."""
    rows = pairs(probabilities, labels, weights)
    number = equal_width(rows.confidence, check_bins(bins))
    w = np.ones(len(rows)) if rows.weights is None else rows.weights
    mass = np.bincount(number, w, minlength=bins)
    with np.errstate(invalid="ignore", divide="ignore"):
        confidence = np.bincount(number, w * rows.confidence, minlength=bins) / mass
        right = np.bincount(number, w * rows.correct, minlength=bins) / mass
    return Reliability(np.arange(bins + 1) / bins, np.bincount(number, minlength=bins), confidence, right)


# ---------------------------------------------------------------- class by class

By = Literal["true", "predicted"]


def _by_class(
    probabilities: ArrayLike, labels: ArrayLike, bins: int, by: By, weights: ArrayLike | None
) -> tuple[Floats, Floats]:
    """(C, M) Σ w(c − t) and (C,) Σ w, of the rows whose true (or predicted) class is k."""
    if by not in ("true", "predicted"):
        raise InputError(f'by: expected "true" or "predicted", got {by!r}.')
    rows = classified(probabilities, labels, weights)
    bins = check_bins(bins)
    k = rows.truth if by == "true" else rows.predicted
    cell = k * bins + equal_width(rows.confidence, bins)
    sums = arrays.group_sums(cell, rows.residual, rows.classes * bins).reshape(rows.classes, bins)
    mass = arrays.group_sums(k, rows.weights, rows.classes)
    return sums, mass


def cw_ece(
    probabilities: ArrayLike,
    labels: ArrayLike,
    bins: int = 15,
    *,
    by: By = "true",
    weights: ArrayLike | None = None,
) -> Floats:
    """(C,) top-1 ECE of the rows whose true class is k (by="predicted": whose top class is k).

    NaN for a class without rows.
    """
    sums, mass = _by_class(probabilities, labels, bins, by, weights)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(sums).sum(axis=1) / np.where(mass > 0, mass, NAN))


def cw_mcs(
    probabilities: ArrayLike,
    labels: ArrayLike,
    bins: int = 15,
    *,
    by: By = "true",
    weights: ArrayLike | None = None,
) -> Floats:
    """(C,) signed MCS of the rows whose true class is k, in [−1, 1]: mean confidence − recall. cwMCS eq. 6.

    NaN for a class without rows. A calibrated model is *not* at 0 by true class; by="predicted" it is.
    """
    sums, mass = _by_class(probabilities, labels, bins, by, weights)
    with np.errstate(invalid="ignore"):
        return np.asarray(sums.sum(axis=1) / np.where(mass > 0, mass, NAN))


def ws_ece(
    probabilities: ArrayLike,
    labels: ArrayLike,
    bins: int = 15,
    *,
    by: By = "true",
    weights: ArrayLike | None = None,
) -> float:
    """Weighted subset ECE Σ_k n_k/N·ECE_k, in [0, 1]. Obadinma et al. 2021."""
    sums, mass = _by_class(probabilities, labels, bins, by, weights)
    return float(np.abs(sums).sum() / mass.sum()) if mass.sum() else NAN


@dataclass(frozen=True)
class Miscalibration:
    """Over- and under-confidence by class. cwMCS eq. 7.

    ws_mcs = k⁺/K·positive + k⁻/K·negative over the K classes that occur; positive = Σ_{MCS_k>0} n_k/N·MCS_k,
    negative likewise (0 when there is no such class). over_confidence, under_confidence: the plain means of
    those MCS_k (NaN when there is none); over_share, under_share: k⁺/K and k⁻/K.
    """

    ws_mcs: float
    positive: float
    negative: float
    over_confidence: float
    under_confidence: float
    over_share: float
    under_share: float


def miscalibration(
    probabilities: ArrayLike,
    labels: ArrayLike,
    bins: int = 15,
    *,
    by: By = "true",
    weights: ArrayLike | None = None,
) -> Miscalibration:
    """All of `Miscalibration` in one pass; NaN throughout without rows."""
    sums, mass = _by_class(probabilities, labels, bins, by, weights)
    present = mass > 0
    if not present.any():
        return Miscalibration(*(NAN,) * 7)
    share, score = mass[present] / mass.sum(), sums.sum(axis=1)[present] / mass[present]
    over, under = score > 0, score < 0
    positive, negative = float((share * score)[over].sum()), float((share * score)[under].sum())
    return Miscalibration(
        ws_mcs=float(over.mean() * positive + under.mean() * negative),
        positive=positive,
        negative=negative,
        over_confidence=float(score[over].mean()) if over.any() else NAN,
        under_confidence=float(score[under].mean()) if under.any() else NAN,
        over_share=float(over.mean()),
        under_share=float(under.mean()),
    )


def ws_mcs(
    probabilities: ArrayLike,
    labels: ArrayLike,
    bins: int = 15,
    *,
    by: By = "true",
    weights: ArrayLike | None = None,
) -> float:
    """Weighted subset miscalibration score, in [−1, 1]; see `Miscalibration`. cwMCS eq. 7."""
    return miscalibration(probabilities, labels, bins, by=by, weights=weights).ws_mcs


def ws_mcs_pos(probabilities: ArrayLike, labels: ArrayLike, bins: int = 15, *, by: By = "true") -> float:
    """wsMCS⁺, in [0, 1]; see `Miscalibration`."""
    return miscalibration(probabilities, labels, bins, by=by).positive


def ws_mcs_neg(probabilities: ArrayLike, labels: ArrayLike, bins: int = 15, *, by: By = "true") -> float:
    """wsMCS⁻, in [−1, 0]; see `Miscalibration`."""
    return miscalibration(probabilities, labels, bins, by=by).negative


def oc_mcs(probabilities: ArrayLike, labels: ArrayLike, bins: int = 15, *, by: By = "true") -> float:
    """Mean MCS of the over-confident classes; NaN when there is none."""
    return miscalibration(probabilities, labels, bins, by=by).over_confidence


def uc_mcs(probabilities: ArrayLike, labels: ArrayLike, bins: int = 15, *, by: By = "true") -> float:
    """Mean MCS of the under-confident classes; NaN when there is none."""
    return miscalibration(probabilities, labels, bins, by=by).under_confidence


def classwise_ece(
    probabilities: ArrayLike, labels: ArrayLike, bins: int = 15, *, weights: ArrayLike | None = None
) -> float:
    """Mean over k of the ECE of p_k against 1[y = k], in [0, 1]. Kull et al. 2019.

    One pass over the probabilities: a row has fewer than M entries above 1/M, so only those are binned one by
    one; the first bin of each class is what is left of its column sum.
    """
    bins = check_bins(bins)
    p, truth, w, kept = labelled(probabilities, labels, weights)
    mass = float(len(p) if w is None else w.sum()) if kept is None else 0.0
    if kept is not None:
        w = np.where(truth >= 0, 1.0 if w is None else w, 0.0)
        mass = float(w.sum())
    if not mass:
        return NAN
    classes = p.shape[1]
    first_edge = np.nextafter(p.dtype.type(1.0 / bins), p.dtype.type(0))

    def work(rows: slice) -> tuple[Floats, Ints, Floats]:
        block = p[rows]
        weight = np.ones(len(block)) if w is None else w[rows]
        total = weight @ block.astype(np.float64)
        high = np.flatnonzero(block > first_edge)
        values = block.reshape(-1)[high].astype(np.float64)
        refuse_outside(p, block.min(), values.max(initial=0.0))
        number = equal_width(values, bins)
        cells = (high % classes) * bins + number
        if w is not None:
            values = values * w[rows.start + high // classes]
        above = number > 0
        return total, cells[above], values[above]

    parts = arrays.for_each_block(work, *p.shape)
    total = np.sum([part[0] for part in parts], axis=0)
    if np.isnan(total).any():
        classified(p, truth)  # names the rows
    cells = np.concatenate([part[1] for part in parts])
    values = np.concatenate([part[2] for part in parts])
    sums = arrays.group_sums(cells, values, classes * bins).reshape(classes, bins)
    sums[:, 0] = total - sums.sum(axis=1)
    rows = np.arange(len(p)) if kept is None else kept
    own = p[rows, truth[rows]].astype(np.float64)
    cells = truth[rows] * bins + equal_width(own, bins)
    sums -= np.bincount(cells, None if w is None else w[rows], minlength=classes * bins).reshape(sums.shape)
    return float(np.abs(sums).sum() / (mass * classes))


# ---------------------------------------------------------------- proper losses


def _losses(
    probabilities: ArrayLike,
    labels: ArrayLike,
    formula: Callable[[Array, Ints], Floats],
    *,
    bounded: bool = False,
) -> tuple[Floats, Ints | None]:
    """(n,) loss of each labelled row, block by block; bounded: refuse what isn't in [0, 1]."""
    p, truth, _, kept = labelled(probabilities, labels, None)
    out = np.empty(len(p))

    def work(rows: slice) -> None:
        if bounded:
            refuse_outside(p, p[rows].min(), p[rows].max())
        out[rows] = formula(p[rows], np.maximum(truth[rows], 0))

    arrays.for_each_block(work, *p.shape)
    arrays.refuse_nan(np.isnan(out), "probabilities")
    return (out if kept is None else out[kept]), kept


def _mean(loss: Floats, kept: Ints | None, weights: ArrayLike | None, rows: int) -> float:
    w = arrays.weights(weights, rows)
    if w is not None:
        w = w if kept is None else w[kept]
        # A row that counts nothing mustn't count 0·∞.
        loss, w = loss[w > 0], w[w > 0]
    return float(np.average(loss, weights=w)) if len(loss) else NAN


def _resampled_mean(losses: Callable[..., tuple[Floats, Ints | None]]) -> Callable[..., Resampled]:
    def prepare(probabilities: ArrayLike, labels: ArrayLike, **options: bool) -> Resampled:
        loss, _ = losses(probabilities, labels, **options)
        return Resampled(len(loss), lambda counts: np.asarray(counts @ loss) / len(loss))

    return prepare


def _nll_losses(probabilities: ArrayLike, labels: ArrayLike, from_logits: bool = False) -> tuple[Floats, Ints | None]:
    def of_logits(block: Array, truth: Ints) -> Floats:
        return -scores.log_softmax(block.astype(np.float64))[np.arange(len(block)), truth]

    def of_probabilities(block: Array, truth: Ints) -> Floats:
        own = block[np.arange(len(block)), truth].astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            return -np.log(np.where(np.isnan(block.max(axis=1)), NAN, np.clip(own, 0.0, 1.0)))

    return _losses(probabilities, labels, of_logits if from_logits else of_probabilities, bounded=not from_logits)


@resampled(_resampled_mean(_nll_losses))
def nll(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    from_logits: bool = False,
    weights: ArrayLike | None = None,
) -> float:
    """Mean −ln p_y in [0, ∞], never clipped: +inf when a true class was given probability 0.

    from_logits=True reads logits and goes through log-softmax, which keeps what a rounded softmax loses.
    """
    loss, kept = _nll_losses(probabilities, labels, from_logits)
    return _mean(loss, kept, weights, len(np.asarray(labels)))


def _brier_losses(probabilities: ArrayLike, labels: ArrayLike) -> tuple[Floats, Ints | None]:
    def formula(block: Array, truth: Ints) -> Floats:
        wide = block.astype(np.float64)
        own = wide[np.arange(len(wide)), truth]
        # The true class on its own, so that a nearly perfect row doesn't end as 1 − 2 + 1.
        wide[np.arange(len(wide)), truth] = 0.0
        loss: Floats = np.einsum("ij,ij->i", wide, wide) + (1.0 - own) ** 2
        return loss

    return _losses(probabilities, labels, formula, bounded=True)


@resampled(_resampled_mean(_brier_losses))
def brier(probabilities: ArrayLike, labels: ArrayLike, *, weights: ArrayLike | None = None) -> float:
    """Mean over rows of Σ_k (p_k − 1[y = k])², in [0, 2]."""
    loss, kept = _brier_losses(probabilities, labels)
    return _mean(loss, kept, weights, len(np.asarray(labels)))
