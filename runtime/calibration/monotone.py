"""Monotone maps of the top-1 confidence: isotonic regression, beta and Platt calibration."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays, scores
from offramp.runtime.arrays import Array, Floats
from offramp.runtime.calibration.protocol import Given
from offramp.runtime.calibration.registry import register
from offramp.runtime.calibration.top_one import TopOne, finite_score, softplus
from offramp.runtime.errors import InputError

# Of beta's fit, per unit of NLL.
RIDGE = 1e-9


@dataclass(frozen=True)
class MonotoneLine:
    """A non-decreasing function: straight between its points, constant beyond them."""

    x: Floats
    y: Floats

    def __call__(self, at: ArrayLike) -> Floats:
        return np.interp(np.asarray(at, np.float64), self.x, self.y)

    def log_odds(self, at: ArrayLike) -> Floats:
        """Of levels in [0, 1]: both shares are interpolated, so that 1 − level isn't lost beside a level of 1."""
        s = np.clip(np.asarray(at, np.float64), self.x[0], self.x[-1])
        if len(self.x) == 1:
            return np.full(s.shape, scores.logit(self.y[0]))
        right = np.clip(np.searchsorted(self.x, s), 1, len(self.x) - 1)
        left = right - 1
        # Halves, so that the widest span stays finite.
        span = self.x[right] / 2 - self.x[left] / 2
        after, before = (s / 2 - self.x[left] / 2) / span, (self.x[right] / 2 - s / 2) / span
        level = before * self.y[left] + after * self.y[right]
        missing = before * (1 - self.y[left]) + after * (1 - self.y[right])
        with np.errstate(divide="ignore"):
            return np.asarray(np.clip(np.log(level) - np.log(missing), -scores.LARGEST, scores.LARGEST))


def isotonic_regression(x: ArrayLike, y: ArrayLike, weights: ArrayLike | None = None) -> MonotoneLine:
    """Least squares among non-decreasing functions of x; equal x are one point with their weighted mean.

    x, y: (N,), N ≥ 1. Only the ends of each level are kept.
    """
    at, outcome = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if at.shape != outcome.shape or at.ndim != 1 or not len(at):
        raise InputError(f"x, y: expected (N,) of the same length ≥ 1, got {at.shape} and {outcome.shape}.")
    w = np.ones(len(at)) if weights is None else np.asarray(weights, np.float64)
    points, group = np.unique(at, return_inverse=True)
    level = _levels(arrays.group_sums(group, w * outcome, len(points)), arrays.group_sums(group, w, len(points)))
    changes = level[1:] != level[:-1]
    kept = np.append(True, changes) | np.append(changes, True)
    return MonotoneLine(points[kept], level[kept])


def _levels(sums: Floats, mass: Floats) -> Floats:
    """As `pooled`, by scipy where it is installed."""
    try:
        from scipy.optimize import isotonic_regression as pool_adjacent_violators
    except ImportError:
        return pooled(sums, mass)
    return np.asarray(pool_adjacent_violators(sums / mass, weights=mass).x)


def pooled(sums: Floats, mass: Floats) -> Floats:
    """(K,) means sums/mass of neighbours pooled until none exceeds the next: isotonic regression.

    Neighbours in the wrong order share a level in the solution, whatever else happens, so that every run of them may be
    pooled at once: a few passes instead of one step a violator.
    """
    starts = np.arange(len(mass))
    while True:
        total, weight = np.add.reduceat(sums, starts), np.add.reduceat(mass, starts)
        mean = total / weight
        rises = np.append(True, mean[:-1] < mean[1:])
        if rises.all():
            return np.repeat(mean, np.diff(np.append(starts, len(mass))))
        starts = starts[rises]


@register
class Isotonic(TopOne):
    """P(right | score) by isotonic regression, non-decreasing in the score. Zadrozny & Elkan 2002.

    Merges scores (it has flat stretches), so the order is kept only weakly. points_, levels_: the line
    through (log-odds, probability).
    """

    name = "isotonic"
    points_: Floats
    levels_: Floats

    def _fit_pairs(self, given: Given, correct: Array, w: Floats) -> None:
        line = isotonic_regression(given.score, correct, w)
        self.points_, self.levels_ = line.x, line.y

    def _score(self, given: Given) -> Array:
        return MonotoneLine(self.points_, self.levels_).log_odds(given.score)


def fit_logistic(features: Floats, target: Floats, w: Floats, prior: Floats, ridge: float) -> Floats:
    """Logistic regression (N, K) -> (K,) by damped Newton; `ridge` pulls each coefficient towards `prior`.

    The ridge is per unit of mean weight; above 0 it makes the answer unique and finite.
    """
    share = w / w.sum()

    def loss(b: Floats) -> float:
        odds = features @ b
        return float(share @ (softplus(odds) - target * odds) + ridge / 2 * ((b - prior) ** 2).sum())

    b = prior.copy()
    value = loss(b)
    for _ in range(200):
        p = scores.sigmoid(features @ b)
        gradient = features.T @ (share * (p - target)) + ridge * (b - prior)
        curvature = (features * (share * p * (1 - p))[:, None]).T @ features + ridge * np.eye(len(b))
        step = np.linalg.lstsq(curvature, gradient, rcond=None)[0]
        size = 1.0
        while size > 1e-12 and not loss(b - size * step) <= value - 1e-4 * size * float(gradient @ step):
            size /= 2
        if size <= 1e-12:
            break
        b = b - size * step
        before, value = value, loss(b)
        if before - value <= 1e-15 * abs(before):
            break
    return b


@register
class Platt(TopOne):
    """sigmoid(a·s + b) on any score s. Platt 1999, with his targets (n₊ + 1)/(n₊ + 2) and 1/(n₋ + 2), which
    keep a and b finite also when all are right.

    The runtime's score is the log-odds; any other score may be given as "score", to fit by `fit_score`.
    """

    name = "platt"
    slope_: float
    intercept_: float

    def _fit_pairs(self, given: Given, correct: Array, w: Floats) -> None:
        s = finite_score(given)
        right, wrong = float(w[correct].sum()), float(w[~correct].sum())
        target = np.where(correct, (right + 1) / (right + 2), 1 / (wrong + 2))
        # Centred and scaled, so that a score of any size is as easy to solve.
        centre, spread = float(s.mean()), float(s.std()) or 1.0
        features = np.stack([(s - centre) / spread, np.ones(len(s))], axis=1)
        slope, intercept = fit_logistic(features, target, w, np.zeros(2), 1e-12)
        self.slope_ = float(slope / spread)
        self.intercept_ = float(intercept - slope * centre / spread)

    def fit_score(self, score: ArrayLike, correct: ArrayLike, weights: ArrayLike | None = None) -> "Platt":
        """Fit on (N,) values of any confidence score and (N,) correctness; `confidence({"score": …})` follows."""
        s, t = np.asarray(score), np.asarray(correct).astype(bool)
        if s.ndim != 1 or s.shape != t.shape or not len(s):
            raise InputError(f"score, correct: expected (N,) of the same length ≥ 1, got {s.shape}, {t.shape}.")
        self.classes_ = 2 if self.classes_ is None else self.classes_
        self._fit_pairs(Given({"score": s}), t, np.ones(len(s)) if weights is None else np.asarray(weights, float))
        return self

    def _score(self, given: Given) -> Array:
        return self.slope_ * given.score.astype(np.float64) + self.intercept_


@register
class Beta(TopOne):
    """log-odds a·ln c − b·ln(1 − c) + m with a, b ≥ 0. Kull et al. 2017.

    Fitted by NLL; a negative a or b is set to 0 and the rest fitted again. Where the rows don't decide, a ridge of
    1e-9 does, towards one slope (k, k, 0) fitted alone and in units of the scores' RMS: no scale is preferred.
    coefficients_: (a, b, m).
    """

    name = "beta"
    coefficients_: Floats

    def _fit_pairs(self, given: Given, correct: Array, w: Floats) -> None:
        s, target = finite_score(given), correct.astype(np.float64)
        unit = float(np.sqrt(w @ s**2 / w.sum())) or 1.0
        units = np.array([unit, unit, 1.0])
        features = _beta_features(s) / units
        used = np.array([True, True, True])
        slope = fit_logistic(s[:, None] / unit, target, w, np.zeros(1), RIDGE)[0]
        prior = np.array([1.0, 1.0, 0.0]) * max(slope, 0.0)
        while True:
            found = np.zeros(3)
            found[used] = fit_logistic(features[:, used], target, w, prior[used], RIDGE)
            negative = np.flatnonzero(found[:2] < 0)
            if not len(negative):
                break
            used[negative[found[negative].argmin()]] = False
        self.coefficients_ = found / units

    def _score(self, given: Given) -> Array:
        s = given.score.astype(np.float64)
        a, b, m = self.coefficients_
        # Spelt out: BLAS adds in an order that depends on the number of rows.
        return np.asarray(b * softplus(s) - a * softplus(-s) + m)


def _beta_features(s: Floats) -> Floats:
    """(N, 3): ln c, −ln(1 − c) and 1, straight from the log-odds."""
    return np.stack([-softplus(-s), softplus(s), np.ones(len(s))], axis=1)
