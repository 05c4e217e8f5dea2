"""Class by class: how many rows have the label, how many of them are right, and for what the others are taken."""

from collections.abc import Sequence

import numpy as np
from offramp.runtime.arrays import Bools, Ints
from offramp.runtime.jobs.calibrating.report.measured import Measured
from offramp.runtime.jobs.data.expected import Line, share
from offramp.runtime.jobs.data.labelled_rows import LabelledRows
from offramp.runtime.jobs.plain_json import number

MOST_MISTAKES = 20


def by_class(measured: Measured, point: str, labelled: LabelledRows, names: Sequence[str] | None) -> list[Line]:
    """A line a class that some labelled row has: {"class", "name", "labelled", "share", "rows", "right", "accuracy",
    "accuracy_low", "accuracy_high", "full", "answered_so", "taken_for", "times"}.

    labelled, share: of all labelled rows. The rest is of test rows: right, accuracy: at the point; full: the full
    model's accuracy; answered_so: rows that get this answer; taken_for, times: its rows' commonest wrong answer.
    """
    test, answer = measured.test, measured.outcomes[point].label
    known = np.bincount(labelled.truth, minlength=labelled.classes)
    rows = np.bincount(test.truth, minlength=labelled.classes)
    right = np.bincount(test.truth[~measured.wrong[point]], minlength=labelled.classes)
    full = np.bincount(test.truth[test.correct[-1]], minlength=labelled.classes)
    # −1 is the answer to logits that are NaN.
    so = np.bincount(answer[answer >= 0], minlength=labelled.classes)
    taken = taken_for(test.truth, answer, measured.wrong[point])
    table = []
    for k in np.flatnonzero(known).tolist():
        low, high = share(int(right[k]), int(rows[k])) or (None, None)
        other, times = taken.get(k, (None, 0))
        table.append(
            {
                "class": k,
                "name": name_of(k, names),
                "labelled": int(known[k]),
                "share": float(known[k] / len(labelled)),
                "rows": int(rows[k]),
                "right": int(right[k]),
                "accuracy": float(right[k] / rows[k]) if rows[k] else None,
                "accuracy_low": low,
                "accuracy_high": high,
                "full": float(full[k] / rows[k]) if rows[k] else None,
                "answered_so": int(so[k]),
                "taken_for": None if other is None else name_of(other, names),
                "times": times,
            }
        )
    return table


def taken_for(truth: Ints, answer: Ints, wrong: Bools) -> dict[int, tuple[int, int]]:
    """For each class the commonest wrong answer to its rows, and how often it is given."""
    pairs, times = np.unique(np.stack([truth[wrong], answer[wrong]], axis=1), axis=0, return_counts=True)
    found: dict[int, tuple[int, int]] = {}
    for (one, other), n in sorted(zip(pairs.tolist(), times.tolist(), strict=True), key=lambda pair: pair[1]):
        found[one] = (other, n)  # the last that is written is the commonest
    return found


def confident_mistakes(measured: Measured, point: str, names: Sequence[str] | None) -> list[Line]:
    """The test rows that are answered wrongly with the most confidence: {"row", "label", "answer", "confidence",
    "exit", "full_answer"}.

    row: in the records, from 0. full_answer: the last exit's; where it agrees against the label, doubt the label.
    """
    test, outcome = measured.test, measured.outcomes[point]
    wrong = np.flatnonzero(measured.wrong[point])
    order = wrong[np.argsort(-outcome.log_odds[wrong], kind="stable")][:MOST_MISTAKES]
    return [
        {
            "row": int(test.rows[i]),
            "label": name_of(int(test.truth[i]), names),
            "answer": name_of(int(outcome.label[i]), names),
            "confidence": number(outcome.confidence[i]),
            "exit": int(outcome.exit[i]),
            "full_answer": name_of(int(test.label[-1, i]), names),
        }
        for i in order.tolist()
    ]


def name_of(k: int, names: Sequence[str] | None) -> str:
    return str(k) if names is None or not 0 <= k < len(names) else names[k]
