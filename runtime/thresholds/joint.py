"""Exits and abstention chosen together: the cheapest cascade that keeps a promised risk on enough rows."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.errors import InputError
from offramp.runtime.thresholds.accuracy_target import accuracy_target
from offramp.runtime.thresholds.exit_share import cascade_inputs
from offramp.runtime.thresholds.rule import leave_at
from offramp.runtime.thresholds.sgr import SelectiveRisk, sgr


@dataclass(frozen=True)
class JointChoice:
    """Exit thresholds and `abstain_below`, with what they do on the certifying rows.

    cost: fraction of the full mean cost. abstention: the SGR answer behind abstain_below (its delta is the
    share of the promise that one candidate gets). feasible: whether some candidate keeps the risk on at least
    min_coverage of the rows. Otherwise the one that covers most is given, at worst abstaining on everything.
    """

    thresholds: tuple[float, ...]
    abstain_below: float
    cost: float
    abstention: SelectiveRisk
    feasible: bool
    min_coverage: float


def joint_choice(
    scores: ArrayLike,
    log_odds: ArrayLike,
    correct: ArrayLike,
    flops: ArrayLike,
    risk: float = 0.05,
    delta: float = 0.05,
    *,
    min_coverage: float = 0.9,
    candidates: int = 8,
    method: Literal["fixed_sequence", "binary"] = "fixed_sequence",
    seed: int = 0,
) -> JointChoice:
    """The cheapest exit thresholds under which, abstaining as needed, at least `min_coverage` of the rows are
    answered with selective risk ≤ `risk`, with probability ≥ 1 − `delta`.

    scores: (J, N) what exits are decided on. log_odds: (J, N) calibrated log-odds that abstention compares. correct:
    (J, N). flops: (J,) or (J, N). Half of the rows (by `seed`) propose a frontier of `candidates`, the other half
    certifies each at delta/candidates, so the promise holds for whichever is taken. method: of `sgr`; "binary" is the
    better one where even the surest rows err at a rate not far below `risk`.
    """
    s, cost = cascade_inputs(scores, flops)
    right, odds = np.asarray(correct), np.asarray(log_odds, np.float64)
    for name, array in (("correct", right), ("log_odds", odds)):
        if array.shape != s.shape:
            raise InputError(f"{name}: expected shape {s.shape}, as scores has, got {array.shape}.")
    min_coverage = arrays.fraction(min_coverage, "min_coverage", low_open=False, high_open=False)
    if candidates < 1:
        raise InputError(f"candidates: expected at least 1, got {candidates!r}.")
    right = arrays.flags(right.reshape(-1), "correct").reshape(s.shape)
    rows = s.shape[1]
    if rows < 2:
        raise InputError(f"scores: expected at least 2 rows, to propose and to certify, got {rows}.")
    order = np.random.default_rng(seed).permutation(rows)
    proposing, certifying = np.sort(order[: rows // 2]), np.sort(order[rows // 2 :])
    frontier = accuracy_target(
        s[:, proposing], right[:, proposing], cost[:, proposing], 1.0, standard_errors=0.0
    ).frontier
    picked = np.unique(np.linspace(0, len(frontier) - 1, candidates).round().astype(np.int64))
    at = np.arange(len(certifying))
    full = float(cost[-1, certifying].mean()) or 1.0
    choices = []
    for index in picked:
        bars = frontier[index].thresholds
        exits = leave_at(s[:, certifying], bars)
        known = leave_at(s[:, proposing], bars)
        begun = (odds[known, proposing], ~right[known, proposing]) if method == "fixed_sequence" else None
        level = delta / len(picked)
        kept = sgr(odds[exits, certifying], ~right[exits, certifying], risk, level, method, proposing=begun)
        spent = float(cost[exits, certifying][at].mean()) / full
        enough = kept.feasible and kept.coverage >= min_coverage
        choices.append(JointChoice(bars, kept.threshold, spent, kept, enough, min_coverage))
    good = [choice for choice in choices if choice.feasible]
    if good:
        return min(good, key=lambda choice: choice.cost)
    return max(choices, key=lambda choice: (choice.abstention.coverage, -choice.cost))
