"""What the calibration in force promises, as a bundle's model card says it."""

from offramp.runtime.calibration_file import Calibration
from offramp.runtime.jobs.calibrating.promises import held
from offramp.runtime.jobs.calibrating.report.headline import sentence
from offramp.runtime.jobs.data.expected import flat
from offramp.runtime.points import MEASURED, OperatingPoint


def promises_of(calibration: Calibration) -> list[str]:
    """Lines of Markdown: a sentence an operating point, as it was measured on rows that decided nothing."""
    lines = [f"Calibration {calibration.version}, of {calibration.created or 'an unknown time'}:", ""]
    return lines + [f"- **{name}**: {_sentence(point)}" for name, point in calibration.points.items()]


def _sentence(point: OperatingPoint) -> str:
    """What is measured and promised is free-form in the file: what another program put there may be anything."""
    figures = {"point": point.name, **dict.fromkeys((*MEASURED, "drop")), **flat(point.expected)}
    try:
        said = sentence(figures, [{"point": point.name, **one} for one in held(point, figures)])
        rows = f" Measured on {figures['rows']:,} rows." if figures.get("rows") else ""
    except (TypeError, ValueError, AttributeError, KeyError):
        return "What it was measured to do can't be read."
    return f"{said}{rows}"
