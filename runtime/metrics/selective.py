"""Failure detection and selective prediction: does a low score mean a wrong answer?

score: (N,), higher = more confident, ±inf allowed. error: (N,) 0/1, 1 = wrong. Tied scores enter together,
and the order of rows inside a tie changes nothing, in any of these. Rank by log-odds, never by rounded
confidence. `weights` (N,) ≥ 0 optional. What is undefined (no rows; all right or all wrong, for AUROC and
AP) is NaN.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Bools, Floats, Ints
from offramp.runtime.errors import InputError
from offramp.runtime.metrics.resampling import Resampled, resampled

NAN = float("nan")


@dataclass(frozen=True)
class _Ties:
    """Rows sorted by falling score, in groups of equal score, a (G,) entry each."""

    score: Floats
    ends: Ints  # rows up to and with this group
    mass: Floats  # Σ weights, likewise cumulative
    errors: Floats  # Σ weights of wrong rows, likewise

    @classmethod
    def of(cls, score: ArrayLike, error: ArrayLike, weights: ArrayLike | None) -> "_Ties":
        s, e, w = _inputs(score, error, weights)
        order = np.argsort(s)[::-1]
        s, e = s[order], e[order]
        last = _last_of_ties(s)
        if w is None:
            return cls(s[last], last + 1, (last + 1).astype(np.float64), np.cumsum(e)[last].astype(np.float64))
        w = w[order]
        return cls(s[last], last + 1, np.cumsum(w)[last], np.cumsum(w * e)[last])


def _inputs(score: ArrayLike, error: ArrayLike, weights: ArrayLike | None) -> tuple[Floats, Bools, Floats | None]:
    s = arrays.vector(score, "score")
    e = arrays.flags(error, "error", len(s))
    w = arrays.weights(weights, len(s))
    if w is not None and not w.all():
        s, e, w = s[w > 0], e[w > 0], w[w > 0]
    return s, e, w


def _last_of_ties(ordered: Floats) -> Ints:
    """Positions where a run of equal values ends."""
    return np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)) if len(ordered) else np.zeros(0, np.int64)


@dataclass(frozen=True)
class RiskCoverage:
    """One point for each distinct score, most confident first; each array is (G,).

    Keeping score ≥ threshold answers `coverage` of the rows (up to 1) with selective risk `risk`.
    """

    threshold: Floats
    coverage: Floats
    risk: Floats


def risk_coverage(score: ArrayLike, error: ArrayLike, *, weights: ArrayLike | None = None) -> RiskCoverage:
    """The risk–coverage curve; empty without rows."""
    ties = _Ties.of(score, error, weights)
    total = ties.mass[-1] if len(ties.mass) else 1.0
    return RiskCoverage(ties.score, ties.mass / total, ties.errors / ties.mass)


def risk_at_coverage(score: ArrayLike, error: ArrayLike, coverage: float, *, weights: ArrayLike | None = None) -> float:
    """Selective risk of the smallest whole set that covers at least `coverage` of the rows, in [0, 1]."""
    coverage = arrays.fraction(coverage, "coverage", high_open=False)
    curve = risk_coverage(score, error, weights=weights)
    if not len(curve.risk):
        return NAN
    reached = int(np.searchsorted(curve.coverage, coverage - 1e-12))
    return float(curve.risk[min(reached, len(curve.risk) - 1)])


Convention = Literal["ranks", "fd-shifts"]


def _many_aurc(
    score: ArrayLike, error: ArrayLike, convention: Convention = "ranks", *, weights: ArrayLike | None = None
) -> Resampled:
    s, e, w = _inputs(score, error, weights)
    rows = len(np.asarray(score))
    if w is not None or convention != "ranks":
        return Resampled(-1, lambda counts: counts[:, 0])
    order = np.argsort(-s, kind="stable")
    s, e = s[order], e[order]
    last = _last_of_ties(s)
    first = np.append(0, last[:-1] + 1)

    def many(counts: Floats) -> Floats:
        drawn = counts[:, order]
        size = np.add.reduceat(drawn, first, axis=1)
        wrong = np.add.reduceat(drawn * e, first, axis=1)
        # Σ over i = 1…g of (E + e·i/g)/(a + i), by harmonic numbers: no loop over ranks.
        before, errors = np.cumsum(size, axis=1) - size, np.cumsum(wrong, axis=1) - wrong
        harmonic = np.append(0.0, np.cumsum(1.0 / np.arange(1, rows + 1)))
        steps = harmonic[(before + size).astype(np.int64)] - harmonic[before.astype(np.int64)]
        slope = np.divide(wrong, size, out=np.zeros_like(wrong), where=size > 0)
        return np.asarray((slope * size + (errors - slope * before) * steps).sum(axis=1) / rows)

    return Resampled(rows, many)


@resampled(_many_aurc)
def aurc(
    score: ArrayLike,
    error: ArrayLike,
    convention: Convention = "ranks",
    *,
    weights: ArrayLike | None = None,
) -> float:
    """Area under the risk–coverage curve, in [0, 1], lower is better.

    "ranks": the mean over the N ranks of the selective risk; inside a tie of g rows with e errors, after a
    rows with E errors, rank a + i has risk (E + e·i/g)/(a + i). "fd-shifts": the trapezoid on distinct
    scores with a last point at zero coverage, for comparison with published numbers.
    A row of weight w counts as w equal rows: whole weights give the value of the repeated rows, to rounding. With
    "ranks" the scale of the weights matters for that reason, as the number of rows does.
    """
    ties = _Ties.of(score, error, weights)
    if not len(ties.ends):
        return NAN
    total = ties.mass[-1]
    if convention == "fd-shifts":
        risk = ties.errors / ties.mass
        return float(np.trapezoid(np.append(risk[0], risk), np.append(0.0, ties.mass / total)))
    if convention != "ranks":
        raise InputError(f'convention: expected "ranks" or "fd-shifts", got {convention!r}.')
    if weights is None:
        ranks = np.arange(1, ties.ends[-1] + 1)
        kept_errors = np.interp(ranks, np.append(0, ties.ends), np.append(0.0, ties.errors))
        return float((kept_errors / ranks).mean())
    before, errors = np.append(0.0, ties.mass[:-1]), np.append(0.0, ties.errors[:-1])
    size, wrong = ties.mass - before, ties.errors - errors
    slope = wrong / size
    steps = _harmonic(ties.mass) - _harmonic(before)
    return float((slope * size + (errors - slope * before) * steps).sum() / total)


def _harmonic(x: Floats) -> Floats:
    """1 + 1/2 + … + 1/x for x ≥ 0, between whole numbers as the digamma function has it, to 1e-14."""
    up = np.asarray(x, np.float64)
    below = np.zeros_like(up)
    for k in range(1, 13):
        below += 1.0 / (up + k)
    y = up + 12.5
    inverse = 1.0 / y**2
    # ψ(y + ½) = ln y + 1/(24 y²) − 7/(960 y⁴) + 31/(8064 y⁶) − …
    tail = np.log(y) + inverse * (1 / 24 - inverse * (7 / 960 - inverse * (31 / 8064 - inverse * 127 / 30720)))
    return np.asarray(tail + np.euler_gamma - below)


def augrc(score: ArrayLike, error: ArrayLike, *, weights: ArrayLike | None = None) -> float:
    """Area under the generalised risk (errors kept / N) over coverage, in [0, ½]; trapezoid from (0, 0).

    Equals (1 − AUROC_f)·acc·(1 − acc) + ½(1 − acc)². Traub et al. 2024.
    """
    ties = _Ties.of(score, error, weights)
    if not len(ties.ends):
        return NAN
    total = ties.mass[-1]
    return float(np.trapezoid(np.append(0.0, ties.errors) / total, np.append(0.0, ties.mass) / total))


def e_aurc(score: ArrayLike, error: ArrayLike, *, weights: ArrayLike | None = None) -> float:
    """AURC above that of a perfect ranking: aurc − [r + (1 − r)·ln(1 − r)], r the risk at full coverage.

    Geifman et al. 2019 (FD-Shifts eq. 32 as printed is inconsistent). Slightly below 0 at small N is
    possible: the perfect ranking is the limit for many rows.
    """
    ties = _Ties.of(score, error, weights)
    if not len(ties.ends):
        return NAN
    risk = float(ties.errors[-1] / ties.mass[-1])
    perfect = risk + (1 - risk) * float(np.log1p(-risk)) if risk < 1 else 1.0
    return aurc(score, error, weights=weights) - perfect


def auroc(score: ArrayLike, positive: ArrayLike, *, weights: ArrayLike | None = None) -> float:
    """P(score of a positive > score of a negative) + ½P(equal), in [0, 1]; NaN when either kind is missing."""
    ties = _Ties.of(score, arrays.flags(positive, "positive"), weights)
    if not len(ties.ends):
        return NAN
    up = np.append(0.0, ties.errors)
    down = np.append(0.0, ties.mass - ties.errors)
    if up[-1] <= 0 or down[-1] <= 0:
        return NAN
    return float(np.trapezoid(up / up[-1], down / down[-1]))


def _many_auroc_f(score: ArrayLike, error: ArrayLike, *, weights: ArrayLike | None = None) -> Resampled:
    s, e, w = _inputs(score, error, weights)
    rows = len(np.asarray(score))
    if w is not None:
        return Resampled(-1, lambda counts: counts[:, 0])
    order = np.argsort(-s, kind="stable")
    s, e = s[order], e[order]
    first = np.append(0, _last_of_ties(s)[:-1] + 1)

    def many(counts: Floats) -> Floats:
        drawn = counts[:, order]
        wrong = np.add.reduceat(drawn * e, first, axis=1)
        right = np.add.reduceat(drawn, first, axis=1) - wrong
        # A wrong row is beaten by the right rows before it, and by half of those it ties with.
        beaten = (wrong * (np.cumsum(right, axis=1) - right / 2)).sum(axis=1)
        with np.errstate(invalid="ignore"):
            return np.asarray(beaten / (wrong.sum(axis=1) * right.sum(axis=1)))

    return Resampled(rows, many)


@resampled(_many_auroc_f)
def auroc_f(score: ArrayLike, error: ArrayLike, *, weights: ArrayLike | None = None) -> float:
    """Failure AUROC, in [0, 1]: P(a right row scores above a wrong one). NaN when all are right or all wrong."""
    return auroc(score, ~arrays.flags(error, "error"), weights=weights)


def _average_precision(score: Floats, positive: Bools, weights: ArrayLike | None) -> float:
    ties = _Ties.of(score, positive, weights)
    if not len(ties.ends) or ties.errors[-1] <= 0 or ties.errors[-1] >= ties.mass[-1]:
        return NAN
    recall_steps = np.diff(ties.errors, prepend=0.0) / ties.errors[-1]
    return float((recall_steps * ties.errors / ties.mass).sum())


def ap_f(score: ArrayLike, error: ArrayLike, *, weights: ArrayLike | None = None) -> float:
    """Average precision with success as the positive class, in [0, 1]; NaN when all are right or all wrong."""
    s = arrays.vector(score, "score")
    return _average_precision(s, ~arrays.flags(error, "error", len(s)), weights)


def ap_f_err(score: ArrayLike, error: ArrayLike, *, weights: ArrayLike | None = None) -> float:
    """Average precision with failure as the positive class, ranked by −score; NaN as in `ap_f`."""
    s = arrays.vector(score, "score")
    return _average_precision(-s, arrays.flags(error, "error", len(s)), weights)


Protocol = Literal["fd-shifts", "original"]


@dataclass(frozen=True)
class Failures:
    """Which rows count, and which of those are failures: error is (kept.sum(),)."""

    kept: Bools
    error: Bools


def failures(predicted: ArrayLike, labels: ArrayLike, protocol: Protocol = "fd-shifts") -> Failures:
    """Failures under a shift to new classes: rows labelled −1 are out of scope and always wrong.

    predicted, labels: (N,) classes. "fd-shifts": misclassified in-scope rows are left out, so that a score
    isn't punished for spotting them; "original": they stay, as failures. Without any −1 both keep every row.
    """
    truth = arrays.labels(labels)
    answer = arrays.labels(predicted, len(truth), name="predicted")
    out_of_scope = truth < 0
    error = (answer != truth) | out_of_scope
    if protocol not in ("fd-shifts", "original"):
        raise InputError(f'protocol: expected "fd-shifts" or "original", got {protocol!r}.')
    kept = np.ones(len(truth), bool)
    if protocol == "fd-shifts" and out_of_scope.any():
        kept = ~error | out_of_scope
    return Failures(kept, error[kept])
