"""Is a new calibration worse than the one in force? Judged on test rows that made neither, by paired bootstrap."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from offramp.runtime import metrics
from offramp.runtime.arrays import Floats
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, outcome_of
from offramp.runtime.points import OperatingPoint
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


def compare_points(
    old: Mapping[str, OperatingPoint], new: Mapping[str, OperatingPoint], evidence: LabelledRows, *, seed: int = 0
) -> list[Compared]:
    """Compare the points that both have, figure by figure.

    Worse is: accuracy lost without FLOPs saved (or beyond what its own target allows); FLOPs spent without
    accuracy won; answers given up without risk lowered, or a promised risk broken that the old one kept;
    confidence that is less true (n·ConfCE^corr). Each must be significant at 5% over all comparisons (Holm)
    and, accuracy apart, more than a margin.
    """
    common = [name for name in new if name in old]
    if len(evidence) < LEAST_ROWS or not common:
        return []
    draws = _counts(len(evidence), seed)
    found: list[tuple[Compared, bool]] = []
    for name in common:
        if old[name] == new[name]:
            continue
        found += _point(name, old[name], new[name], evidence, draws, seed)
    if not found:
        return []
    # What didn't change was not tested.
    adjusted = metrics.holm([one.p_value if one.difference else np.nan for one, _ in found])
    return [
        Compared(**{**vars(one), "p_value": 1.0 if np.isnan(p) else float(p), "worse": bool(bad and p <= 0.05)})
        for (one, bad), p in zip(found, adjusted, strict=True)
    ]


def _counts(rows: int, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    return np.stack([np.bincount(rng.integers(0, rows, rows), minlength=rows) for _ in range(REPLICATES)]).astype(
        np.float32
    )


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
    def of(cls, point: OperatingPoint, evidence: LabelledRows, draws: Floats, seed: int) -> "_Seen":
        outcome: Simulation = outcome_of(evidence, point)
        right = outcome.label == evidence.truth
        whole = float(evidence.flops[-1].mean()) or 1.0
        n = len(evidence)
        return cls(
            right=right.astype(np.float64),
            cost=outcome.flops / whole,
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
    name: str, old: OperatingPoint, new: OperatingPoint, evidence: LabelledRows, draws: Floats, seed: int
) -> list[tuple[Compared, bool]]:
    n = len(evidence)
    a, b = _Seen.of(old, evidence, draws, seed), _Seen.of(new, evidence, draws, seed)
    same_target = old.provenance.get("target") == new.provenance.get("target")

    def line(figure: str, before: float, after: float, replicates: Floats, rising_is_worse: bool) -> Compared:
        known = replicates[~np.isnan(replicates)]
        if not len(known) or np.isnan(after - before):
            return Compared(name, figure, n, _known(before), _known(after), 0.0, 0.0, 0.0, 1.0, False)
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
    allowed = _allowed_drop(new)
    lost = float((evidence.correct[-1] - b.right).mean())
    lost_before = float((evidence.correct[-1] - a.right).mean())
    promise = new.provenance.get("abstention", {}).get("risk")
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


def _allowed_drop(point: OperatingPoint) -> float | None:
    target = point.provenance.get("target") or {}
    allowed = target.get("drop", target.get("epsilon"))
    return None if allowed is None else float(allowed)


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


def refusals(compared: Sequence[Compared]) -> list[str]:
    """Why the new calibration mustn't replace the old one, in words; empty if it may."""
    return [
        f"{one.point}: {one.figure} goes from {one.old:.4g} to {one.new:.4g} on {one.rows} test rows that neither "
        f"calibration was made from (difference {one.difference:+.4g}, 95% interval [{one.low:+.4g}, "
        f"{one.high:+.4g}], p = {one.p_value:.3g})"
        for one in compared
        if one.worse and one.old is not None and one.new is not None
    ]
