"""Class by class: what an operating point does on the rows of each."""

from collections.abc import Sequence

import numpy as np
from offramp.runtime.arrays import Bools, Ints
from offramp.runtime.jobs.calibrating.report.classes import name_of, taken_for
from offramp.runtime.jobs.data.expected import Line, share
from offramp.runtime.jobs.data.labelled_rows import LabelledRows
from offramp.runtime.simulate import Simulation


def by_class(rows: LabelledRows, outcome: Simulation, names: Sequence[str]) -> list[Line]:
    """A line a class that some row has, by number: {"class", "name", "rows", "right", "accuracy", "full", "answered",
    "errors_answered", "coverage", "risk", "flops_fraction", "answered_so", "taken_for", "times"}, and 95% intervals
    of accuracy, coverage and risk as …_low and …_high.

    rows: labelled. full: the full model's accuracy. flops_fraction: of running the class's rows to the end.
    answered_so: rows of any class that get this answer. taken_for, times: the class's commonest wrong answer.
    """
    truth, right, kept = rows.truth, outcome.label == rows.truth, ~outcome.abstain
    full_right = rows.correct[-1]

    def count(some: Bools) -> Ints:
        return np.bincount(truth[some], minlength=rows.classes)

    there, hits, full = count(np.ones_like(right)), count(right), count(full_right)
    answered, wrong = count(kept), count(kept & ~right)
    spent = np.bincount(truth, outcome.flops.astype(np.float64), rows.classes)
    whole = np.bincount(truth, rows.flops[-1].astype(np.float64), rows.classes)
    # −1 is the answer to logits that are NaN.
    so = np.bincount(outcome.label[outcome.label >= 0], minlength=rows.classes)
    mistaken = taken_for(truth, outcome.label, ~right)
    found = []
    for k in np.flatnonzero(there).tolist():
        n, said = int(there[k]), int(answered[k])
        other, times = mistaken.get(k, (None, 0))
        found.append(
            {
                "class": k,
                "name": name_of(k, names),
                "rows": n,
                "right": int(hits[k]),
                **_share("accuracy", int(hits[k]), n),
                "full": float(full[k] / n),
                "answered": said,
                "errors_answered": int(wrong[k]),
                **_share("coverage", said, n),
                **_share("risk", int(wrong[k]), said),
                "flops_fraction": float(spent[k] / whole[k]) if whole[k] else None,
                "answered_so": int(so[k]),
                "taken_for": None if other is None else name_of(other, names),
                "times": times,
            }
        )
    return found


def worst(lines: Sequence[Line], most: int) -> list[Line]:
    """The least accurate classes first; of equally accurate ones, those with more rows."""
    return sorted(lines, key=lambda line: (line["accuracy"], -line["rows"]))[:most]


def _share(figure: str, hits: int, total: int) -> Line:
    low, high = share(hits, total) or (None, None)
    return {figure: hits / total if total else None, f"{figure}_low": low, f"{figure}_high": high}
