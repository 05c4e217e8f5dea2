"""A promised risk among the answered rows, kept by abstaining."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime.arrays import Bools, Floats
from offramp.runtime.jobs.calibrating.closest import smallest
from offramp.runtime.jobs.calibrating.targets import AbstainRisk, percent
from offramp.runtime.thresholds import SelectiveRisk, sgr_of_any


@dataclass(frozen=True)
class Judged:
    """Rows at operating points that differ in their rule: (R, N) calibrated log-odds, whether the answer is wrong.

    chosen: the point that is meant; the promise is tested for all (see `sgr_of_any`).
    """

    log_odds: Floats
    wrong: Bools
    chosen: int = 0

    @classmethod
    def alone(cls, log_odds: ArrayLike, wrong: ArrayLike) -> "Judged":
        """Of one point: (N,) each."""
        return cls(np.atleast_2d(np.asarray(log_odds, np.float64)), np.atleast_2d(np.asarray(wrong, bool)))

    def __len__(self) -> int:
        return int(self.wrong.shape[1])


@dataclass(frozen=True)
class Abstention:
    """An abstention threshold with where it came from."""

    threshold: float
    provenance: dict[str, Any]
    answer: SelectiveRisk
    unmet: str | None = None


def abstention(
    certify: Judged, target: AbstainRisk, propose: Judged | None = None, share: float = 1.0, abstain_all: bool = False
) -> Abstention:
    """The abstention threshold by SGR on the certifying rows, begun where the proposing rows say.

    share: of delta, where the certifying rows chose the rule. A risk that can't be promised leaves
    abstention off and no promise; abstain_all: every answer is flagged instead, which keeps it in vain.
    """
    delta = target.delta * share
    answer = _sgr(certify, propose, target.risk, delta)
    provenance = {
        "method": f"sgr/{answer.method}",
        "risk": target.risk,
        "delta": target.delta,
        "level": delta,
        "tested_for": len(certify.wrong),
        "feasible": answer.feasible,
        "coverage": answer.coverage,
        "bound": answer.bound if answer.feasible else None,
        "rows": len(certify),
        **_counts(certify, answer),
    }
    if answer.feasible:
        return Abstention(answer.threshold, provenance, answer)
    instead = "every answer is flagged as an abstention" if abstain_all else "nothing is promised and no row abstains"
    unmet = (
        f"no part of the rows can be promised a risk of at most {percent(target.risk)} from {len(certify)} "
        f"certifying rows, so {instead}: {_closest_risk(certify, propose, target.risk, delta)}."
    )
    threshold = math.inf if abstain_all else -math.inf
    return Abstention(threshold, {**provenance, "closest": unmet}, answer, unmet)


def _counts(certify: Judged, answer: SelectiveRisk) -> dict[str, int]:
    """How many certifying rows are answered, and how many of those wrongly: what the bound rests on."""
    answered = certify.log_odds[certify.chosen] >= answer.threshold
    return {"answered": int(answered.sum()), "errors": int((certify.wrong[certify.chosen] & answered).sum())}


def _sgr(certify: Judged, propose: Judged | None, risk: float, delta: float) -> SelectiveRisk:
    proposing = None if propose is None else (propose.log_odds, propose.wrong)
    return sgr_of_any(certify.log_odds, certify.wrong, certify.chosen, risk, delta, proposing=proposing)


def _closest_risk(certify: Judged, propose: Judged | None, target: float, delta: float) -> str:
    """The smallest risk, to three digits, that the same test would have promised."""

    best = smallest(target, 25, lambda risk: _sgr(certify, propose, risk, delta).feasible)
    if best is None:
        return "no risk below 99% could be"
    return f"{percent(best)} could be, answering {_sgr(certify, propose, best, delta).coverage:.1%}"
