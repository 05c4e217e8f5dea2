"""What an operating point does on rows that decided nothing about it, with intervals."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from offramp.runtime import metrics
from offramp.runtime.arrays import Bools, Floats
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, outcome_of
from offramp.runtime.jobs.plain_json import number
from offramp.runtime.points import OperatingPoint
from offramp.runtime.simulate import Simulation

Interval = tuple[float, float]
Line = dict[str, Any]
"""One line of a table: flat, so that data frames take it."""


def known(ends: Interval) -> Interval | None:
    """An interval as tables and JSON have it: None where nothing is known."""
    return None if math.isnan(ends[0]) else ends


def share(hits: int, total: int) -> Interval | None:
    """95% interval of a proportion (`metrics.share_interval`); None without rows."""
    return known(metrics.share_interval(hits, total))


def drop_interval(full_right: Bools, right: Bools) -> Interval | None:
    """95% interval of the accuracy lost to the full model on the same rows; None without rows.

    By `metrics.paired_difference_interval`: it says something even where no row differs.
    """
    lost, won = int((full_right & ~right).sum()), int((right & ~full_right).sum())
    return known(metrics.paired_difference_interval(lost, won, len(right)))


def flops_interval(labelled: LabelledRows, point: OperatingPoint, spent: Floats) -> Interval | None:
    """95% interval of the mean FLOPs `spent` (N,) as a fraction of the full model's; None without rows.

    By `metrics.bounded_mean_interval`, between the cheapest and the dearest that a row may cost at the point's exits:
    that all rows here left at one exit doesn't show that all will. Where rows cost unequal amounts to run to the end,
    the fraction is a ratio of two means, and its rows are what each moves it by.
    """
    if not len(labelled):
        return None
    whole, full = labelled.flops[-1], labelled.full_flops
    fraction = float(spent.mean()) / full
    may = fraction + (labelled.flops[list(point.exits)] - fraction * whole) / full
    did = fraction + (spent - fraction * whole) / full
    low, high = min(float(may.min()), float(did.min())), max(float(may.max()), float(did.max()))
    return known(metrics.bounded_mean_interval(did, low, high))


def expected(labelled: LabelledRows, point: OperatingPoint, outcome: Simulation | None = None) -> dict[str, Any]:
    """The point's figures on these rows, JSON-able; None where there is nothing to measure.

    accuracy, coverage (share answered), risk (error among the answered), drop (accuracy of the full model
    minus the point's), flops, flops_fraction (of the full model's mean), exit_shares. intervals: 95%, by `share`,
    `drop_interval` and `flops_interval`.
    """
    outcome = outcome_of(labelled, point) if outcome is None else outcome
    n = len(labelled)
    right: Bools = outcome.label == labelled.truth
    kept = ~outcome.abstain
    drop = labelled.correct[-1].astype(np.float64) - right
    wrong = int((~right[kept]).sum())
    return {
        "rows": n,
        "accuracy": number(right.mean()) if n else None,
        "drop": number(drop.mean()) if n else None,
        "flops": number(outcome.flops.mean()) if n else None,
        "flops_fraction": number((outcome.flops / labelled.full_flops).mean()) if n else None,
        "coverage": number(kept.mean()) if n else None,
        "risk": wrong / int(kept.sum()) if kept.any() else None,
        "exit_shares": (np.bincount(outcome.exit, minlength=labelled.exits) / max(n, 1)).tolist(),
        "intervals": {
            "accuracy": share(int(right.sum()), n),
            "drop": drop_interval(labelled.correct[-1], right),
            "flops_fraction": flops_interval(labelled, point, outcome.flops),
            "coverage": share(int(kept.sum()), n),
            "risk": share(wrong, int(kept.sum())),
        },
    }


def flat(figures: Mapping[str, Any]) -> Line:
    """Figures as one line of a table: intervals become …_low and …_high, exit shares exit_0_share…"""
    line = {key: value for key, value in figures.items() if key not in ("intervals", "exit_shares")}
    for key, interval in figures.get("intervals", {}).items():
        line[f"{key}_low"], line[f"{key}_high"] = interval or (None, None)
    for j, leaving in enumerate(figures.get("exit_shares", ())):
        line[f"exit_{j}_share"] = leaving
    return line
