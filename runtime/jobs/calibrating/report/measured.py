"""The operating points on the test rows, walked through once for everything that the report shows."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from offramp.runtime.arrays import Bools
from offramp.runtime.bundle import encode_number
from offramp.runtime.jobs.calibrating.result import Calibrated
from offramp.runtime.jobs.data.expected import Line
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, outcome_of
from offramp.runtime.points import OperatingPoint
from offramp.runtime.scores import sigmoid
from offramp.runtime.simulate import Simulation


@dataclass(frozen=True)
class Measured:
    """The new points by name, what each does on the test rows, and where its answer is wrong, (N,)."""

    test: LabelledRows
    points: Mapping[str, OperatingPoint]
    outcomes: Mapping[str, Simulation]
    wrong: Mapping[str, Bools]

    @classmethod
    def of(cls, result: Calibrated) -> "Measured":
        test, points = result.test, result.chosen.points
        outcomes = {name: outcome_of(test, point) for name, point in points.items()}
        return cls(test, points, outcomes, {name: one.label != test.truth for name, one in outcomes.items()})

    def counts(self) -> list[Line]:
        """A line a point: how many test rows are right, answered, wrong among those, lost and gained against the full
        model, and leave at each exit. Every share on the page is one of these over another."""
        table = []
        full = self.test.correct[-1]
        for name, outcome in self.outcomes.items():
            wrong, kept = self.wrong[name], ~outcome.abstain
            table.append(
                {
                    "point": name,
                    "rows": len(self.test),
                    "right": int((~wrong).sum()),
                    "wrong": int(wrong.sum()),
                    "answered": int(kept.sum()),
                    "errors_answered": int((wrong & kept).sum()),
                    "abstained": int((~kept).sum()),
                    "lost": int((full & wrong).sum()),
                    "gained": int((~full & ~wrong).sum()),
                    **{
                        f"left_at_exit_{j}": int(n)
                        for j, n in enumerate(np.bincount(outcome.exit, minlength=self.test.exits))
                    },
                }
            )
        return table

    def thresholds(self) -> list[Line]:
        """A line a point: its threshold at each exit and its abstain_below, as calibration.json has them.

        abstain_below_confidence: the same as a probability, None where that is always or never.
        """
        return [
            {
                "point": name,
                **{f"exit_{j}": encode_number(t) for j, t in enumerate(point.thresholds)},
                "abstain_below": encode_number(point.abstain_below),
                "abstain_below_confidence": _finite(point.abstain_below),
            }
            for name, point in self.points.items()
        ]


def _finite(log_odds: float) -> float | None:
    """As a probability; float32's lowest number is as good as −inf."""
    return float(sigmoid(np.float64(log_odds))) if abs(log_odds) < 1e30 else None
