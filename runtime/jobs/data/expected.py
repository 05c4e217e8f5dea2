"""What an operating point does on rows that decided nothing about it, with intervals."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from offramp.runtime.arrays import Bools, Floats
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, outcome_of
from offramp.runtime.jobs.plain_json import number
from offramp.runtime.points import OperatingPoint
from offramp.runtime.simulate import Simulation

# Two-sided 95%.
Z = 1.959963984540054

Interval = tuple[float, float]
Line = dict[str, Any]
"""One line of a table: flat, so that data frames take it."""


def wilson(hits: int, total: int) -> Interval | None:
    """Wilson's 95% interval of a proportion; None without rows."""
    if not total:
        return None
    p, z2 = hits / total, Z * Z
    centre = (p + z2 / (2 * total)) / (1 + z2 / total)
    half = Z / (1 + z2 / total) * math.sqrt(p * (1 - p) / total + z2 / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Floats) -> Interval | None:
    """Normal 95% interval of a mean; None with fewer than two rows."""
    if len(values) < 2:
        return None
    half = Z * float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - half, float(values.mean()) + half


def expected(labelled: LabelledRows, point: OperatingPoint, outcome: Simulation | None = None) -> dict[str, Any]:
    """The point's figures on these rows, JSON-able; None where there is nothing to measure.

    accuracy, coverage (share answered), risk (error among the answered), drop (accuracy of the full model
    minus the point's), flops, flops_fraction (of the full model's mean), exit_shares. intervals: 95%, Wilson's
    for shares, normal for means and for the paired drop.
    """
    outcome = outcome_of(labelled, point) if outcome is None else outcome
    n = len(labelled)
    right: Bools = outcome.label == labelled.truth
    kept = ~outcome.abstain
    spent = outcome.flops / labelled.full_flops
    drop = labelled.correct[-1].astype(np.float64) - right
    wrong = int((~right[kept]).sum())
    return {
        "rows": n,
        "accuracy": number(right.mean()) if n else None,
        "drop": number(drop.mean()) if n else None,
        "flops": number(outcome.flops.mean()) if n else None,
        "flops_fraction": number(spent.mean()) if n else None,
        "coverage": number(kept.mean()) if n else None,
        "risk": wrong / int(kept.sum()) if kept.any() else None,
        "exit_shares": (np.bincount(outcome.exit, minlength=labelled.exits) / max(n, 1)).tolist(),
        "intervals": {
            "accuracy": wilson(int(right.sum()), n),
            "drop": mean_interval(drop),
            "flops_fraction": mean_interval(spent),
            "coverage": wilson(int(kept.sum()), n),
            "risk": wilson(wrong, int(kept.sum())),
        },
    }


def flat(figures: Mapping[str, Any]) -> Line:
    """Figures as one line of a table: intervals become …_low and …_high, exit shares exit_0_share…"""
    line = {key: value for key, value in figures.items() if key not in ("intervals", "exit_shares")}
    for key, interval in figures.get("intervals", {}).items():
        line[f"{key}_low"], line[f"{key}_high"] = interval or (None, None)
    for j, share in enumerate(figures.get("exit_shares", ())):
        line[f"exit_{j}_share"] = share
    return line
