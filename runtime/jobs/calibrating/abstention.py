"""A promised risk among the answered rows, kept by abstaining."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from offramp.runtime.arrays import Floats
from offramp.runtime.jobs.calibrating.targets import AbstainRisk, percent
from offramp.runtime.thresholds import SelectiveRisk, sgr


@dataclass(frozen=True)
class Abstention:
    """An abstention threshold with where it came from."""

    threshold: float
    provenance: dict[str, Any]
    answer: SelectiveRisk
    unmet: str | None = None


def abstention(log_odds: Floats, wrong: Any, target: AbstainRisk, shared_by: int = 1) -> Abstention:
    """The abstention threshold by SGR on the certifying rows' calibrated log-odds.

    shared_by: among how many rules the same rows have chosen already; each gets its share of delta.
    """
    delta = target.delta / max(shared_by, 1)
    answer = sgr(log_odds, wrong, risk=target.risk, delta=delta)
    provenance = {
        "method": f"sgr/{answer.method}",
        "risk": target.risk,
        "delta": target.delta,
        "level": delta,
        "feasible": answer.feasible,
        "coverage": answer.coverage,
        "bound": answer.bound if answer.feasible else None,
        "rows": len(log_odds),
    }
    if answer.feasible:
        return Abstention(answer.threshold, provenance, answer)
    unmet = (
        f"no part of the rows can be promised a risk of at most {percent(target.risk)} from {len(log_odds)} "
        "certifying rows, so every answer is flagged as an abstention: "
        f"{_closest_risk(log_odds, wrong, target, delta)}."
    )
    return Abstention(answer.threshold, {**provenance, "closest": unmet}, answer, unmet)


def _closest_risk(log_odds: Floats, wrong: Any, target: AbstainRisk, delta: float) -> str:
    for exact in np.geomspace(target.risk, 0.99, 100)[1:]:
        risk = float(f"{exact:.3g}")  # what is tried is what is said
        found = sgr(log_odds, wrong, risk=risk, delta=delta)
        if found.feasible:
            return f"{percent(risk)} could be, answering {found.coverage:.1%}"
    return "no risk below 99% could be"
