"""Intervals of ranking measures: AUROC_f (and EEFP), AURC and AUGRC, from random weights on the rows.

Each of the draws weighs every row anew (the Bayesian bootstrap, Rubin 1981), together with one row more that nobody
saw: the worst for the limit on the bad side, the best for the other. Without it an interval collapses where all
errors are ranked last, or where there is none; with it the interval of a share would be Clopper and Pearson's
(Gaffke 2005). Rows that follow each other in the ranking are weighed in groups, so 50,000 cost no more than 1,000.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Bools, Floats
from offramp.runtime.errors import InputError
from offramp.runtime.metrics import selective
from offramp.runtime.metrics.intervals import NAN, Ends

# Groups of neighbours in the ranking, at most; the sizes of the draws follow.
GROUPS = 256
DRAWS = 1000


@dataclass(frozen=True)
class RankingIntervals:
    """(low, high) of each measure, around its value on all rows; (NaN, NaN) where that is undefined."""

    auroc_f: Ends
    aurc: Ends
    augrc: Ends


def auroc_interval(
    score: ArrayLike, positive: ArrayLike, confidence: float = 0.95, *, draws: int = DRAWS, seed: int = 0
) -> Ends:
    """Interval of `auroc`, in [0, 1]; NaN when either kind is missing, as `auroc` is.

    score: (N,) and positive: (N,) 0/1. Rows of both kinds count as sampled. With one negative alone it is nearly all
    of [0, 1]: its rank is one draw.
    """
    return _Drawn.of(score, ~arrays.flags(positive, "positive"), draws, seed).auroc(confidence)


def ranking_intervals(
    score: ArrayLike, error: ArrayLike, confidence: float = 0.95, *, draws: int = DRAWS, seed: int = 0
) -> RankingIntervals:
    """Intervals of `auroc_f`, `aurc` ("ranks") and `augrc` from the same draws.

    score: (N,) higher is more confident. error: (N,) 0/1. AURC's value on n rows is unbiased, its draws, in which rows
    have a width, are not: they are moved by what they miss at equal weights.
    """
    drawn = _Drawn.of(score, error, draws, seed)
    return RankingIntervals(drawn.auroc(confidence), drawn.aurc(confidence), drawn.augrc(confidence))


@dataclass(frozen=True)
class PairedAuroc:
    """AUROC of one score minus that of another on the same rows, and the standard error of that difference."""

    difference: float
    error: float


def paired_auroc(
    first: ArrayLike, second: ArrayLike, positive: ArrayLike, *, weights: ArrayLike | None = None
) -> PairedAuroc:
    """auroc(first) − auroc(second), with DeLong's error: what each row adds to both is compared row by row.

    first, second: (N,) scores, positive: (N,) 0/1, weights: (N,) ≥ 0. Or (J, N) each, J rankings of the same rows, such
    as a cascade's exits: then the mean of their differences, each ranking weighing as its negatives do, and rows that
    move in several rankings count as one row. A ranking that lacks a kind says nothing. NaN when all do; with one row
    of a kind alone the error is infinite.
    Source: DeLong, DeLong & Clarke-Pearson 1988; with weights each kind's share of the variance is Σw²(V − mean)²/(Σw)²
    times n/(n − 1), n = (Σw)²/Σw².
    """
    a, b = (np.atleast_2d(arrays.numbers(x, name)) for x, name in ((first, "first"), (second, "second")))
    flat = np.atleast_2d(np.asarray(positive))
    up = arrays.flags(flat.reshape(-1), "positive").reshape(len(flat), -1)
    if not a.shape == b.shape == up.shape:
        raise InputError(f"first, second, positive: expected one shape, got {a.shape}, {b.shape}, {up.shape}.")
    w = arrays.weights(weights, up.shape[1])
    w = np.ones(up.shape[1]) if w is None else w
    negatives = (w * ~up).sum(axis=1)
    used = np.flatnonzero((negatives > 0) & ((w * up).sum(axis=1) > 0))
    if not len(used):
        return PairedAuroc(NAN, NAN)
    difference, moved, sure = 0.0, np.zeros(up.shape[1]), True
    for j in used:
        share = negatives[j] / negatives[used].sum()
        gap = _placements(a[j], up[j], w) - _placements(b[j], up[j], w)
        for rows in (up[j], ~up[j]):
            mass = w[rows]
            total = float(mass.sum())
            size = total**2 / float((mass**2).sum())
            mean = float(mass @ gap[rows]) / total
            sure = sure and size > 1 + 1e-9
            moved[rows] += share * mass * (gap[rows] - mean) / total * np.sqrt(size / max(size - 1, 1e-9))
        difference += float(share * mean)  # the mean over either kind is the difference
    return PairedAuroc(difference, float(np.sqrt((moved**2).sum())) if sure else np.inf)


def _placements(score: ArrayLike, positive: Bools, w: Floats) -> Floats:
    """(N,) the share of the other kind's weight that a row is on the right side of, ties by half."""
    s = arrays.vector(score, "score", len(positive))
    # Ties share a group.
    group = np.unique(s, return_inverse=True)[1]
    out = np.empty(len(s))
    for rows, others, sign in ((positive, ~positive, 1.0), (~positive, positive, -1.0)):
        mass = np.bincount(group[others], w[others], minlength=int(group.max()) + 1)
        below = np.cumsum(mass) - mass / 2
        share = below[group[rows]] / mass.sum()
        out[rows] = share if sign > 0 else 1.0 - share
    return out


@dataclass(frozen=True)
class _Drawn:
    """Masses of the rows in each draw.

    counts: (G,) right and wrong rows of each group, most confident first. right, wrong: (D, G) their masses. more:
    (2, D) of a row more. ahead: (D,) Σ over wrong rows of the right mass ranked before them, ties by half.
    """

    score: Floats
    error: Bools
    counts: tuple[Floats, Floats]
    right: Floats
    wrong: Floats
    more: Floats
    ahead: Floats

    @classmethod
    def of(cls, score: ArrayLike, error: ArrayLike, draws: int, seed: int) -> "_Drawn":
        s = arrays.vector(score, "score")
        e = arrays.flags(error, "error", len(s))
        order = np.argsort(-s, kind="stable")
        ranked, wrong = s[order], e[order].astype(np.float64)
        # Blocks of equal score never part.
        first = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1])) if len(s) else np.zeros(0, np.int64)
        size = np.diff(np.append(first, len(s)))
        bad = np.add.reduceat(wrong, first) if len(s) else np.zeros(0)
        good = size - bad
        group = first * GROUPS // max(len(s), 1) if len(first) > GROUPS else np.arange(len(first))
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        w, r = (np.add.reduceat(x, starts) if len(s) else x for x in (bad, good))
        before = np.cumsum(good) - good
        base = np.repeat(before[starts], np.diff(np.append(starts, len(first))))
        # Of a group's pairs of a wrong and a right row, how many have the right one ahead.
        pairs = np.add.reduceat(bad * (before - base + good / 2), starts) if len(s) else bad
        inside = np.divide(pairs, w * r, out=np.full_like(w, 0.5), where=w * r > 0)
        random = np.random.default_rng(seed)
        right, wrong = (random.standard_gamma(x, (draws, len(w))) for x in (r, w))
        ahead = (wrong * (np.cumsum(right, axis=1) - (1 - inside) * right)).sum(axis=1)
        return cls(s, e, (r, w), right, wrong, random.standard_exponential((2, draws)), ahead)

    def auroc(self, confidence: float) -> Ends:
        value = selective.auroc_f(self.score, self.error)
        if np.isnan(value):
            return NAN, NAN
        r, w = self.right.sum(axis=1), self.wrong.sum(axis=1)
        more_right, more_wrong = self.more
        whole = (r + more_right) * (w + more_wrong)
        # The best: one more wrong row behind everybody, one more right row before everybody. The worst: reversed.
        best = (self.ahead + more_right * w + more_wrong * (r + more_right)) / whole
        return _ends(self.ahead / whole, best, value, confidence)

    def aurc(self, confidence: float) -> Ends:
        value = selective.aurc(self.score, self.error)
        if np.isnan(value):
            return NAN, NAN
        nobody = np.zeros(1)
        missed = value - float(_aurc(self.counts[0][None], self.counts[1][None], nobody, nobody)[0])
        one, none = self.more[0], np.zeros(len(self.right))
        best = _aurc(self.right, self.wrong, one, none) + missed
        return _ends(best, _aurc(self.right, self.wrong, none, one) + missed, value, confidence, all_alike=1.0)

    def augrc(self, confidence: float) -> Ends:
        value = selective.augrc(self.score, self.error)
        if np.isnan(value):
            return NAN, NAN
        r, w, one = self.right.sum(axis=1), self.wrong.sum(axis=1), self.more[0]
        # Over wrong rows: the mass behind them, right rows that aren't ahead and half of all pairs of wrong ones.
        behind = w * r - self.ahead + w * w / 2
        whole = r + w + one
        return _ends(behind / whole**2, (behind + one * (r + w + one / 2)) / whole**2, value, confidence, all_alike=0.5)


def _aurc(right: Floats, wrong: Floats, more_right: Floats, more_wrong: Floats) -> Floats:
    """(D,) the integral of the selective risk over coverage; the rows more come before all others."""
    size = right + wrong
    first = (more_right + more_wrong)[:, None]
    ends = np.cumsum(size, axis=1) + first
    start = ends - size
    errors = np.cumsum(wrong, axis=1) - wrong + more_wrong[:, None]
    share = np.divide(wrong, size, out=np.zeros_like(size), where=size > 0)
    # ∫ (E + share·t)/(a + t) dt over a group; nobody comes before the first.
    ratio = np.divide(ends, start, out=np.ones_like(size), where=(start > 0) & (size > 0))
    area = share * size + (errors - share * start) * np.log(ratio)
    return np.asarray((area.sum(axis=1) + more_wrong) / ends[:, -1])


def _ends(lower: Floats, upper: Floats, value: float, confidence: float, all_alike: float = 1.0) -> Ends:
    tail = (1 - arrays.fraction(confidence, "confidence")) / 2
    low, high = float(np.quantile(lower, tail)), float(np.quantile(upper, 1 - tail))
    return max(0.0, min(low, value)), min(all_alike, max(high, value))
