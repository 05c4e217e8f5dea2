"""Exit thresholds derived again from rows with all exits known: an action of its own, whatever the calibrator.

A threshold can be lowered on rows that went past it, but where it should have been higher only rows show that left
there and were run to the end in a shadow run. They weigh 1/shadow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Bools, Floats
from offramp.runtime.errors import InputError
from offramp.runtime.metrics import paired_difference_interval
from offramp.runtime.online.betting import spent
from offramp.runtime.online.contest import KEEPS_PROMISE, ORIGIN, Found
from offramp.runtime.online.fitting.recalibrator import evenly
from offramp.runtime.online.window import Window
from offramp.runtime.points import OperatingPoint
from offramp.runtime.thresholds import (
    AccuracyTarget,
    RiskControl,
    accuracy_target,
    leave_at,
    pareto,
    risk_control,
    search,
    sgr,
)

Hold = Literal["shares", "drop", "risk"]
HOLDS: tuple[Hold, ...] = get_args(Hold)
LEAST = 100
"""Rows with all exits known that thresholds are derived from, and as many labelled ones that try them."""


def hold_shares(window: Window, shares: ArrayLike) -> tuple[float, ...]:
    """Thresholds under which `shares` (J,) of the rows leave at each exit, as `thresholds_for_shares`.

    No labels are needed. Of the rows in play those with the highest scores leave until their weight, 1/shadow, is the
    share of all; ties leave together. A share of nothing gives +inf.
    """
    rows = window.take(window.complete)
    wanted = arrays.numbers(shares, "shares")
    if wanted.shape != (window.exits,) or not (wanted >= 0).all() or wanted.sum() > 1 + 1e-6:
        raise InputError(f"shares: expected {window.exits} numbers ≥ 0 that sum to at most 1, got {wanted.tolist()}.")
    if not len(rows):
        raise InputError("window: expected at least one row with all exits known.")
    weight = 1.0 / rows.shadow
    total, playing = float(weight.sum()), np.arange(len(rows))
    chosen: list[float] = []
    for j in range(window.exits - 1):
        here = rows.score[j, playing]
        order = np.argsort(-here, kind="stable")
        mass = np.cumsum(weight[playing[order]])
        # As near to the share as whole rows come.
        k = int(np.searchsorted(mass - weight[playing[order]] / 2, wanted[j] * total))
        if k == 0:
            chosen.append(float("inf"))
            continue
        bar = float(here[order[min(k, len(order)) - 1]])
        chosen.append(bar)
        playing = playing[here < bar]
    return (*chosen, float("-inf"))


def hold_drop(
    window: Window, flops: ArrayLike, drop: float, *, standard_errors: float = 1.0, seed: int = 0
) -> AccuracyTarget:
    """The cheapest thresholds whose accuracy is at most `drop` below the last exit's, as `accuracy_target`.

    flops: (J,) cumulative cost. On labelled rows with all exits known, thinned to equal weights at random.
    """
    scores, correct = _even(window, seed)
    return accuracy_target(scores, correct, flops, drop, standard_errors=standard_errors)


def hold_risk(window: Window, flops: ArrayLike, epsilon: float, delta: float, *, seed: int = 0) -> RiskControl:
    """The cheapest thresholds found that lose at most `epsilon` of accuracy with probability ≥ 1 − `delta`.

    As `risk_control`, on rows as in `hold_drop`: a random half of them makes the sequence of thresholds, the other half
    tests it. A caller who does this again for a later version passes `betting.spent(delta, version)`.
    """
    scores, correct = _even(window, seed)
    half = np.random.default_rng(seed).random(scores.shape[1]) < 0.5
    rules = pareto(search(scores[:, half], correct[:, half], flops))
    sequence = [rule.thresholds for rule in rules]
    return risk_control(scores[:, ~half], correct[:, ~half], flops, sequence, epsilon, delta)


def _even(window: Window, seed: int) -> tuple[Floats, Floats]:
    """(J, n) scores and correctness of labelled rows with all exits known, thinned to equal weights."""
    rows = window.take(window.complete & window.known)
    rows = rows.take(evenly(rows.complete_weights, seed))
    if not len(rows):
        raise InputError("window: expected at least one labelled row with all exits known.")
    return rows.score.astype(np.float64), rows.tops == rows.label


# ---------------------------------------------------------------- as an action


@dataclass(frozen=True)
class Aim:
    """What new thresholds are to hold.

    hold: "shares" (of the rows that leave at each exit), "drop" (of accuracy, as measured) or "risk" (a drop that is
    promised with probability 1 − delta). Only its own value counts. turn: the how-manieth time it is for the operating
    point; it has 6/(π²·turn²) of delta, and of that of a promised selective risk.
    """

    hold: Hold
    shares: Sequence[float] = ()
    drop: float = 0.0
    epsilon: float = 0.0
    delta: float = 0.05
    turn: int = 1

    @classmethod
    def of(cls, hold: Hold, point: OperatingPoint, turn: int) -> "Aim":
        """What calibration gave a point. Raises InputError where it gave nothing of the kind."""
        if hold not in HOLDS:
            raise InputError(f"hold is {hold!r}, expected one of {', '.join(HOLDS)}.")
        target = point.provenance.get("target") or {}
        shares, drop = point.expected.get("exit_shares"), target.get("drop", point.expected.get("drop"))
        if hold == "shares" and shares:
            return cls(hold, shares=tuple(shares), turn=turn)
        if hold == "drop" and drop is not None:
            return cls(hold, drop=max(float(drop), 0.0), turn=turn)
        if hold == "risk" and "epsilon" in target:
            return cls(hold, epsilon=float(target["epsilon"]), delta=float(target["delta"]), turn=turn)
        raise InputError(
            f"hold is {hold!r}, but the bundle's calibration says nothing of the kind of the operating point "
            f"{point.name!r}: calibrate it with that target, or hold another."
        )

    def thresholds(self, window: Window, flops: ArrayLike, seed: int) -> tuple[tuple[float, ...], bool]:
        """The thresholds, and whether they hold it."""
        if self.hold == "shares":
            return hold_shares(window, self.shares), True
        if self.hold == "drop":
            drop = hold_drop(window, flops, self.drop, seed=seed)
            return drop.thresholds, drop.saves
        risk = hold_risk(window, flops, self.epsilon, spent(self.delta, self.turn), seed=seed)
        return risk.thresholds, risk.feasible


def rederive(window: Window, incumbent: OperatingPoint, flops: ArrayLike, aim: Aim, *, seed: int = 0) -> Found:
    """New thresholds for an operating point, and whether they are to be proposed.

    window: its rows with all exits known, labelled or not. flops: (J,) cumulative. One half of the rows, drawn at
    random, gives the thresholds; the labelled rows of the other, thinned to equal weights, try both rules. Where the
    point promises a selective risk they say by SGR where it must begin to answer under the new rule: nowhere (+inf),
    if no threshold keeps the promise. "refuse" where nothing holds the aim, or the new rule is shown at 95% to be less
    accurate while it costs no less, else "propose". Raises InputError where either half has fewer than LEAST rows.
    """
    rows = window.take(_since_drawn(window))
    half = np.random.default_rng(seed).random(len(rows)) < 0.5
    deriving, trying = rows.take(half), rows.take(~half & rows.known)
    trying = trying.take(evenly(trying.complete_weights, seed))
    if min(len(deriving), len(trying)) < LEAST:
        raise InputError(
            f"{len(rows)} rows have all exits known: {len(deriving)} to derive thresholds from and {len(trying)} "
            f"labelled ones, even among themselves, to try them on; expected {LEAST} of each. Shadow runs and labels "
            "make more."
        )
    thresholds, holds = aim.thresholds(deriving, flops, seed)
    made = replace(
        incumbent,
        thresholds=thresholds,
        expected={},
        provenance={**incumbent.provenance, ORIGIN: {"after": float(rows.time[-1]), "hold": aim.hold}},
    )
    old, new = _Tried.of(trying, incumbent, flops), _Tried.of(trying, made, flops)
    lost, won = int((old.right & ~new.right).sum()), int((new.right & ~old.right).sum())
    fall = paired_difference_interval(lost, won, len(trying))
    numbers: dict[str, Any] = {
        "point": incumbent.name,
        "hold": aim.hold,
        "turn": aim.turn,
        "thresholds": [None if math.isinf(t) else t for t in made.thresholds],
        "rows": [len(deriving), len(trying)],
        "shares": [old.shares, new.shares],
        "flops_fraction": [old.cost, new.cost],
        "accuracy": [float(old.right.mean()), float(new.right.mean())],
        "accuracy_falls": list(fall),
    }
    promise = incumbent.provenance.get(KEEPS_PROMISE)
    if isinstance(promise, Mapping):
        level = spent(float(promise["delta"]), aim.turn)
        known = _Tried.of(deriving.take(deriving.known), made, flops)
        kept = sgr(new.odds, ~new.right, float(promise["risk"]), level, proposing=(known.odds, ~known.right))
        about: dict[str, Any] = {"level": level, "feasible": kept.feasible, "rows": len(trying)}
        about |= {"coverage": kept.coverage, "bound": kept.bound if kept.feasible else None}
        numbers["abstention"] = about
        provenance = {**made.provenance, KEEPS_PROMISE: {**promise, "method": f"sgr/{kept.method}, online", **about}}
        made = replace(made, abstain_below=kept.threshold, provenance=provenance)
    worse = fall[0] > 0 and new.cost >= old.cost
    if not holds:
        return Found("refuse", made, {**numbers, "reason": f"No thresholds are seen to hold the {aim.hold}."})
    if worse:
        reason = f"The new thresholds are less accurate, by {fall[0]:.2%} at least, and cost no less."
        return Found("refuse", made, {**numbers, "reason": reason})
    cost = f"{new.cost:.1%} of the whole network instead of {old.cost:.1%}"
    reason = f"The {aim.hold} held anew: {cost}, accuracy {new.right.mean():.2%} instead of {old.right.mean():.2%}."
    return Found("propose", made, {**numbers, "reason": reason})


@dataclass(frozen=True)
class _Tried:
    """A rule on rows with all exits known. right, odds: (n,). shares: (J,). cost: as a fraction of the whole."""

    right: Bools
    odds: Floats
    shares: list[float]
    cost: float

    @classmethod
    def of(cls, rows: Window, point: OperatingPoint, flops: ArrayLike) -> "_Tried":
        left = leave_at(rows.score, point.thresholds)
        cost = np.asarray(flops, np.float64)
        moved = replace(rows, exit=left.astype(np.int64))
        shares = (np.bincount(left, minlength=rows.exits) / len(rows)).tolist()
        return cls(moved.correct, moved.log_odds(point), shares, float(cost[left].mean() / cost[-1]))


def _since_drawn(window: Window) -> Bools:
    """(n,) complete rows since the first early leaver among them: before, only hard rows may have all exits known."""
    complete = window.complete
    drawn = complete & (window.exit < window.exits - 1)
    first = float(window.time[drawn].min()) if drawn.any() else -math.inf
    return np.asarray(complete & (window.time >= first))
