"""What an operating point promises, and whether rows that decided nothing about it bear that out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offramp.runtime.jobs.data.expected import Interval, Line, share
from offramp.runtime.points import OperatingPoint


@dataclass(frozen=True)
class Promised:
    """At most this: risk, error among the answered; drop, accuracy lost to the full model; share, of its FLOPs.

    None where nothing is promised; what was asked for and can't be kept isn't.
    """

    risk: float | None
    drop: float | None
    share: float | None


def promised(point: OperatingPoint) -> Promised:
    """What calibration asked of a point, measured or guaranteed, as its provenance says."""
    target, abstention = (point.provenance.get(key) or {} for key in ("target", "abstention"))
    risk = abstention.get("risk") if abstention.get("feasible", True) else None
    found = (risk, target.get("drop", target.get("epsilon")), target.get("share"))
    return Promised(*(None if value is None else float(value) for value in found))


def held(point: OperatingPoint, line: Mapping[str, Any]) -> list[Line]:
    """Each promise of a point against what was seen: {"promise", "target", "seen", "excess", "low", "high", "held"}.

    held: False where even the near end of the 95% interval is beyond the target, True where the value is
    within it, None where only chance may have carried it over, or nothing was seen.
    """
    asked = promised(point)
    promises = [
        ("risk among the answered", asked.risk, "risk"),
        ("accuracy drop", asked.drop, "drop"),
        ("FLOPs", asked.share, "flops_fraction"),
    ]
    found = []
    for name, most, figure in promises:
        if most is None:
            continue
        seen, interval = line.get(figure), _interval(line, figure)
        near, far = interval or (seen, seen)
        ok: bool | None = None
        if seen is not None and near is not None:
            ok = True if seen <= most + 1e-12 else False if near > most else None
        found.append(
            {
                "promise": name,
                "target": most,
                "seen": seen,
                "excess": None if seen is None else max(0.0, seen - most),
                "low": near,
                "high": far,
                "held": ok,
            }
        )
    return found


def _interval(line: Mapping[str, Any], figure: str) -> Interval | None:
    low, high = line.get(f"{figure}_low"), line.get(f"{figure}_high")
    if low is not None and high is not None:
        return low, high
    return share(line.get("errors_answered", 0), line.get("answered", 0)) if figure == "risk" else None
