"""Selection with guaranteed risk: abstain so that the answered rows' error stays below a promise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Floats, Ints
from offramp.runtime.errors import InputError
from offramp.runtime.thresholds import binomial


@dataclass(frozen=True)
class SelectiveRisk:
    """Answer where score ≥ threshold; with probability ≥ 1 − delta over the rows used, risk is ≤ the target.

    coverage, risk: fraction answered and error among them, on the rows used. bound: upper confidence bound of the risk
    at `level`. Not feasible: threshold +inf (abstain on everything), coverage 0, risk and bound NaN.
    """

    threshold: float
    coverage: float
    risk: float
    bound: float
    feasible: bool
    target: float
    delta: float
    level: float
    method: str


def risk_bound(errors: ArrayLike, rows: ArrayLike, level: float) -> Floats:
    """Clopper–Pearson upper bound of a risk: BetaInv(1 − level; k + 1, m − k); 1 where k = m or m = 0.

    errors, rows: k of m, 0 ≤ k ≤ m, of shapes that broadcast. level in (0, 1).
    """
    level = arrays.fraction(level, "level")
    k = arrays.numbers(errors, "errors")
    m = arrays.numbers(rows, "rows")
    if not ((k >= 0) & (k <= m) & np.isfinite(m)).all():
        raise InputError("errors, rows: expected counts with 0 ≤ errors ≤ rows.")
    return binomial.upper(k, m, level)


@dataclass(frozen=True)
class TiedSets:
    """The sets {score ≥ v} of some rows, one for each distinct score v, smallest set first."""

    thresholds: Floats
    rows: Ints
    errors: Ints
    total: int

    @classmethod
    def of(cls, score: ArrayLike, error: ArrayLike) -> "TiedSets":
        s = arrays.vector(score, "score")
        e = arrays.flags(error, "error", len(s))
        order = np.argsort(-s, kind="stable")
        s, wrong = s[order], np.cumsum(e[order])
        last = np.flatnonzero(np.append(s[1:] != s[:-1], True)) if len(s) else np.zeros(0, np.int64)
        return cls(s[last], last + 1, wrong[last].astype(np.int64), len(s))


def sgr(
    score: ArrayLike,
    error: ArrayLike,
    risk: float = 0.05,
    delta: float = 0.05,
    method: Literal["fixed_sequence", "binary"] = "fixed_sequence",
    *,
    proposing: tuple[ArrayLike, ArrayLike] | None = None,
) -> SelectiveRisk:
    """The lowest score at which the selective risk is ≤ `risk` with probability ≥ 1 − `delta`.

    score: (N,), higher = more confident. error: (N,) 0/1, 1 = wrong. Ties are kept whole.
    A set of m rows with k errors passes at level δ′ when BetaInv(1 − δ′; k + 1, m − k) ≤ risk.
    "fixed_sequence": ranks fixed in advance, from the smallest set that could pass without an error to all
    rows, each tested at the full delta, until the first failure. "binary": ⌈log₂ N⌉ halvings at delta/⌈log₂
    N⌉ each, as published. Only a set that passed is returned; N = 0 is infeasible.
    proposing: score and error of other rows, for "fixed_sequence". They say at which of the ranks to begin (see
    `best_start`), so that an error among the surest rows ends nothing; the promise needs them to be other rows
    than those given. The threshold is then between two scores, or below all.
    Source: Geifman & El-Yaniv 2017; fixed-sequence testing: Angelopoulos et al. 2021.
    """
    risk = arrays.fraction(risk, "risk")
    delta = arrays.fraction(delta, "delta")
    if method == "fixed_sequence":
        known = [] if proposing is None else [TiedSets.of(*proposing)]
        return _fixed_sequence([TiedSets.of(score, error)], 0, known, risk, delta)
    if method != "binary":
        raise InputError(f'method: expected "fixed_sequence" or "binary", got {method!r}.')
    if proposing is not None:
        raise InputError('proposing: only "fixed_sequence" begins where other rows say.')
    sets = TiedSets.of(score, error)
    chosen, level = _binary(sets, risk, delta)
    return _answer(sets, chosen, risk, delta, level, method)


def sgr_of_any(
    scores: ArrayLike,
    errors: ArrayLike,
    chosen: int,
    risk: float = 0.05,
    delta: float = 0.05,
    *,
    proposing: tuple[ArrayLike, ArrayLike] | None = None,
) -> SelectiveRisk:
    """`sgr` of one of several rules, which the same rows may have chosen: the promise holds for whichever it is.

    scores, errors: (R, N), the rules' scores and errors on the rows, the rules fixed beforehand. chosen: whose
    threshold is wanted. proposing: the same of other rows. A rank passes where the sets of *all* rules pass at the full
    delta, so "the risk of one of them is above `risk`" is rejected (intersection–union test, Berger 1982): nothing is
    shared out, and rules that differ in few rows cost each other little.
    """
    risk, delta = arrays.fraction(risk, "risk"), arrays.fraction(delta, "delta")
    every = _several(scores, errors)
    if not 0 <= chosen < len(every):
        raise InputError(f"chosen: expected the place of one of {len(every)} rules, got {chosen!r}.")
    return _fixed_sequence(every, chosen, [] if proposing is None else _several(*proposing), risk, delta)


def _several(scores: ArrayLike, errors: ArrayLike) -> list[TiedSets]:
    s, e = np.asarray(scores), np.asarray(errors)
    if s.ndim != 2 or s.shape != e.shape:
        raise InputError(f"scores, errors: expected one shape (rules, rows), got {s.shape} and {e.shape}.")
    return [TiedSets.of(one, wrong) for one, wrong in zip(s, e, strict=True)]


def _answer(sets: TiedSets, chosen: int | None, risk: float, delta: float, level: float, method: str) -> SelectiveRisk:
    if chosen is None:
        nan = float("nan")
        return SelectiveRisk(float("inf"), 0.0, nan, nan, False, risk, delta, level, method)
    m, k = int(sets.rows[chosen]), int(sets.errors[chosen])
    bound = float(risk_bound(k, m, level))
    return SelectiveRisk(float(sets.thresholds[chosen]), m / sets.total, k / m, bound, True, risk, delta, level, method)


def rank_grid(total: int, risk: float, delta: float) -> Ints:
    """Ranks to test, depending on no score or label: for k = 0, 1, 2 … the smallest set that passes with k
    errors, then all rows.

    Between two of them a set passes with no more errors than at the first, so testing there is another
    chance to stop and hardly one to gain. After the last of them no more errors are allowed right up to all
    rows, so there stops in between cost nothing and keep what is had. Past k = 100 the steps grow; about 400
    ranks for any number of rows.
    """
    most = int(risk * total) + 1
    errors = np.arange(min(most, 100) + 1)
    if most > 100:
        errors = np.unique(np.append(errors, np.geomspace(100, most, 200).astype(np.int64)))
    # m rows with k errors pass when P(Bin(m, risk) ≤ k) ≤ delta, which falls as m grows.
    low, high = errors.astype(np.int64), np.full(len(errors), total)
    possible = (errors < total) & (binomial.cdf(np.minimum(errors, high), high, risk) <= delta)
    errors, low, high = errors[possible], low[possible], high[possible]
    while (high - low > 1).any():
        middle = (low + high) // 2
        enough = (middle > errors) & (binomial.cdf(errors, np.maximum(middle, errors + 1), risk) <= delta)
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    if not len(high):
        return np.zeros(0, np.int64)
    rest = np.linspace(high.max(), total, min(100, total - int(high.max()) + 1)).round().astype(np.int64)
    return np.unique(np.append(high, rest))


# Every score that isn't −inf reaches it; a NaN doesn't, which would reach −inf.
ANY_SCORE = float(np.finfo(np.float32).min)
_RESAMPLES = 200


def _between(scores: Floats) -> Floats:
    """A threshold for the set down to each of these falling scores: halfway to the next, where float noise doesn't
    reach, and below every score for the set of all."""
    if not len(scores):
        return scores
    with np.errstate(invalid="ignore"):
        middle = scores[:-1] / 2 + scores[1:] / 2
    between = np.isfinite(middle) & (middle > scores[1:]) & (middle <= scores[:-1])
    return np.append(np.where(between, middle, scores[:-1]), min(scores[-1], ANY_SCORE))


def expected_coverage(
    scores: ArrayLike, errors: ArrayLike, rows: int, risk: float = 0.05, delta: float = 0.05
) -> float:
    """The share of rows that `sgr_of_any` is expected to answer from `rows` rows like these, begun where these say.

    scores, errors: (R, N), the rules' scores and errors on rows that only propose. Between 0 and 1; 0 without rows.
    """
    risk, delta = arrays.fraction(risk, "risk"), arrays.fraction(delta, "delta")
    ranks = rank_grid(rows, risk, delta)
    known = _several(scores, errors)
    if not len(ranks) or not known or not known[0].total:
        return 0.0
    return float(_walks(ranks, known, risk, delta)[0].max()) / rows


def best_start(ranks: Ints, known: Sequence[TiedSets], risk: float, delta: float) -> int:
    """Where among `ranks` of other rows, the last of which is all of them, the walk should begin.

    known: sets of rows that only propose, of one rule or of several that must all pass. From the start that is
    answered most on average over resamples of them as many as the others are; where none ever passes, the one with
    the smallest p-value. With many rows that is where the p-value is smallest.
    """
    if not known[0].total or not len(ranks):
        return 0
    answered, wrong = _walks(ranks, known, risk, delta)
    if answered.any():
        return int(answered.argmax())
    return int(binomial.cdf(np.minimum(np.floor(wrong), ranks - 1), ranks, risk).argmin())


def _walks(ranks: Ints, known: Sequence[TiedSets], risk: float, delta: float) -> tuple[Floats, Floats]:
    """(K,) rows answered on average by a walk from each rank, and errors up to it, over resamples of `known`.

    A resample draws the errors' distribution, too (Beta), with one more error than seen: a stretch without one among
    few rows is no stretch that never errs. The same rows give the same answer.
    """
    total = known[0].total
    # Most errors of a rule up to each rank, were these rows as many as the others; a set of ties errs evenly.
    here = np.append(0, ranks) * (total / int(ranks[-1]))
    most = np.max([np.interp(here, np.append(0, s.rows), np.append(0, s.errors)) for s in known], axis=0)
    inside, errors = np.diff(here), np.diff(most)
    rng = np.random.default_rng(0)
    shape = (_RESAMPLES, len(ranks))
    wrong = rng.standard_gamma(errors + inside / total, shape)
    both = wrong + rng.standard_gamma(np.maximum(inside - errors, 1e-9), shape)
    rate = np.divide(wrong, both, out=np.zeros(shape), where=both > 0)  # shapes near 0 draw 0
    k = np.cumsum(rng.binomial(np.diff(ranks, prepend=0), rate), axis=1)
    passed = (k < ranks) & (binomial.cdf(k, ranks, risk) <= delta)
    # From a rank that passes the walk ends before the next that doesn't.
    failing = np.where(passed, len(ranks), np.arange(len(ranks)))
    end = np.minimum.accumulate(failing[:, ::-1], axis=1)[:, ::-1] - 1
    return np.where(passed, ranks[np.maximum(end, 0)], 0).mean(axis=0), k.mean(axis=0)


def _fixed_sequence(
    every: Sequence[TiedSets], chosen: int, known: Sequence[TiedSets], risk: float, delta: float
) -> SelectiveRisk:
    sets = every[chosen]
    ranks = rank_grid(sets.total, risk, delta)
    if known:
        ranks = ranks[best_start(ranks, known, risk, delta) :]
    passed = np.ones(len(ranks), bool)
    for one in every:
        # The set of a rank is the smallest whole one that has it; several ranks may share it.
        at = np.searchsorted(one.rows, ranks)
        k, m = one.errors[at], one.rows[at]
        passed &= (k < m) & (binomial.cdf(k, m, risk) <= delta)
    count = int(np.logical_and.accumulate(passed).sum())
    last = int(np.searchsorted(sets.rows, ranks[count - 1])) if count else None
    if known:
        sets = replace(sets, thresholds=_between(sets.thresholds))
    return _answer(sets, last, risk, delta, delta, "fixed_sequence")


def _binary(sets: TiedSets, risk: float, delta: float) -> tuple[int | None, float]:
    if not sets.total:
        return None, delta
    steps = max(1, ceil(log2(sets.total)))
    level = delta / steps
    low, high = 0, sets.total - 1
    best: int | None = None
    for _ in range(steps):
        middle = (low + high) // 2
        candidate = int(np.searchsorted(sets.rows, middle + 1))
        k, m = sets.errors[candidate], sets.rows[candidate]
        if k < m and float(binomial.cdf(k, m, risk)) <= level:
            low = middle
            best = candidate if best is None else max(best, candidate)
        else:
            high = middle
    return best, level
