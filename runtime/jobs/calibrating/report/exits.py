"""Figures by exit: each on all test rows, and as the operating points use it. All JSON-able."""

import numpy as np
from offramp.runtime import metrics, scores
from offramp.runtime.arrays import Array, Ints
from offramp.runtime.calibration import Calibrator, get
from offramp.runtime.jobs.data.expected import Line
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, evenly, outcome_of
from offramp.runtime.jobs.plain_json import number
from offramp.runtime.points import OperatingPoint
from offramp.runtime.simulate import Simulation

# Tables by class read whole probability vectors: of this many values at most.
CLASSWISE_VALUES = 1 << 22
# A class is called over- or under-confident from this many rows on.
LEAST_OF_A_CLASS = 5
MOST_CLASSES = 5
NONE = (float("nan"), float("nan"))


def exits_alone(test: LabelledRows, times: tuple[float, ...] | None = None) -> list[Line]:
    """Each exit on all test rows, uncalibrated, whether or not a row would come that far.

    …_low and …_high: 95% intervals, None where the figure isn't defined.
    """
    eefp = metrics.eefp(test.score, test.correct) if len(test) else np.full(test.exits, np.nan)
    leave_here = metrics.leave_here(test.correct)
    table = []
    for j in range(test.exits):
        wrong, confidence = ~test.correct[j], scores.sigmoid(test.score[j])
        ranking = metrics.ranking_intervals(test.score[j], wrong)
        table.append(
            {
                "exit": j,
                "rows": len(test),
                "accuracy": number(test.correct[j].mean()) if len(test) else None,
                "flops": number(test.flops[j].mean()) if len(test) else None,
                "ms": None if times is None else times[j],
                "eefp": number(eefp[j]),
                "auroc_f": number(metrics.auroc_f(test.score[j], wrong)),
                "aurc": number(metrics.aurc(test.score[j], wrong)),
                "augrc": number(metrics.augrc(test.score[j], wrong)),
                "ece": number(metrics.ece(confidence, test.correct[j])),
                **_ends("accuracy", metrics.share_interval(int(test.correct[j].sum()), len(test))),
                **_ends("eefp", metrics.auroc_interval(test.score[j], leave_here[j])),
                **_ranked(ranking),
                **_ends("ece", metrics.ece_interval(confidence, test.correct[j])),
            }
        )
    return table


def _ends(figure: str, interval: tuple[float, float]) -> Line:
    return {f"{figure}_low": number(interval[0]), f"{figure}_high": number(interval[1])}


def _ranked(found: metrics.RankingIntervals) -> Line:
    return _ends("auroc_f", found.auroc_f) | _ends("aurc", found.aurc) | _ends("augrc", found.augrc)


def exits_at(name: str, point: OperatingPoint, test: LabelledRows, outcome: Simulation | None = None) -> list[Line]:
    """An operating point's exits, on the test rows that reach each; confidence before and after calibration.

    …_low and …_high: 95% intervals. n_confce_corr and n_lince_cw have none, so theirs are None: what they estimate
    grows with the number of rows and changes with the bins, so they rank calibrators on the same rows and mean
    nothing alone. How sure such a comparison is stands in `tried`. ECE's is of all such rows, so it can lie below
    the ECE that is seen, which noise lifts.
    """
    outcome = outcome_of(test, point) if outcome is None else outcome
    table = []
    for j in point.exits:
        reach, leave = np.flatnonzero(outcome.exit >= j), outcome.exit == j
        calibrator = point.calibrator(j)
        line: Line = {
            "point": name,
            "exit": j,
            "share": number(leave.mean()) if len(test) else None,
            "reached_by": len(reach),
            "accuracy": number((outcome.label == test.truth)[leave].mean()) if leave.any() else None,
            **_ends(
                "accuracy",
                metrics.share_interval(int((outcome.label == test.truth)[leave].sum()), int(leave.sum())),
            ),
            "confidence": number(outcome.confidence[leave].mean()) if leave.any() else None,
            "calibrator": calibrator.name,
        }
        if len(reach):
            line |= _calibration_of(calibrator, j, test, reach)
        table.append(line)
    return table


def _calibration_of(calibrator: Calibrator, j: int, test: LabelledRows, reach: Ints) -> Line:
    rows = reach[classwise_rows(len(reach), test.classes)]
    z, y, aux = test.logits[j][rows], test.truth[rows], test.aux(j, rows)
    raw, label = test.score[j, rows], test.label[j, rows]
    right = label == y
    line: Line = {"judged_on": len(rows)}
    odds = calibrator.score({**aux, "logits": z, "score": raw, "label": label})
    for suffix, log_odds, one in (("", odds, calibrator), ("_before", raw, get("identity"))):
        if suffix and calibrator.name == "identity":
            line |= {f"{key}_before{end}": line[f"{key}{end}"] for key in _BEFORE for end in ("", "_low", "_high")}
            continue
        confidence = scores.sigmoid(log_odds)
        p = one.apply(z, aux)
        found: Line = {
            "ece": metrics.ece(confidence, right),
            "n_confce_corr": len(rows) * metrics.confce_corr(confidence, right),
            "n_lince_cw": len(rows) * metrics.lince_classwise(p, y),
            "mcs": metrics.mcs(confidence, right),
        }
        if not suffix:
            found |= {
                "ws_mcs": metrics.ws_mcs(p, y),
                "auroc_f": metrics.auroc_f(log_odds, ~right),
                "aurc": metrics.aurc(log_odds, ~right),
                "augrc": metrics.augrc(log_odds, ~right),
            }
        line |= {f"{key}{suffix}": number(value) for key, value in found.items()}
        line |= _ends(f"ece{suffix}", metrics.ece_interval(confidence, right))
        line |= _ends(f"mcs{suffix}", metrics.bounded_mean_interval(confidence - right, -1.0, 1.0, draws=2000))
        for without in ("n_confce_corr", "n_lince_cw"):
            line |= _ends(f"{without}{suffix}", NONE)
        if not suffix:
            line |= _ranked(metrics.ranking_intervals(log_odds, ~right)) | _by_class(p, y, label)
    return line


def classwise_rows(rows: int, classes: int) -> Ints:
    """Places of as many rows as tables and pictures by class may read."""
    return evenly(rows, max(500, CLASSWISE_VALUES // classes))


_BEFORE = ("ece", "n_confce_corr", "n_lince_cw", "mcs")


def _by_class(p: Array, y: Ints, label: Ints) -> Line:
    """The classes whose answers are most over- and under-confident: (class, MCS, rows), by predicted class."""
    gap = metrics.cw_mcs(p, y, by="predicted")
    count = np.bincount(label, minlength=p.shape[1])
    known = np.flatnonzero(~np.isnan(gap) & (count >= LEAST_OF_A_CLASS))
    order = known[np.argsort(-gap[known], kind="stable")]

    def named(classes: Ints) -> list[list[float]]:
        return [[int(k), round(float(gap[k]), 4), int(count[k])] for k in classes]

    return {
        "over_confident": named(order[gap[order] > 0][:MOST_CLASSES]),
        "under_confident": named(order[::-1][gap[order[::-1]] < 0][:MOST_CLASSES]),
        "over_confident_share": float((gap[known] > 0).mean()) if len(known) else None,
    }
