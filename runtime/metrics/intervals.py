"""Confidence intervals of shares, of bounded means and of ECE that cover where little is seen.

Normal and bootstrap intervals shrink to a point where every row is alike, and leave out what is rare: of a drop that
no row of 300 shows they say [0, 0]. These don't. All are two-sided; (NaN, NaN) where nothing is known.
"""

from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Floats
from offramp.runtime.errors import InputError
from offramp.runtime.metrics.bins import check_bins, equal_width
from offramp.runtime.metrics.pairs import pairs

Ends = tuple[float, float]
NAN = float("nan")

# Distinct values of a mean that are told apart, at most.
CELLS = 256
# A bin this many standard errors from 0 is taken to be on that side for sure: it isn't in 6 of 100,000.
SURE = 4.0


def share_interval(hits: int, total: int, confidence: float = 0.95) -> Ends:
    """Clopper and Pearson's interval of a proportion, in [0, 1]: covers in at least `confidence` of all samples.

    Wilson's covers 84% where 0.18 rows are expected to be hit (n = 50, a share of 0.35%). NaN without rows.
    Source: Clopper & Pearson 1934.
    """
    from scipy.special import betaincinv

    tail = (1 - arrays.fraction(confidence, "confidence")) / 2
    if not 0 <= hits <= total:
        raise InputError(f"hits: expected 0 to {total}, got {hits!r}.")
    if not total:
        return NAN, NAN
    low = float(betaincinv(hits, total - hits + 1, tail)) if hits else 0.0
    high = float(betaincinv(hits + 1, total - hits, 1 - tail)) if hits < total else 1.0
    return low, high


def paired_difference_interval(lost: ArrayLike, won: ArrayLike, total: ArrayLike, confidence: float = 0.95) -> Any:
    """Tango's score interval of p_lost − p_won, from the same rows judged twice; ends in [−1, 1].

    lost, won: how many of the `total` rows only the first, or only the second, had right. Numbers give (low, high);
    arrays of one shape give (2, …). NaN without rows. Without a difference it is ±z²/(n + z²).
    Source: Tango 1998, "Equivalence test and confidence interval for the difference in proportions for the
    paired-sample design".
    """
    z = NormalDist().inv_cdf((1 + arrays.fraction(confidence, "confidence")) / 2)
    b, c, n = np.broadcast_arrays(
        *(arrays.numbers(x, name) for x, name in ((lost, "lost"), (won, "won"), (total, "total")))
    )
    if (b < 0).any() or (c < 0).any() or (b + c > n).any():
        raise InputError("lost, won: expected counts of at least 0 that together are at most total.")
    n = np.where(n > 0, n, np.nan)
    upper = _tango_upper(b, c, n, z)
    lower = -_tango_upper(c, b, n, z)
    return (float(lower), float(upper)) if not lower.ndim else np.stack([lower, upper])


def _tango_upper(b: Floats, c: Floats, n: Floats, z: float) -> Floats:
    """The largest difference that the score test doesn't reject; the score falls with it, so halving finds it."""
    low, high = (b - c) / n, np.ones(np.shape(n))
    for _ in range(50):
        at = (low + high) / 2
        linear = -b - c + (2 * n - b + c) * at
        # The rarer discordant share, where the difference is `at`: its constrained maximum-likelihood estimate.
        won = (np.sqrt(linear**2 + 8 * n * c * at * (1 - at)) - linear) / (4 * n)
        spread = np.sqrt(np.maximum(n * (2 * won + at * (1 - at)), 0.0))
        inside = n * at - (b - c) <= z * spread
        low, high = np.where(inside, at, low), np.where(inside, high, at)
    return np.asarray(np.where(np.isnan(n), NAN, high))


def bounded_mean_interval(
    values: ArrayLike, low: float, high: float, confidence: float = 0.95, *, draws: int = 10_000, seed: int = 0
) -> Ends:
    """Gaffke's interval of the mean of values in [low, high]; never a point unless low = high.

    The rows get random weights (a Dirichlet draw) together with one row more, at the high end for the upper limit and
    at the low end for the lower one: for values that are 0 or 1 that is Clopper and Pearson's interval, for many
    values the Bayesian bootstrap's. No distribution is known at which it covers less than `confidence`; that it
    can't is a conjecture. Beyond 256 distinct values neighbours are averaged in cells, each a 256th of their range
    wide. The same call gives the same interval. NaN without values.
    Source: Gaffke 2005, "Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative
    variable"; Learned-Miller & Thomas 2020.
    """
    tail = (1 - arrays.fraction(confidence, "confidence")) / 2
    x = arrays.vector(values, "values")
    if len(x) and not low - 1e-9 <= x.min() <= x.max() <= high + 1e-9:
        raise InputError(f"values: expected numbers in [{low}, {high}], got {x.min()} to {x.max()}.")
    if not len(x):
        return NAN, NAN
    if high <= low:
        return float(x.mean()), float(x.mean())
    known, counts = np.unique(x, return_counts=True)
    if len(known) > CELLS:
        cell = ((known - known[0]) / (known[-1] - known[0]) * (CELLS - 1)).astype(np.int64)
        first = np.flatnonzero(np.diff(cell, prepend=-1))
        total, counts = np.add.reduceat(known * counts, first), np.add.reduceat(counts, first)
        known = total / counts
    random = np.random.default_rng(seed)
    mass = random.standard_gamma(counts, size=(draws, len(counts)))
    one = random.standard_exponential(draws)
    whole = mass.sum(axis=1) + one
    lower = np.quantile((mass @ known + one * low) / whole, tail)
    upper = np.quantile((mass @ known + one * high) / whole, 1 - tail)
    return max(low, float(lower)), min(high, float(upper))


def ece_interval(
    probabilities: ArrayLike,
    labels: ArrayLike,
    bins: int = 15,
    confidence: float = 0.95,
    *,
    draws: int = 4000,
    seed: int = 0,
) -> Ends:
    """Interval of the ECE that infinitely many such rows would have in these bins, in [0, 1]; NaN without rows.

    probabilities, labels, bins: as for `ece`. The ECE of n rows lies above that of the population, most of all where
    the model is calibrated, so a bootstrap of it never reaches 0 there. With d the bins' mean residuals and d̂ those
    seen, ece = ‖d̂‖₁ exceeds ‖d‖₁ by at most ‖d̂ − d‖₁, whose quantile, with signs where a bin is more than 4 standard
    errors from 0, is subtracted for the lower end: 0 is inside for a calibrated model. ‖d̂‖₁ falls short of ‖d‖₁ by at
    most Σ sign(d)(d − d̂), a plain mean, whose score bound (rows that were never seen wrong may be) is added for the
    upper end. Conservative: it covers more than it says where few bins are far from 0, and is wide on few rows.
    """
    z = NormalDist().inv_cdf((1 + arrays.fraction(confidence, "confidence")) / 2)
    rows = pairs(probabilities, labels)
    n = len(rows)
    if not n:
        return NAN, NAN
    number = equal_width(rows.confidence, check_bins(bins))
    sums = np.abs(np.bincount(number, rows.residual, minlength=bins))
    squares = np.bincount(number, rows.residual**2, minlength=bins)
    # The spread of a bin's 1 or 2 rows is hardly known: it is taken to be no less than their confidence implies.
    implied = np.bincount(number, rows.confidence * (1 - rows.confidence), minlength=bins)
    spread = np.sqrt(np.maximum(squares, implied))
    sure = sums > SURE * spread
    # The signs of sure bins are known, so their sum is a mean of signed residuals, and its variance that of a mean.
    known = max(0.0, squares[sure].sum() - sums[sure].sum() ** 2 / n)
    random = np.random.default_rng(seed)
    excess = np.sqrt(known) * random.standard_normal(draws)
    excess += np.abs(random.standard_normal((draws, int((~sure).sum())))) @ spread[~sure]
    low = sums.sum() - float(np.quantile(excess, (1 + confidence) / 2))
    missing = z * z / 2 + z * np.sqrt(known + (spread[~sure] ** 2).sum() + z * z / 4)
    return max(0.0, float(low) / n), min(1.0, float(sums.sum() + missing) / n)
