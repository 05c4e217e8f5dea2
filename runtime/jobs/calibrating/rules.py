"""Exit rules with one dial: few enough to try on a thousand rows without fitting their noise.

Thresholds of five exits searched freely lost 0.76 points on CLINC150's test rows where 0.5 were allowed on
1,200 rows of val; with one common threshold the loss was at most 0.2, at a cost a tenth higher.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from offramp.runtime import calibration
from offramp.runtime.arrays import Array, Bools, Floats
from offramp.runtime.calibration import Platt
from offramp.runtime.thresholds import geometric_shares, leave_at, thresholds_for_shares

INF = float("inf")
STEPS = 200


@dataclass(frozen=True)
class Rule:
    """Thresholds, with what they do on the rows that proposed them.

    family: "equal score", one log-odds for all exits; "equal confidence", the same after Platt's map at each;
    "exit shares", share_j ∝ q^j. cost: fraction of the full mean. drop: accuracy lost; lost: share of rows that
    the full model has right and the rule wrong. margin: a standard error of the drop, counting one row more
    than seen to differ: no difference among few rows is no proof of none.
    """

    family: str
    thresholds: tuple[float, ...]
    cost: float
    drop: float
    lost: float
    margin: float


def propose(score: Array, correct: Bools, cost: Floats) -> list[Rule]:
    """All rules of all families, from (J, N) scores, correctness and cumulative cost; the first is `full`."""
    exits = len(score)
    full = (*(INF,) * (exits - 1), -INF)
    rules = {full: judge("full", full, score, correct, cost)}
    if exits > 1 and score.shape[1]:
        for family, bars in _candidates(score, correct):
            one = _reachable(bars, score)
            if one not in rules:
                rules[one] = judge(family, one, score, correct, cost)
    return list(rules.values())


def judge(family: str, bars: Sequence[float], score: Array, correct: Bools, cost: Floats) -> Rule:
    """A rule's figures on some rows; without rows NaN, and nothing in hand."""
    rows = np.arange(score.shape[1])
    if not len(rows):
        return Rule(family, tuple(float(b) for b in bars), np.nan, np.nan, np.nan, np.inf)
    left = leave_at(score, np.asarray(bars))
    drop = correct[-1].astype(np.float64) - correct[left, rows]
    whole = float(cost[-1].mean()) or 1.0
    return Rule(
        family=family,
        thresholds=tuple(float(b) for b in bars),
        cost=float(cost[left, rows].mean()) / whole,
        drop=float(drop.mean()),
        lost=float((drop > 0).mean()),
        margin=float(np.sqrt((drop**2).sum() + 1.0)) / len(rows),
    )


def _candidates(score: Array, correct: Bools) -> list[tuple[str, tuple[float, ...]]]:
    early = score[:-1].astype(np.float64)
    dial = np.linspace(0.0, 1.0, STEPS + 1)
    found: list[tuple[str, tuple[float, ...]]] = [
        ("equal score", (*(float(bar),) * len(early), -INF)) for bar in np.unique(np.quantile(early, dial))
    ]
    slopes, shifts = _platt(early, correct[:-1])
    for bar in np.unique(np.quantile(slopes[:, None] * early + shifts[:, None], dial)):
        # Where the score says nothing of being right no threshold is safe.
        bars = [float((bar - b) / a) if a > 0 else INF for a, b in zip(slopes, shifts, strict=True)]
        found.append(("equal confidence", (*bars, -INF)))
    shares = [geometric_shares(len(score), float(log_q)) for log_q in 12 * np.linspace(-1, 1, STEPS // 2 + 1) ** 3]
    return [*found, *(("exit shares", thresholds_for_shares(score, share)) for share in shares)]


def _platt(score: Floats, correct: Bools) -> tuple[Floats, Floats]:
    """Each exit's slope and intercept of P(right | score)."""
    fitted = []
    for s, right in zip(score, correct, strict=True):
        one = calibration.get("platt")
        assert isinstance(one, Platt)
        fitted.append(one.fit_score(s, right))
    return np.array([p.slope_ for p in fitted]), np.array([p.intercept_ for p in fitted])


def _reachable(bars: Sequence[float], score: Array) -> tuple[float, ...]:
    """An exit where no row leaves only costs its head's time: it is switched off."""
    left = leave_at(score, np.asarray(bars))
    used = np.bincount(left, minlength=len(bars)) > 0
    return (*(float(b) if u else INF for b, u in zip(bars[:-1], used, strict=False)), -INF)
