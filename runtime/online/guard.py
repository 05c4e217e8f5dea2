"""Whether new calibrators may take the place of those in force: judged on later rows, as often as anyone likes."""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from offramp.runtime import arrays, scores
from offramp.runtime.arrays import Bools, Floats, Ints
from offramp.runtime.calibration import same_order
from offramp.runtime.errors import InputError
from offramp.runtime.metrics import leave_here, paired_auroc
from offramp.runtime.metrics.bins import default_bins
from offramp.runtime.online.betting import log_e_value, spent
from offramp.runtime.online.window import Window, effective_rows, within_share
from offramp.runtime.points import OperatingPoint

ALPHA = 0.05
# EEFP may fall by less than this; seen on at least so many rows that should have gone on.
MARGIN = 0.005
LEAST_NEGATIVES = 30

Verdict = Literal["accept", "refuse", "wait"]


@dataclass(frozen=True)
class Trial:
    """A candidate on trial against the incumbent: all that is fixed before its judge rows come.

    number: the how-manieth candidate of this incumbent it is, from 1; a rollback is one, too. turn: the how-manieth of
    those that spend of the same alpha. after: seconds; judge rows were answered later. edges: (B − 1,) of the bins, in
    the incumbent's log-odds. shift: (B,) how far the candidate moves the mean confidence of all rows by what it does in
    each bin. heaviest: what a judge row weighs at most. alpha: what these may spend together.
    """

    number: int
    turn: int
    after: float
    edges: Floats
    shift: Floats
    heaviest: float
    alpha: float = ALPHA

    @property
    def level(self) -> float:
        """This trial's part of alpha: 6α/(π²·turn²)."""
        return spent(self.alpha, self.turn)


@dataclass(frozen=True)
class Ranking:
    """ΔEEFP, candidate − incumbent, of some exits, each weighing as its negatives do.

    lower, upper: its limits at `level`, one-sided each; NaN where there are too few negatives to say. negatives:
    effective rows that should have gone on at one of the exits.
    """

    exits: tuple[int, ...]
    change: float
    lower: float
    upper: float
    level: float
    negatives: float

    @property
    def name(self) -> str:
        """Of which exits, in words."""
        return f"exit {self.exits[0]}" if len(self.exits) == 1 else f"exits {', '.join(map(str, self.exits))}"


@dataclass(frozen=True)
class Decision:
    """What a look at a trial found, with its numbers.

    verdict: "accept", "refuse" (for good), or "wait" for more rows. reason: why, in a sentence.
    rows: judge rows. left_out: labelled rows beyond a key's share, which didn't count. effective: what their weights
    are worth in equal rows. confce_incumbent, confce_candidate: ConfCE of both on the incumbent's bins, on the judge
    rows. e_value: evidence that the candidate is nearer; needed: what it takes. e_value_worse: that it is farther.
    ranking: ΔEEFP where it had to be shown, of all exits together and then of each that has negatives enough.
    """

    verdict: Verdict
    reason: str
    number: int
    rows: int
    left_out: int
    effective: float
    after: float
    until: float
    confce_incumbent: float
    confce_candidate: float
    e_value: float
    e_value_worse: float
    needed: float
    alpha: float
    level: float
    ranking: tuple[Ranking, ...] = ()

    @property
    def change(self) -> float:
        """ΔConfCE on the judge rows; below 0 the candidate is nearer."""
        return self.confce_candidate - self.confce_incumbent


def open_trial(
    window: Window,
    incumbent: OperatingPoint,
    candidate: OperatingPoint,
    *,
    after: float,
    number: int = 1,
    turn: int | None = None,
    alpha: float = ALPHA,
    bins: int | None = None,
) -> Trial:
    """Fix the test of a candidate before any of its judge rows is known.

    window: rows of the operating point up to now, labelled or not; only inputs of theirs are read, no label. after: the
    time of the last row that either side was fitted on. number: candidates of this incumbent so far, this one
    included. turn: of those that spend of alpha; default all. bins: quantile bins of the incumbent's confidence,
    default ⌈n^(1/3)⌉ of the labelled rows.
    """
    if len(candidate.thresholds) != len(incumbent.thresholds) or len(incumbent.thresholds) != window.exits:
        raise InputError("candidate: expected as many exits as the incumbent's and the window's.")
    moved = [c.name for c in candidate.calibrators if not c.preserves_argmax]
    if moved:
        raise InputError(f"candidate: {moved[0]} can change a row's label, which no judge row can tell of.")
    if not math.isfinite(after):
        raise InputError(f"after: expected a time in seconds, got {after!r}.")
    turn = number if turn is None else turn
    spent(alpha, turn)
    answered = window.take(~window.abstained)
    if not len(answered):
        raise InputError("window: expected at least one row that was answered.")
    before, behind = answered.log_odds(incumbent), answered.log_odds(candidate)
    count = default_bins(int(answered.known.sum())) if bins is None else bins
    edges = np.unique(np.quantile(before, np.arange(1, count) / count, method="inverted_cdf"))
    gap = scores.sigmoid(behind) - scores.sigmoid(before)
    shift = arrays.group_sums(np.searchsorted(edges, before), gap, len(edges) + 1) / len(answered)
    heaviest = float(answered.weights[answered.known].max(initial=1.0))
    return Trial(number, turn, float(after), edges, shift, heaviest, alpha)


def judge(
    trial: Trial,
    window: Window,
    incumbent: OperatingPoint,
    candidate: OperatingPoint,
    *,
    share: float = 1.0,
) -> Decision:
    """Look at a trial: may be done after every row, for as long as the trial lasts.

    window: *all* rows of the operating point answered since the trial's `after`, labelled or not; a row that is
    forgotten while its trial runs would be chosen after the fact. share: of the judge rows that one key may have sent
    (see `within_share`).

    The statistic. With both sides on the incumbent's bins B and t = 1 where the answer was right,
        ΔConfCE = n⁻² Σ_B (Σ_B(c′ − c))·(Σ_B(c + c′ − 2t)),
    which is linear in t. The trial fixed what stands for n⁻¹Σ_B(c′ − c), the shift a_B, on earlier rows, so that row i
    adds w_i·a_B(i)·(c_i + c′_i − 2t_i) and nothing that comes later changes that.

    The null. Let p_i be the probability that row i is right, given the row itself and all that was known before its
    label came. "The candidate is not better": Σ_{i≤n} w_i·a_B(i)·(c_i + c′_i − 2p_i) ≥ 0, i.e. over the judge rows so
    far the accuracies lie, weighted by where the candidate moves confidence and how far, no nearer to its side of the
    middle (c + c′)/2 than to the incumbent's. Nothing is assumed of p_i: not that either side is calibrated, nor that
    rows are alike or independent.

    The test. g_i = −w_i·a_B(i)·(c_i + c′_i − 2t_i)/b, b = 2·max|a|·heaviest, is at least −1, and what `betting` says
    holds: the probability that an incumbent is ever replaced while the null is true of the rows that decided it is at
    most alpha, over any number of candidates (numbered, 6α/(π²k²) each) and looks. It rests on labels coming
    independently of t, given the row. A weight above `heaviest` is cut to it.

    A candidate whose order of rows isn't the incumbent's must also show, on later rows with all exits known, that EEFP
    doesn't fall by MARGIN: on average over the exits, each weighing as its negatives do, shown by a lower limit; and no
    exit that has negatives enough may be seen to lose as much (`_rankings`). The score compared is the calibrated one:
    what a gate on calibrated confidence would see.
    """
    later = window.time > trial.after
    labelled = np.flatnonzero(later & window.answered)
    in_turn = labelled[np.argsort(window.labelled[labelled], kind="stable")]
    rows = np.sort(in_turn[within_share(window.key[in_turn], share)])
    before = window.log_odds(incumbent, rows)
    c, c_new = scores.sigmoid(before), scores.sigmoid(window.log_odds(candidate, rows))
    right = window.correct[rows].astype(np.float64)
    number = np.searchsorted(trial.edges, before)
    w = np.minimum(window.weights[rows], trial.heaviest)
    scale = 2 * float(np.abs(trial.shift).max()) * trial.heaviest
    gains = w * trial.shift[number] * (2 * right - c - c_new) / scale if scale > 0 else np.zeros(len(rows))
    better, worse = log_e_value(gains), log_e_value(-gains)
    needed = -math.log(trial.level)
    passed = better >= needed
    ranking = _rankings(window, later, incumbent, candidate) if passed else ()
    verdict, reason = _verdict(trial, len(rows), scale, better, worse, ranking)
    return Decision(
        verdict=verdict,
        reason=reason,
        number=trial.number,
        rows=len(rows),
        left_out=len(in_turn) - len(rows),
        effective=effective_rows(w),
        after=trial.after,
        until=float(window.time[rows[-1]]) if len(rows) else trial.after,
        confce_incumbent=_confce(number, w * (c - right), w),
        confce_candidate=_confce(number, w * (c_new - right), w),
        e_value=_exp(better),
        e_value_worse=_exp(worse),
        needed=1 / trial.level,
        alpha=trial.alpha,
        level=trial.level,
        ranking=ranking,
    )


def _confce(number: Ints, residual: Floats, w: Floats) -> float:
    total = float(w.sum())
    return float((np.bincount(number, residual) ** 2).sum()) / total**2 if total else float("nan")


def _exp(log: float) -> float:
    return math.exp(min(log, 700.0))


def _verdict(
    trial: Trial, rows: int, scale: float, better: float, worse: float, ranking: tuple[Ranking, ...]
) -> tuple[Verdict, str]:
    needed = -math.log(trial.level)
    numbers = f"e-value {_exp(better):.3g} on {rows} later rows, {1 / trial.level:.4g} needed"
    if not scale > 0:
        return "refuse", "The candidate gives every answered row the confidence that the incumbent gives it."
    if worse >= needed:
        against = f"e-value {_exp(worse):.3g} against it on {rows} later rows"
        return "refuse", f"The candidate is farther from what happened: {against}."
    if better < needed:
        return "wait", f"Not shown to be nearer to what happened: {numbers}."
    if not ranking:
        return "accept", f"The candidate is nearer to what happened: {numbers}."
    whole, *single = ranking
    for one in single:
        if one.upper < -MARGIN:
            return "refuse", f"Nearer to what happened ({numbers}), but it ranks rows worse: {_limits(one)}."
    for one in single:
        # A few early negatives can speak for a candidate that more of them speak against.
        if one.change < -MARGIN:
            return "wait", (
                f"Nearer to what happened ({numbers}), but not shown to keep the order of rows: {_limits(one)}."
            )
    if math.isnan(whole.lower):
        return "wait", (
            f"Nearer to what happened ({numbers}), but not shown to keep the order of rows: {whole.negatives:.0f} "
            f"effective rows with all exits known should have gone on, {LEAST_NEGATIVES} needed."
        )
    if whole.lower > -MARGIN:
        return "accept", f"The candidate is nearer to what happened: {numbers}; {_limits(whole)}."
    if whole.change < -MARGIN:
        return "refuse", f"Nearer to what happened ({numbers}), but it ranks rows worse: {_limits(whole)}."
    return "wait", f"Nearer to what happened ({numbers}), but not shown to keep the order of rows: {_limits(whole)}."


def _limits(ranking: Ranking) -> str:
    return (
        f"EEFP of {ranking.name} changes by {ranking.change:+.4f}, [{ranking.lower:+.4f}, {ranking.upper:+.4f}] at "
        f"level {ranking.level:.3g}, {ranking.negatives:.0f} effective negatives, and must not fall by {MARGIN}"
    )


# ---------------------------------------------------------------- the order of rows


def keeps_order(incumbent: OperatingPoint, candidate: OperatingPoint) -> bool:
    """Whether a candidate puts any rows into the order that the incumbent puts them into, at each exit."""
    return all(same_order(incumbent.calibrator(j), candidate.calibrator(j)) for j in incumbent.exits)


def _rankings(
    window: Window, later: Bools, incumbent: OperatingPoint, candidate: OperatingPoint
) -> tuple[Ranking, ...]:
    """ΔEEFP of the open exits but the last whose order of rows may differ from the incumbent's, and of each alone.

    On labelled rows with all exits known, each weighing 1/(shadow·asked), in the order in which their labels came.
    Looks are free here, too: the limits are computed when there are 30, 60, 120, … effective negatives, on the rows up
    to there whenever that is asked, the k-th at level 6·.05/(π²k²); the latest is the answer. An exit alone, which can
    only speak against the candidate, is judged on all rows.
    """
    exits = [
        j
        for j in incumbent.exits
        if j < window.exits - 1 and not same_order(incumbent.calibrator(j), candidate.calibrator(j))
    ]
    if not exits:
        return ()
    known = np.flatnonzero(later & window.complete & window.known)
    known = known[np.argsort(window.labelled[known], kind="stable")]
    target = leave_here(window.tops[:, known] == window.label[known])[exits]
    old, new = (
        np.array([window.log_odds_at(j, point.calibrator(j), known) for j in exits]) for point in (incumbent, candidate)
    )
    w = window.complete_weights[known]
    alone = [
        _limit((j,), new[[k]], old[[k]], target[[k]], w, ALPHA)
        for k, j in enumerate(exits)
        if effective_rows(w[~target[k]]) >= LEAST_NEGATIVES
    ]
    return (_in_stages(tuple(exits), new, old, target, w), *(alone if len(exits) > 1 else ()))


def _limit(exits: tuple[int, ...], new: Floats, old: Floats, target: Bools, w: Floats, level: float) -> Ranking:
    seen = paired_auroc(new, old, target, weights=w)
    reach = NormalDist().inv_cdf(1 - level) * seen.error
    negatives = effective_rows(w[~target.all(axis=0)])
    return Ranking(exits, seen.difference, seen.difference - reach, seen.difference + reach, level, negatives)


def _in_stages(exits: tuple[int, ...], new: Floats, old: Floats, target: Bools, w: Floats) -> Ranking:
    weight = np.where(target.all(axis=0), 0.0, w)
    squares = np.cumsum(weight**2)
    negatives = np.divide(np.cumsum(weight) ** 2, squares, out=np.zeros(len(w)), where=squares > 0)
    total = float(negatives[-1]) if len(w) else 0.0
    latest = Ranking(exits, math.nan, math.nan, math.nan, math.nan, total)
    stage, wanted = 1, float(LEAST_NEGATIVES)
    while (enough := negatives >= wanted).any():
        rows = slice(0, int(enough.argmax()) + 1)
        found = _limit(exits, new[:, rows], old[:, rows], target[:, rows], w[rows], spent(ALPHA, stage))
        # NaN where every row should leave: nothing is then known.
        if not math.isnan(found.lower):
            latest = found
        stage, wanted = stage + 1, 2 * wanted
    return latest
