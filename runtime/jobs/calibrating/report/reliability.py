"""Reliability of the operating points' confidence: accuracy by bin, with how many rows and how sure it is."""

from typing import Any

from offramp.runtime import metrics
from offramp.runtime.arrays import Floats
from offramp.runtime.jobs.calibrating.report.measured import Measured
from offramp.runtime.jobs.data.expected import Line, share
from offramp.runtime.scores import sigmoid

BINS = 15


def confidences(measured: Measured, point: str) -> list[tuple[str, Floats]]:
    """Before and after calibration, (N,) each; alone where no calibrator was fitted."""
    outcome = measured.outcomes[point]
    if not measured.points[point].calibrators:
        return [("uncalibrated", outcome.confidence)]
    return [("before", sigmoid(outcome.score)), ("after", outcome.confidence)]


def reliability(measured: Measured) -> list[dict[str, Any]]:
    """{"point", "when", "rows", "ece", "bins": [{"from", "to", "rows", "confidence", "accuracy", …_low, …_high}]}.

    Bins are of equal width; empty ones are left out.
    """
    return [
        {
            "point": name,
            "when": when,
            "rows": len(measured.test),
            "ece": float(metrics.ece(confidence, ~measured.wrong[name], BINS)),
            "bins": _bins(confidence, measured, name),
        }
        for name in (measured.points if len(measured.test) else ())
        for when, confidence in confidences(measured, name)
    ]


def _bins(confidence: Floats, measured: Measured, point: str) -> list[Line]:
    found = metrics.reliability(confidence, ~measured.wrong[point], BINS)
    table = []
    for k, rows in enumerate(found.count.tolist()):
        if not rows:
            continue
        low, high = share(round(float(found.accuracy[k]) * rows), rows) or (None, None)
        table.append(
            {
                "from": float(found.edges[k]),
                "to": float(found.edges[k + 1]),
                "rows": rows,
                "confidence": float(found.confidence[k]),
                "accuracy": float(found.accuracy[k]),
                "accuracy_low": low,
                "accuracy_high": high,
            }
        )
    return table
