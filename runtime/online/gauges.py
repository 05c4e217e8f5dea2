"""The figures of a window: what the offline functions give on its rows, weighed for how those were sampled."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from offramp.runtime import metrics, scores
from offramp.runtime.arrays import Floats
from offramp.runtime.online.bound import betting_bound, tally
from offramp.runtime.online.window import Window
from offramp.runtime.points import OperatingPoint

COVERAGES = (0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Gauges:
    """Figures of one operating point; NaN where nothing is known.

    rows, labelled, complete: rows, those with a label, and those with one and all exits known. coverage: share that
    wasn't abstained. selective_risk: share wrong of the labelled, answered rows, as they were answered.
    selective_risk_bound: of those since the version began (see `bound.betting_bound`). aurc, risk_at_coverage (by
    coverage): of the labelled rows, ranked by the confidence that the point in force gives them. confce_corr, ece,
    eefp: (J,) by exit; the first two on labelled rows that reached it, with its calibrated confidence; eefp of the raw
    score, which gates compare, on the complete rows.
    """

    rows: int
    labelled: int
    complete: int
    coverage: float
    selective_risk: float
    selective_risk_bound: float
    aurc: float
    risk_at_coverage: dict[float, float]
    confce_corr: tuple[float, ...]
    ece: tuple[float, ...]
    eefp: tuple[float, ...]


def measure(
    window: Window,
    point: OperatingPoint,
    *,
    version: int = 0,
    delta: float = 0.05,
    coverages: Sequence[float] = COVERAGES,
) -> Gauges:
    """All gauges of one operating point's rows; `version` is the one in force, whose rows the bound is about.

    A labelled row weighs 1/asked, a complete one 1/(asked·shadow). What isn't labelled weighs nothing: these are right
    only where labels come whether or not the answer was wrong.
    """
    known = window.take(window.known)
    w = weights_or_none(known.weights)
    wrong = ~known.correct
    answered = known.answered
    odds = known.log_odds(point)
    gap = [_gap(known, j, point) for j in range(window.exits)]
    whole = known.take(known.complete)
    right = whole.tops == whole.label
    eefp = metrics.eefp(whole.score.astype(np.float64), right, weights=weights_or_none(whole.complete_weights))
    weight, n, k = tally(known.since(version))
    return Gauges(
        rows=len(window),
        labelled=len(known),
        complete=len(whole),
        coverage=float((~window.abstained).mean()) if len(window) else float("nan"),
        selective_risk=float(np.average(wrong[answered], weights=known.weights[answered]))
        if answered.any()
        else float("nan"),
        selective_risk_bound=float(betting_bound(n, k, delta, weights=weight)),
        aurc=metrics.aurc(odds, wrong, weights=w),
        risk_at_coverage={c: metrics.risk_at_coverage(odds, wrong, c, weights=w) for c in coverages},
        confce_corr=tuple(one[0] for one in gap),
        ece=tuple(one[1] for one in gap),
        eefp=tuple(eefp.tolist()),
    )


def _gap(known: Window, exit: int, point: OperatingPoint) -> tuple[float, float]:
    """ConfCE^corr and ECE of an exit's confidence on the rows that reached it."""
    rows = known.take(known.reached(exit) & ~np.isnan(known.score[exit]))
    confidence = scores.sigmoid(rows.log_odds_at(exit, point.calibrator(exit), np.arange(len(rows))))
    right = rows.tops[exit] == rows.label
    w = weights_or_none(rows.weights)
    return metrics.confce_corr(confidence, right, weights=w), metrics.ece(confidence, right, weights=w)


def weights_or_none(weights: Floats) -> Floats | None:
    """Weights in units of rows, Σw = n; None where all are equal, which is the plain figure to the last bit."""
    if not len(weights) or weights.min() == weights.max():
        return None
    return np.asarray(weights * len(weights) / weights.sum())
