"""Is a new calibration worse than the one in force? Judged on test rows that made neither, by paired bootstrap."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from offramp.runtime import metrics
from offramp.runtime.arrays import Floats
from offramp.runtime.calibration_file import Calibration
from offramp.runtime.jobs.calibrating.history import InForce
from offramp.runtime.jobs.calibrating.promises import promised
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, outcome_of
from offramp.runtime.jobs.data.splits import SplitRows
from offramp.runtime.jobs.plain_json import number
from offramp.runtime.metrics.resampling import draw_counts
from offramp.runtime.points import FULL, OperatingPoint
from offramp.runtime.simulate import Simulation

# With fewer untouched rows than this nothing can be said.
LEAST_ROWS = 50
REPLICATES = 2000
# Worse by less than this is no reason to refuse, however significant: FLOPs (share of full), coverage, and
# n·ConfCE^corr (share of the old one's).
COST, COVERAGE, CONFIDENCE = 0.03, 0.02, 0.10


@dataclass(frozen=True)
class Compared:
    """One figure of one operating point: new − old on the same rows. worse: on its own grounds for refusal."""

    point: str
    figure: str
    rows: int
    old: float | None
    new: float | None
    difference: float
    low: float
    high: float
    p_value: float
    worse: bool


@dataclass(frozen=True)
class Comparison:
    """New operating points against those in force. refused: why they mustn't replace them, in words."""

    compared: tuple[Compared, ...]
    refused: tuple[str, ...]
    notes: tuple[str, ...]


def compare(in_force: InForce, points: Mapping[str, OperatingPoint], rows: SplitRows, *, seed: int = 0) -> Comparison:
    """Compare with the calibration in force, on test rows that made neither."""
    current = in_force.calibration
    if current is None:
        return Comparison((), (), in_force.notes)
    untouched, notes = _untouched(current, in_force, rows)
    compared = compare_points(current.points, points, untouched, seed=seed)
    return Comparison(tuple(compared), tuple(refusals(compared)), (*in_force.notes, *notes))


def kept_points(
    current: Calibration | None, points: Mapping[str, OperatingPoint], *, drop: bool = False
) -> tuple[dict[str, OperatingPoint], list[str]]:
    """Operating points in force that the new ones lack and that go on beside them as they are, and what to say of that.

    Their `expected`, still of the rows that they were reported on, is marked with the version that they come from. One
    of another number of exits can't stay. drop: none does. `full` is always the new one.
    """
    lost = {} if current is None else {name: point for name, point in current.points.items() if name not in points}
    if current is None or not lost:
        return {}, []
    exits = len(points[FULL].thresholds)
    fit = {} if drop else {name: point for name, point in lost.items() if len(point.thresholds) == exits}
    kept = {
        name: replace(point, expected={"from_version": current.version, **point.expected})
        for name, point in fit.items()
    }
    said = []
    if kept:
        said.append(
            f"not asked for again, so kept as version {current.version} has them: {_named(kept)}. Their figures are "
            "older ones, and the new rows say nothing of them; --replace drops them."
        )
    if gone := [name for name in lost if name not in kept]:
        why = "" if drop else f", which aren't of {exits} exits"
        said.append(
            f"version {current.version}, in force, has operating points that this calibration lacks: "
            f"{_named(gone)}{why}. Ask for them again to keep them."
        )
    return kept, said


def _named(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _untouched(current: Calibration, in_force: InForce, rows: SplitRows) -> tuple[LabelledRows, list[str]]:
    """Test rows that made neither calibration, none where the two can't be compared; and what is odd about that."""
    none = rows.test.take(np.arange(0))
    exits = len(next(iter(current.points.values())).thresholds)
    if not current.version or exits != rows.test.exits:
        return none, []
    if in_force.used is None:
        untouched = rows.test
        notes = [
            f"history/ doesn't say which rows made version {current.version}: the comparison takes all test rows, "
            "some of which may have."
        ]
    else:
        untouched = rows.test.take(np.flatnonzero(~np.isin(rows.keys[rows.split.test], in_force.used)))
        notes = []
    if len(untouched) < LEAST_ROWS:
        notes.append(
            f"not compared with version {current.version}: neither was made from {len(untouched)} of the test rows, "
            f"expected at least {LEAST_ROWS}."
        )
        return none, notes
    return untouched, notes


def compare_points(
    old: Mapping[str, OperatingPoint], new: Mapping[str, OperatingPoint], labelled: LabelledRows, *, seed: int = 0
) -> list[Compared]:
    """Compare the points that both have, figure by figure.

    Worse is: accuracy lost without FLOPs saved (or beyond what its own target allows); FLOPs spent without
    accuracy won; answers given up without risk lowered, or a promised risk broken that the old one kept;
    confidence that is less true (n·ConfCE^corr). Each must be significant at 5% over all comparisons (Holm)
    and, accuracy apart, more than a margin.
    """
    common = [name for name in new if name in old]
    if len(labelled) < LEAST_ROWS or not common:
        return []
    draws = np.concatenate(
        [counts.astype(np.float32) for counts in draw_counts(len(labelled), REPLICATES, np.random.default_rng(seed))]
    )
    found: list[tuple[Compared, bool]] = []
    for name in common:
        if old[name] == new[name]:
            continue
        found += _point(name, old[name], new[name], labelled, draws, seed)
    if not found:
        return []
    # What didn't change was not tested.
    adjusted = metrics.holm([one.p_value if one.difference else np.nan for one, _ in found])
    return [
        Compared(**{**vars(one), "p_value": 1.0 if np.isnan(p) else float(p), "worse": bool(bad and p <= 0.05)})
        for (one, bad), p in zip(found, adjusted, strict=True)
    ]


@dataclass(frozen=True)
class _Seen:
    """What a point does on the rows, with n·ConfCE^corr and risk on each resample."""

    right: Floats
    cost: Floats
    kept: Floats
    wrong_kept: Floats
    confce: float
    confce_draws: Floats

    @classmethod
    def of(cls, point: OperatingPoint, labelled: LabelledRows, draws: Floats, seed: int) -> "_Seen":
        outcome: Simulation = outcome_of(labelled, point)
        right = outcome.label == labelled.truth
        n = len(labelled)
        return cls(
            right=right.astype(np.float64),
            cost=outcome.flops / labelled.full_flops,
            kept=(~outcome.abstain).astype(np.float64),
            wrong_kept=(~right & ~outcome.abstain).astype(np.float64),
            confce=n * metrics.confce_corr(outcome.confidence, right, seed=seed),
            confce_draws=metrics.confce_corr_resampled(outcome.confidence, right, draws, seed=seed),
        )

    def risk(self, draws: Floats | None = None) -> Any:
        w = np.ones((1, len(self.kept))) if draws is None else draws
        with np.errstate(invalid="ignore", divide="ignore"):
            risk = (w @ self.wrong_kept) / (w @ self.kept)
        return float(risk[0]) if draws is None else risk


def _point(
    name: str, old: OperatingPoint, new: OperatingPoint, labelled: LabelledRows, draws: Floats, seed: int
) -> list[tuple[Compared, bool]]:
    n = len(labelled)
    a, b = _Seen.of(old, labelled, draws, seed), _Seen.of(new, labelled, draws, seed)
    same_target = old.provenance.get("target") == new.provenance.get("target")

    def line(figure: str, before: float, after: float, replicates: Floats, rising_is_worse: bool) -> Compared:
        known = replicates[~np.isnan(replicates)]
        if not len(known) or np.isnan(after - before):
            return Compared(name, figure, n, number(before), number(after), 0.0, 0.0, 0.0, 1.0, False)
        low, high = np.quantile(known, [0.025, 0.975])
        better = known <= 0 if rising_is_worse else known >= 0
        p = min(1.0, float(better.sum() + 1) / (len(known) + 1))
        return Compared(name, figure, n, before, after, after - before, float(low), float(high), p, False)

    def mean(field: str) -> tuple[float, float, Floats]:
        x, y = getattr(a, field), getattr(b, field)
        return float(x.mean()), float(y.mean()), np.asarray(draws @ (y - x) / n)

    accuracy = line("accuracy", *mean("right"), rising_is_worse=False)
    cost = line("flops_fraction", *mean("cost"), rising_is_worse=True)
    coverage = line("coverage", *mean("kept"), rising_is_worse=False)
    risk = line("risk", a.risk(), b.risk(), b.risk(draws) - a.risk(draws), rising_is_worse=True)
    confidence = line("n·ConfCE^corr", a.confce, b.confce, b.confce_draws - a.confce_draws, rising_is_worse=True)
    cheaper, costlier = cost.difference <= -COST, cost.difference >= COST
    lost = float((labelled.correct[-1] - b.right).mean())
    lost_before = float((labelled.correct[-1] - a.right).mean())
    allowed, promise = promised(new).drop, promised(new).risk
    kept_before = promise is None or not (a.risk() > promise)
    found = [
        (accuracy, accuracy.difference < 0 and (not cheaper or (same_target and allowed is None))),
        (cost, costlier and accuracy.difference <= 0),
        (coverage, coverage.difference <= -COVERAGE and not risk.difference < 0),
        (risk, promise is not None and b.risk() > promise and kept_before),
        (confidence, a.confce > 0 and confidence.difference > CONFIDENCE * a.confce),
    ]
    if allowed is not None:
        # Within what was asked for, accuracy may be traded for FLOPs.
        found[0] = (accuracy, accuracy.difference < 0 and lost > allowed and lost > lost_before)
    return found


def refusals(compared: Sequence[Compared]) -> list[str]:
    """Why the new calibration mustn't replace the old one, in words; empty if it may."""
    return [
        f"{one.point}: {one.figure} goes from {one.old:.4g} to {one.new:.4g} on {one.rows} test rows that neither "
        f"calibration was made from (difference {one.difference:+.4g}, 95% interval [{one.low:+.4g}, "
        f"{one.high:+.4g}], p = {one.p_value:.3g})"
        for one in compared
        if one.worse and one.old is not None and one.new is not None
    ]
