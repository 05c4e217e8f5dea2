"""Maps that change what confidence is reported and never the order of rows (EEFP section 3.2, appendix B).

Exits are decided on the raw score, so such a map changes no exit. Both mix in a little of the identity (ε =
0.05), which keeps neighbours apart in finite precision, and both work on 1 − ĉ, where confident rows differ.

What holds in floating point: scores 1e-9·max(1, |s|) apart stay apart and in order. Neighbouring float32 scores, which
is what gates compute, are that far apart beyond ±0.02. Nearer ones, of float64 or beside 0, may tie, or swap by the
last bits (1e-14 in log-odds): a map flatter than 1 has fewer values to give than it is asked for.
"""

import numpy as np
from offramp.runtime import scores
from offramp.runtime.arrays import Array, Floats
from offramp.runtime.calibration.monotone import MonotoneLine, isotonic_regression
from offramp.runtime.calibration.protocol import Given
from offramp.runtime.calibration.registry import register
from offramp.runtime.calibration.solvers.search import minimise
from offramp.runtime.calibration.top_one import TopOne, finite_score

EPSILON = 0.05
# From here on 1 − ĉ is proportional to e^(−s) to the last bit, and may be below what a float can hold.
STEEP = 40.0
ALPHA_RANGE = (1e-2, 1e2)


def power_log_odds(score: Array, alpha: float, classes: int) -> Floats:
    """Log-odds of f̂_α(c), c = sigmoid(score): strictly increasing in the score, as far as the module says.

    1 − ĉ = ε(1 − c) + (1 − ε)(1 − 1/C)·(−expm1(α·log1p(−u))), u = sigmoid(−s)/(1 − 1/C).
    Below c = 1/C, which no top class has, f_α stays at 1/C and only the ε-share still falls.
    """
    s = np.asarray(score, np.float64)
    if classes == 1:
        return s
    room = 1.0 - 1.0 / classes
    wrong = scores.sigmoid(-s)
    u = np.minimum(wrong / room, 1.0)
    with np.errstate(divide="ignore"):
        bent = room * -np.expm1(alpha * np.log1p(-u))
    missing = EPSILON * wrong + (1 - EPSILON) * bent
    with np.errstate(divide="ignore", invalid="ignore"):
        near = np.log1p(-missing) - np.log(missing)
    return np.where(s > STEEP, s - np.log(EPSILON + (1 - EPSILON) * alpha), near)


def binary_nll(log_odds: Floats, correct: Array, w: Floats) -> float:
    """Mean −ln of the probability given to what happened."""
    return float(w @ np.logaddexp(0.0, np.where(correct, -log_odds, log_odds)) / w.sum())


def fit_alpha(odds: Floats, correct: Array, w: Floats, classes: int) -> float:
    """α of the power by binary NLL. odds: (N,) finite; correct: (N,); w: (N,) > 0."""

    def loss(log_alpha: float) -> float:
        return binary_nll(power_log_odds(odds, float(np.exp(log_alpha)), classes), correct, w)

    low, high = np.log(ALPHA_RANGE)
    return float(np.exp(minimise(loss, low, high, 41, 1e-8)))


@register
class RankPreservingPower(TopOne):
    """f̂_α(c) = ε·c + (1 − ε)·f_α(c), f_α(c) = 1/C + (1 − 1/C)·((c − 1/C)/(1 − 1/C))^α; α by binary NLL.

    Fixes both ends: 1/C stays 1/C, 1 stays 1. alpha_: in [0.01, 100]; the lower end when every row is right,
    the upper when every row is wrong. At α = 1 nothing changes.
    """

    name = "rank_preserving_power"
    preserves_ranking = True
    alpha_: float

    def _fit_pairs(self, given: Given, correct: Array, w: Floats) -> None:
        self.alpha_ = fit_alpha(finite_score(given), correct, w, self.classes_ or 1)

    def _score(self, given: Given) -> Array:
        return power_log_odds(given.score, self.alpha_, self.classes_ or 1)


@register
class RankPreservingIsotonic(TopOne):
    """ε·c + (1 − ε)·g(c), g isotonic regression clipped to [1/(n + 2), (n + 1)/(n + 2)], n the fitted rows.

    Doesn't pin the ends, unlike the power. points_, levels_: g as a line through (log-odds, probability).
    """

    name = "rank_preserving_isotonic"
    preserves_ranking = True
    points_: Floats
    levels_: Floats

    def _fit_pairs(self, given: Given, correct: Array, w: Floats) -> None:
        line = isotonic_regression(finite_score(given), correct, w)
        n = len(correct)
        self.points_, self.levels_ = line.x, np.clip(line.y, 1 / (n + 2), (n + 1) / (n + 2))

    def _score(self, given: Given) -> Array:
        s = given.score.astype(np.float64)
        level = MonotoneLine(self.points_, self.levels_)(s)
        missing = EPSILON * scores.sigmoid(-s) + (1 - EPSILON) * (1 - level)
        right = EPSILON * scores.sigmoid(s) + (1 - EPSILON) * level
        # Where g is flat, ε·c is all that tells rows apart, and drowns in float64 as c nears 0 or 1. A slope
        # of 1e-4, dying out beyond 100, keeps neighbours apart there: less than 0.01 in log-odds up to s =
        # 100, less than 0.1 at the largest float.
        far = np.abs(s) - 8.0
        apart = np.clip(far, 0.0, 92.0) + 10.0 * np.log1p(np.maximum(far - 92.0, 0.0) / 10.0)
        return np.asarray(np.log(right) - np.log(missing) + 1e-4 * np.sign(s) * apart)
