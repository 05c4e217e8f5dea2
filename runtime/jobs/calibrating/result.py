"""What the calibration job found, stage by stage."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from offramp.runtime.calibration_file import Calibration
from offramp.runtime.errors import OfframpError
from offramp.runtime.jobs.calibrating.choose_points import Chosen
from offramp.runtime.jobs.calibrating.comparison import Comparison
from offramp.runtime.jobs.calibrating.promises import estimated, held, overrun
from offramp.runtime.jobs.calibrating.shift import Elsewhere
from offramp.runtime.jobs.calibrating.time_spent import time_spent
from offramp.runtime.jobs.data.expected import Line, flat
from offramp.runtime.jobs.data.labelled_rows import LabelledRows
from offramp.runtime.jobs.data.splits import Split, SplitRows
from offramp.runtime.points import OperatingPoint


@dataclass(frozen=True)
class Calibrated:
    """The new calibration, with what each stage found.

    Tables are lists of flat dicts, one a line: `pandas.DataFrame(result.points)`. said: what is odd about the data,
    and the verdict of the routing's audit. classes: their names, where there is a bundle. files: report.html and
    metrics.json. kept: operating points of the calibration in force that weren't asked for again; they are in
    `calibration` and in `points`, and nothing here measured them. written: the folder in history/, None until it
    is published. about: model, date, machine and where times come from (see `about`).
    """

    calibration: Calibration
    rows: SplitRows
    chosen: Chosen
    elsewhere: Elsewhere
    comparison: Comparison
    said: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    kept: Mapping[str, OperatingPoint] = field(default_factory=dict)
    written: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def split(self) -> Split:
        """Which of the labelled rows are of which part."""
        return self.rows.split

    @property
    def test(self) -> LabelledRows:
        """The rows that decided nothing: every figure comes from them."""
        return self.rows.test

    @property
    def provenance(self) -> Mapping[str, Any]:
        return self.calibration.provenance

    @cached_property
    def points(self) -> list[Line]:
        """A line an operating point: its figures on the test rows, a kept one's on its own version's.

        Milliseconds where times are known: of one row by itself, on the machine that they were measured on.
        """
        new, times = self.chosen.points, self.chosen.chooser.times
        return [
            {"point": name, **flat(point.expected), **(time_spent(self.test, point, times) if name in new else {})}
            for name, point in self.calibration.points.items()
        ]

    @property
    def promises(self) -> list[Line]:
        """A line a promise of a new point, against what the test rows showed (see `held`)."""
        return self._judged(held)

    @property
    def estimates(self) -> list[Line]:
        """A line a target of a new point that is no promise, against what the test rows showed (see `estimated`)."""
        return self._judged(estimated)

    @property
    def overruns(self) -> list[str]:
        """A sentence a new point that lost more on the test rows than was asked for, which is no promise."""
        said = [(line["point"], overrun(line, len(self.test))) for line in self.estimates]
        return [f"{point}: {sentence}" for point, sentence in said if sentence]

    def _judged(self, judge: Callable[[OperatingPoint, Line], list[Line]]) -> list[Line]:
        return [
            {"point": line["point"], **found}
            for line in self.points
            if (point := self.chosen.points.get(line["point"])) is not None
            for found in judge(point, line)
        ]

    @property
    def tried(self) -> list[Line]:
        """Calibrators, a line each by point and exits."""
        return list(self.chosen.tried)

    @property
    def compared(self) -> list[Line]:
        """A line a figure of a point: against the calibration in force."""
        return [asdict(one) for one in self.comparison.compared]

    @property
    def shifts(self) -> list[Line]:
        """A line a point on other data."""
        return list(self.elsewhere.lines)

    @property
    def shift_promises(self) -> list[Line]:
        """A line a promise on other data."""
        return list(self.elsewhere.promises)

    @property
    def shift_estimates(self) -> list[Line]:
        """A line a target that is no promise, on other data."""
        return list(self.elsewhere.estimates)

    @property
    def unmet(self) -> list[str]:
        """Targets that can't be kept, with the closest that can."""
        return list(self.chosen.unmet)

    @property
    def refused(self) -> list[str]:
        """Why the new calibration mustn't replace the one in force."""
        return list(self.comparison.refused)

    @property
    def notes(self) -> list[str]:
        """What is odd about the data and the calibration in force."""
        return [*self.said, *self.elsewhere.notes, *self.comparison.notes]


class CalibrationRefused(OfframpError):
    """The new calibration is significantly worse than the one in force, so nothing was replaced."""

    def __init__(self, result: Calibrated) -> None:
        first, *others = result.refused
        more = f"; and {len(others)} more" if others else ""
        super().__init__(f"the calibration in force is better, so it stays: {first}{more}.")
        self.result = result
