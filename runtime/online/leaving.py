"""Exit thresholds derived again from rows with all exits known: an action of its own, whatever the calibrator.

A threshold can be lowered on rows that went past it, but where it should have been higher only rows show that left
there and were run to the end in a shadow run. They weigh 1/shadow.
"""

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Floats
from offramp.runtime.errors import InputError
from offramp.runtime.online.recalibrator import evenly
from offramp.runtime.online.window import Window
from offramp.runtime.thresholds import AccuracyTarget, RiskControl, accuracy_target, pareto, risk_control, search


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
