"""What a rule must be allowed to lose, and why a drop that was asked for can't be had."""

import math
from collections.abc import Sequence

import numpy as np
from offramp.runtime.jobs.calibrating.choice import MARGIN
from offramp.runtime.jobs.calibrating.targets import percent, percent_above
from offramp.runtime.jobs.data.labelled_rows import LabelledRows
from offramp.runtime.thresholds import Rule, leave_at
from offramp.runtime.thresholds.searching import EQUAL_COST

# Who saves less costs as much as the full model, within the tolerance, and that may be the simplest of them.
LEAST_SAVED = 1 - 1 / (1 + EQUAL_COST)


def least_drop(rule: Rule, bearing: LabelledRows | None) -> float:
    """What the rule must be allowed: its drop with a margin in hand, and no less than other rows say, if there are any.

    The cheapest of many rules owes its place to luck, too. In 17% of 40 draws of 3,000 rows of CLINC150 the drop
    was beyond 0.5% on the other 4,500, by 0.30 points at most; with this look at certify, whose rows proposed
    nothing, in 10%, by 0.17, for 1% more FLOPs.
    """
    least = rule.drop_in_hand(MARGIN)
    return least if bearing is None else max(least, _lost(rule, bearing)[0])


def drop_denied(
    rules: Sequence[Rule], propose: LabelledRows, bearing: LabelledRows | None, drop: float, cost: str
) -> str:
    """Why a drop can be had only from the full model: which rows say so, what was seen there, and what would help.

    rules: what was chosen from, on `propose`. bearing: the certify rows, where they must bear a drop out. cost: what is
    saved, in words. Each drop that it names as too large is above the one asked for, as printed; the smallest, asked
    for as printed, is kept by a rule that saves.
    """
    said = f"a drop of at most {percent(drop)} can be had only from the full model: "
    little = f"{LEAST_SAVED:.2%} of the {cost}"
    saving = [rule for rule in rules if rule.cost * (1 + EQUAL_COST) < 1]
    if not saving:
        early = any(rule.cost < 1 for rule in rules)
        return f"{said}no rule {f'saves more than {little}' if early else 'leaves early'}."
    closest = min(least_drop(rule, bearing) for rule in saving)
    if closest >= 1:
        return f"{said}{_rows(propose)} of fit and select don't show of any rule that it loses less than everything."
    if any(rule.cost < 1 and least_drop(rule, bearing) <= drop + 1e-12 for rule in rules):
        said += f"what keeps it saves no more than {little}, which isn't worth a rule; "
    smallest = percent_above(closest, drop)
    within = [_lost(rule, bearing) for rule in saving if bearing and rule.drop_in_hand(MARGIN) <= drop + 1e-12]
    if bearing is None or not within:
        both = "" if bearing is None else f" and {_rows(bearing)} of certify"
        return (
            f"{said}from {_rows(propose)} of fit and select{both} the smallest drop that saves more than {little} is "
            f"{smallest}, with {MARGIN} standard errors in hand. A larger drop would help, or more rows."
        )
    lost, error = min(within)
    return (
        f"{said}rules that save more than {little} keep it on the {_rows(propose)} of fit and select, but on the "
        f"{_rows(bearing)} of certify, which decided nothing, they lose {percent_above(lost, drop)} or more (standard "
        f"error {error:.2%}). The smallest drop that saves more on both is {smallest}. A larger drop would help, or "
        "more rows, which tell a loss from chance."
    )


def _lost(rule: Rule, rows: LabelledRows) -> tuple[float, float]:
    """Accuracy lost on these rows, and a standard error of it that counts one row more than seen to differ."""
    left = leave_at(rows.score, rule.thresholds)
    lost = rows.correct[-1].astype(np.float64) - rows.correct[left, np.arange(len(rows))]
    return float(lost.mean()), math.sqrt(float((lost**2).sum()) + 1) / len(rows)


def _rows(rows: LabelledRows) -> str:
    return f"{len(rows)} row{'' if len(rows) == 1 else 's'}"
