"""What an operating point promises or was chosen to keep, and whether rows that decided nothing bear that out.

A promise was tested on certifying rows and holds with probability 1 − delta. A budget, a time or a drop "as measured"
is an estimate: it was kept on the rows that it was chosen on, with errors in hand, and nobody tested it since.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN
from typing import Any

from offramp.runtime.jobs.calibrating.targets import percent, percent_above
from offramp.runtime.jobs.data.expected import Interval, Line, share
from offramp.runtime.points import OperatingPoint


@dataclass(frozen=True)
class Promised:
    """At most this: risk, error among the answered; drop, accuracy lost to the full model; share, of its cost.

    None where nothing is asked for; what was asked for and can't be kept isn't.
    """

    risk: float | None
    drop: float | None
    share: float | None


def promised(point: OperatingPoint) -> Promised:
    """What calibration asked of a point, measured or guaranteed, as its provenance says."""
    target, abstention = _asked(point)
    risk = abstention.get("risk") if abstention.get("feasible", True) else None
    found = (risk, target.get("drop", target.get("epsilon")), target.get("share"))
    return Promised(*(None if value is None else float(value) for value in found))


def held(point: OperatingPoint, line: Mapping[str, Any]) -> list[Line]:
    """Each promise of a point against what was seen.

    {"promise", "target", "delta", "level", "test", "tested", "rows", "answered", "errors", "lost", "gained", "bound",
    "seen", "excess", "low", "high", "held"}. level: the part of delta that this test had; tested: rules tested for it;
    rows, answered, errors, lost, gained: of the certifying rows, None where it isn't about that; bound: upper
    confidence limit from them.
    held: True where all of the 95% interval is within the target, False where all of it is beyond, None where these
    rows show neither, or nothing was seen.
    """
    target, abstention = _asked(point)
    found = []
    if abstention.get("risk") is not None and abstention.get("feasible", True):
        found.append(
            {
                "promise": "risk among the answered",
                **_judged(float(abstention["risk"]), line, "risk"),
                **_tested(abstention, abstention.get("delta"), abstention.get("level"), abstention.get("tested_for")),
            }
        )
    if target.get("epsilon") is not None and point.provenance.get("feasible", True):
        delta = target.get("delta")
        found.append(
            {
                "promise": "accuracy drop",
                **_judged(float(target["epsilon"]), line, "drop"),
                **_tested(point.provenance, delta, delta, point.provenance.get("tested")),  # a fixed sequence
            }
        )
    return found


def estimated(point: OperatingPoint, line: Mapping[str, Any]) -> list[Line]:
    """Each target of a point that is no promise: {"estimate", "target", "kept_by", "seen", "excess", "low", "high",
    "within"}, with within as `held` has it. What was asked for and can't be kept is there as well: met says so."""
    target, _ = _asked(point)
    by_time = "ms_fraction" in point.provenance
    budget = ("time", "ms_fraction") if by_time else ("FLOPs", "flops_fraction")
    kinds = [
        ("share", *budget, "the upper 95% limit of the mean cost is at most this"),
        ("ms", "milliseconds a row", "ms", "the mean of the time model is at most this"),
        ("drop", "accuracy drop", "drop", "the drop with 1.645 standard errors in hand is at most this"),
    ]
    found = []
    for key, name, figure, kept_by in kinds:
        if target.get(key) is None:
            continue
        judged = _judged(float(target[key]), line, figure)
        found.append(
            {
                "estimate": name,
                "met": bool(point.provenance.get("met", True)),
                "kept_by": kept_by,
                "chosen_on": point.provenance.get("rows"),
                "within": judged.pop("held"),
                **judged,
            }
        )
    return found


def overrun(line: Mapping[str, Any], rows: int) -> str | None:
    """What to say of an estimate, as `estimated` has it, whose drop on so many rows is above what was asked for."""
    seen, target = line["seen"], line["target"]
    if line["estimate"] != "accuracy drop" or seen is None or seen <= target + 1e-12:
        return None
    noise = "beyond" if line["within"] is False else "within"
    lost = percent_above(seen, target, digits=3, rounding=ROUND_HALF_EVEN)
    return (
        f"its accuracy drop was {lost} on {rows:,} row{'' if rows == 1 else 's'} that decided nothing, more than the "
        f"{percent(target)} asked for, {noise} their noise; `offramp calibrate … --guarantee` promises a drop."
    )


def _asked(point: OperatingPoint) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return point.provenance.get("target") or {}, point.provenance.get("abstention") or {}


def _tested(origin: Mapping[str, Any], delta: Any, level: Any, tested: Any) -> Line:
    counts = {key: origin.get(key) for key in ("rows", "answered", "errors", "lost", "gained", "bound")}
    return {"delta": delta, "level": level, "test": origin.get("method"), "tested": tested, **counts}


def _judged(most: float, line: Mapping[str, Any], figure: str) -> Line:
    seen, interval = line.get(figure), _interval(line, figure)
    low, high = interval or (None, None)
    ok: bool | None = None
    if low is not None and high is not None:
        ok = True if high <= most + 1e-12 else False if low > most else None
    excess = None if seen is None else max(0.0, seen - most)
    return {"target": most, "seen": seen, "excess": excess, "low": low, "high": high, "held": ok}


def _interval(line: Mapping[str, Any], figure: str) -> Interval | None:
    low, high = line.get(f"{figure}_low"), line.get(f"{figure}_high")
    if low is not None and high is not None:
        return low, high
    return share(line.get("errors_answered", 0), line.get("answered", 0)) if figure == "risk" else None
