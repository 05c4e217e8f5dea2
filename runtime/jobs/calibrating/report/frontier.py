"""What can be had: the rules that no other beats, single exits, and the oracle, all measured on test rows."""

from collections.abc import Sequence

import numpy as np
from offramp.runtime.arrays import Floats
from offramp.runtime.jobs.calibrating.chooser import Chooser
from offramp.runtime.jobs.data.expected import Line
from offramp.runtime.jobs.data.labelled_rows import LabelledRows
from offramp.runtime.jobs.plain_json import number
from offramp.runtime.thresholds import leave_at

# More rules than this look like no more.
MOST_RULES = 200


def frontier(chooser: Chooser, test: LabelledRows) -> list[Line]:
    """{"cost", "drop", "rows", "flops_fraction", "accuracy"} a rule, cheapest first.

    cost, drop: as proposed, on that many rows, where luck has chosen. flops_fraction, accuracy: on the test rows.
    """
    rules = sorted(chooser.frontier(), key=lambda rule: (rule.cost, -rule.drop))
    at: list[int] = []
    if rules:
        at = np.unique(np.linspace(0, len(rules) - 1, min(len(rules), MOST_RULES)).round().astype(int)).tolist()
    return [
        {
            "cost": rules[k].cost,
            "drop": rules[k].drop,
            "rows": len(chooser.propose),
            **_on(test, np.asarray(rules[k].thresholds)),
        }
        for k in at
    ]


def single_exits(test: LabelledRows) -> list[Line]:
    """{"exit", "flops_fraction", "accuracy"}: everybody leaves there, and heads before it are paid as recorded."""
    return [
        {
            "exit": j,
            "flops_fraction": number(test.flops[j].mean() / test.full_flops) if len(test) else None,
            "accuracy": number(test.correct[j].mean()) if len(test) else None,
        }
        for j in range(test.exits)
    ]


def _on(test: LabelledRows, thresholds: Floats | Sequence[float]) -> Line:
    if not len(test):
        return {"flops_fraction": None, "accuracy": None}
    left, every = leave_at(test.score, thresholds), np.arange(len(test))
    return {
        "flops_fraction": number(test.flops[left, every].mean() / test.full_flops),
        "accuracy": number(test.correct[left, every].mean()),
    }
