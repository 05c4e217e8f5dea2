"""Truthful calibration errors: nobody lowers their expected value by reporting other than what they believe.

Bins depend on the reports only. Values are O(1/n): compare them at equal n and equal bins, publish n·value.
Quantile bins follow the stable order, so where reports tie, the order of the rows decides who shares a bin:
rows must not come sorted by outcome, or pass `seed` to break ties at random.
Source: Lu, Wu, Hartline, Hu, "Truthful Calibration Errors for Multi-Class Prediction", sections 2–3.
"""

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Floats, Ints
from offramp.runtime.errors import InputError
from offramp.runtime.metrics.bins import (
    Binning,
    assign,
    check_bins,
    default_bins,
    equal_width,
    quantile_sizes,
    stable_order,
)
from offramp.runtime.metrics.pairs import Pairs, labelled, pairs, refuse_outside

NAN = float("nan")

# Columns turned at once: 16 of 50,000 rows are 6.4 MiB of float64.
COLUMN_VALUES = 1 << 19


def lince(
    reports: ArrayLike,
    outcomes: ArrayLike,
    bins: int | None = None,
    binning: Binning = "quantile",
    *,
    groups: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    seed: int | None = None,
) -> float:
    """LinCE = (1/n²) Σ_B ‖Σ_{i∈B}(u_i − φ(y_i))‖², ≥ 0. Definition 2.1.

    reports u and outcomes φ(y): (N,), or (N, d) with `groups` (N,), any partition that doesn't depend on the
    outcomes. Fixed bins are for reports in [0, 1]. Weighted: Σ_B ‖Σ w(u − φ)‖² / (Σw)². NaN without rows.
    """
    u = arrays.numbers(reports, "reports")
    phi = arrays.numbers(outcomes, "outcomes")
    if u.shape != phi.shape or u.ndim not in (1, 2):
        raise InputError(f"outcomes: expected the shape of reports, {u.shape}, got {phi.shape}.")
    if groups is None and u.ndim == 2:
        raise InputError("groups: needed for reports of several dimensions.")
    columns = u.reshape(len(u), -1)
    gap = columns - phi.reshape(columns.shape)
    arrays.refuse_nan(np.isnan(gap).any(axis=1), "reports")
    w = arrays.weights(weights, len(u))
    if not len(u):
        return NAN
    if w is not None:
        gap = gap * w[:, None]
    if groups is None:
        order = _shuffled(len(u), seed)
        number, m = assign(u[order], bins, binning)
        gap = gap[order]
    else:
        _, number = np.unique(np.asarray(groups), return_inverse=True)
        if number.shape != (len(u),):
            raise InputError(f"groups: expected {len(u)} values, one a row.")
        m = int(number.max()) + 1
    sums = np.stack([np.bincount(number, column, minlength=m) for column in gap.T])
    return float((sums**2).sum()) / _square_mass(len(u), w)


def _shuffled(rows: int, seed: int | None) -> Ints:
    return np.arange(rows) if seed is None else np.random.default_rng(seed).permutation(rows)


def _square_mass(rows: int, w: Floats | None) -> float:
    return float(rows) ** 2 if w is None else float(w.sum()) ** 2


def lince_classwise(
    probabilities: ArrayLike,
    labels: ArrayLike,
    bins: int | None = None,
    binning: Binning = "quantile",
    *,
    weights: ArrayLike | None = None,
    seed: int | None = None,
) -> float:
    """LinCE^cw = (1/C) Σ_k LinCE of p_k against 1[y = k], ≥ 0. Truthful for classwise calibration.

    probabilities (N, C), logits are refused; labels (N,), −1 left out. For calibrated reports its expectation is
    E[Brier]/(C·n), whatever the bins. Section 3.1.
    """
    p, truth, w, kept = labelled(probabilities, labels, weights)
    if kept is not None:
        p, truth, w = p[kept], truth[kept], None if w is None else w[kept]
    rows, classes = p.shape
    if not rows:
        return NAN
    if seed is not None:
        order = _shuffled(rows, seed)
        p, truth, w = p[order], truth[order], None if w is None else w[order]
    m = default_bins(rows) if bins is None else check_bins(bins)
    if binning not in ("quantile", "fixed"):
        raise InputError(f'binning: expected "quantile" or "fixed", got {binning!r}.')
    ends = np.cumsum(quantile_sizes(rows, m))

    def work(columns: slice) -> float:
        total = 0.0
        reports = np.ascontiguousarray(p[:, columns].T)
        refuse_outside(p, reports.min(), reports.max())
        for k, report in enumerate(reports, columns.start):
            gap = report.astype(np.float64)
            gap[truth == k] -= 1.0
            if w is not None:
                gap *= w
            if binning == "fixed":
                sums = np.bincount(equal_width(report.astype(np.float64), m), gap, minlength=m)
            else:
                running = np.append(0.0, np.cumsum(gap[stable_order(report)]))
                sums = np.diff(running[np.append(0, ends)])
            total += float((sums**2).sum())
        return total

    value = sum(arrays.for_each_block(work, classes, rows, COLUMN_VALUES)) / (classes * _square_mass(rows, w))
    if np.isnan(value):
        arrays.refuse_nan(np.isnan(p).any(axis=1), "probabilities")
    return float(value)


def _binned_sums(rows: Pairs, bins: int | None, binning: Binning, seed: int | None) -> Floats:
    order = _shuffled(len(rows), seed)
    number, m = assign(rows.confidence[order], bins, binning)
    return arrays.group_sums(number, rows.residual[order], m)


def confce(
    probabilities: ArrayLike,
    labels: ArrayLike,
    bins: int | None = None,
    binning: Binning = "quantile",
    *,
    weights: ArrayLike | None = None,
    seed: int | None = None,
) -> float:
    """ConfCE = (1/n²) Σ_B (Σ_{i∈B}(c_i − t_i))², in [0, 1]. Not truthful; see `confce_corr`.

    bins None: ⌈n^(1/3)⌉. binning: "quantile", or "fixed" equal-width. NaN without rows.
    """
    rows = pairs(probabilities, labels, weights)
    if not len(rows):
        return NAN
    return float((_binned_sums(rows, bins, binning, seed) ** 2).sum()) / rows.mass**2


def confce_corr(
    probabilities: ArrayLike,
    labels: ArrayLike,
    bins: int | None = None,
    binning: Binning = "quantile",
    *,
    weights: ArrayLike | None = None,
    seed: int | None = None,
) -> float:
    """Corrected confidence error ConfCE + (1/n)(1 − mean t), ≥ 0: truthful. Definition 3.2.

    Rank models, and accept or refuse a recalibration, by this one.
    Weighted: [Σ_B(Σ w(c − t))² + Σ w²(1 − t)] / (Σw)². NaN without rows.
    """
    rows = pairs(probabilities, labels, weights)
    if not len(rows):
        return NAN
    squares = float((_binned_sums(rows, bins, binning, seed) ** 2).sum())
    wrong = ~rows.correct
    correction = float(wrong.sum()) if rows.weights is None else float((rows.weights[wrong] ** 2).sum())
    return (squares + correction) / rows.mass**2


def confce_corr_resampled(
    probabilities: ArrayLike,
    labels: ArrayLike,
    counts: ArrayLike,
    bins: int | None = None,
    *,
    seed: int | None = None,
) -> Floats:
    """(R,) n·ConfCE^corr on R resamples of n rows, in the quantile bins of all n; ≥ 0, NaN without rows.

    counts: (R, n) ≥ 0, how often a resample has each row. labels: as in `confce_corr`, none of them −1.
    [Σ_B(Σ k(c − t))² + Σ k(1 − t)] / n: a row that was drawn k times is k rows that happen to be equal, and with all
    counts 1 the value is n·confce_corr at the same bins and seed. Bins that moved with the resample would make two
    calibrators' values on it incomparable.
    """
    rows = pairs(probabilities, labels)
    k = np.asarray(counts)
    if k.ndim != 2 or k.shape[1] != len(rows):
        raise InputError(f"counts: expected shape (resamples, {len(rows)}), one a row, got {k.shape}.")
    if not len(rows):
        return np.full(len(k), NAN)
    shuffled = _shuffled(len(rows), seed)
    number, m = assign(rows.confidence[shuffled], bins, "quantile")
    order = shuffled[np.argsort(number, kind="stable")]
    sizes = np.bincount(number, minlength=m)
    # reduceat would give an empty bin its neighbour's first row.
    starts = (np.cumsum(sizes) - sizes)[sizes > 0]
    gap, wrong = rows.residual[order], (~rows.correct)[order].astype(np.float64)

    def work(block: slice) -> Floats:
        drawn = k[block][:, order].astype(np.float64)
        sums = np.add.reduceat(drawn * gap, starts, axis=1)
        return np.asarray((sums**2).sum(axis=1) + drawn @ wrong)

    blocks = arrays.for_each_block(work, len(k), len(rows), COLUMN_VALUES)
    return np.concatenate([np.zeros(0), *blocks]) / len(rows)


def confece(
    probabilities: ArrayLike,
    labels: ArrayLike,
    bins: int | None = None,
    binning: Binning = "quantile",
    *,
    weights: ArrayLike | None = None,
    seed: int | None = None,
) -> float:
    """ConfECE = (1/n) Σ_B |Σ_{i∈B}(c_i − t_i)|, in [0, 1]: the ℓ1 form. Not truthful."""
    rows = pairs(probabilities, labels, weights)
    if not len(rows):
        return NAN
    return float(np.abs(_binned_sums(rows, bins, binning, seed)).sum()) / rows.mass
