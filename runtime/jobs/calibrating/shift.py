"""The same operating points on other data: how far does each promise hold where the world has moved?

Rows labelled −1 are out of scope: no label is right, so an answer there is an error. Failure detection on
them follows the new-class protocol of FD-Shifts: out-of-scope rows count as failures and misclassified
in-scope ones are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from offramp.runtime import metrics
from offramp.runtime.arrays import Bools
from offramp.runtime.jobs.bundles.time_model import TimeModel
from offramp.runtime.jobs.calibrating.promises import estimated, held
from offramp.runtime.jobs.calibrating.time_spent import time_spent
from offramp.runtime.jobs.data.expected import Interval, Line, drop_interval, flops_interval, known
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, outcome_of, row_keys
from offramp.runtime.jobs.data.splits import SplitRows
from offramp.runtime.jobs.plain_json import number
from offramp.runtime.points import OperatingPoint


@dataclass(frozen=True)
class Elsewhere:
    """The operating points on other data: a line a point, a promise, an estimate, and what is odd about the data."""

    lines: tuple[Line, ...]
    promises: tuple[Line, ...]
    estimates: tuple[Line, ...]
    notes: tuple[str, ...]


def elsewhere(
    points: Mapping[str, OperatingPoint],
    rows: SplitRows,
    shifts: Mapping[str, LabelledRows],
    times: TimeModel | None = None,
) -> Elsewhere:
    """Figures and promises on the shifts, and on the rows that have no label if there are any."""
    lines: list[Line] = []
    promises: list[Line] = []
    estimates: list[Line] = []
    notes = []
    for name, moved in shifts.items():
        seen = int(np.isin(row_keys(moved), rows.made_from).sum())
        if seen:
            notes.append(
                f"shift {name!r}: {seen} of its {len(moved)} rows were calibrated on, so its figures are better "
                "than new rows would give."
            )
    others = ({"unlabelled": rows.unlabelled} if len(rows.unlabelled) else {}) | dict(shifts)
    for name, moved in others.items():
        for point_name, point in points.items():
            line = _line(point, rows.test, moved) | time_spent(moved, point, times)
            where = {"shift": name, "point": point_name}
            lines.append(where | line)
            promises += [where | promise for promise in held(point, line)]
            estimates += [where | estimate for estimate in estimated(point, line)]
    return Elsewhere(tuple(lines), tuple(promises), tuple(estimates), tuple(notes))


def _line(point: OperatingPoint, test: LabelledRows, moved: LabelledRows) -> Line:
    """test: the labelled rows that the point was reported on. moved: the other data, −1 where out of scope."""
    at_home, away = outcome_of(test, point), outcome_of(moved, point)
    n = len(moved)
    outside = moved.truth < 0
    right = (away.label == moved.truth) & ~outside
    kept = ~away.abstain
    inside = ~outside
    whole = float(moved.flops[-1].mean()) if n else float("nan")
    abstained, at_home_abstained = float(away.abstain.mean()) if n else None, float(at_home.abstain.mean())
    # Data with nothing in scope is mixed with the test rows: a score must tell the two apart.
    alone = bool(inside.any())
    score = away.log_odds if alone else np.concatenate([at_home.log_odds, away.log_odds])
    label = away.label if alone else np.concatenate([at_home.label, away.label])
    truth = moved.truth if alone else np.concatenate([test.truth, moved.truth])
    answered = int(kept.sum()) + int((~at_home.abstain).sum())
    errors = int((~right)[kept].sum()) + int(((at_home.label != test.truth) & ~at_home.abstain).sum())
    fails = metrics.failures(np.maximum(label, 0), truth)
    ranking = metrics.ranking_intervals(score[fails.kept], fails.error)
    return {
        "rows": n,
        "out_of_scope": int(outside.sum()),
        "accuracy": number(right[inside].mean()) if inside.any() else None,
        **_drop(moved, right, inside),
        "flops_fraction": number(away.flops.mean() / whole) if n and whole else None,
        **_ends("flops_fraction", flops_interval(moved, point, away.flops) if whole else None),
        "coverage": number(kept.mean()) if n else None,
        "risk": number((~right)[kept].mean()) if kept.any() else None,
        "answered": int(kept.sum()),
        "errors_answered": int((~right)[kept].sum()),
        "risk_mixed_with_test": errors / answered if answered else None,
        "abstained": abstained,
        "abstained_on_test": at_home_abstained,
        "abstention_ratio": abstained / at_home_abstained if abstained is not None and at_home_abstained else None,
        "protocol": "new-class" if outside.any() else "same classes",
        "auroc_f": number(metrics.auroc_f(score[fails.kept], fails.error)),
        "aurc": number(metrics.aurc(score[fails.kept], fails.error)),
        **_ends("auroc_f", known(ranking.auroc_f)),
        **_ends("aurc", known(ranking.aurc)),
        "confidence": number(away.confidence.mean()) if n else None,
        **{f"exit_{j}_share": float((away.exit == j).mean()) if n else None for j in range(moved.exits)},
    }


def _ends(figure: str, interval: Interval | None) -> Line:
    low, high = interval or (None, None)
    return {f"{figure}_low": low, f"{figure}_high": high}


def _drop(moved: LabelledRows, right: Bools, inside: Bools) -> Line:
    full_right, right = moved.correct[-1][inside], right[inside]
    drop = full_right.astype(np.float64) - right
    return {"drop": number(drop.mean()) if len(drop) else None, **_ends("drop", drop_interval(full_right, right))}
