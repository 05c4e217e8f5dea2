"""One operating point's incumbent against candidates, with all that a decision's log entry says."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from offramp.runtime.online.fitting.recalibrator import abstention
from offramp.runtime.online.online import Online
from offramp.runtime.online.trials import OnTrial, Trials
from offramp.runtime.online.window import Window
from offramp.runtime.points import OperatingPoint
from offramp.runtime.thresholds import SelectiveRisk, risk_bound

KEEPS_PROMISE = "abstention"
"""Where an operating point's provenance has the selective risk that it promises: {"risk", "delta", …}."""
ORIGIN = "online"
"""Where it has what a point that was made online comes from: {"after"}, seconds, the last row it was fitted on."""


@dataclass(frozen=True)
class Found:
    """What a look found of one candidate.

    kind: "trial" when it has just begun, "wait", "refuse", "accept", or "seek" where all is well but for a threshold of
    abstention that keeps the promise. point: the candidate, with that threshold if it was accepted; where the incumbent
    is seen to break its promise and no threshold keeps it, that is +inf: everything abstains. numbers: all that the
    verdict rests on, for the log.
    """

    kind: str
    point: OperatingPoint
    numbers: Mapping[str, Any]

    @property
    def decided(self) -> bool:
        """Whether it goes into the log."""
        return self.kind != "wait"


class Contest:
    """Who may take an operating point's incumbent's place.

    selections: how often a threshold of abstention was sought for the point; each spends some of the promise's δ.
    """

    def __init__(
        self,
        online: Online,
        incumbent: OperatingPoint,
        *,
        before: OperatingPoint | None = None,
        turns: Mapping[str, int] | None = None,
        selections: int = 0,
    ) -> None:
        """before: whose place the incumbent took; it may take that back by the same test as anybody.

        turns: candidates that the incumbent had already, as in `Trials`. selections: how often a threshold of
        abstention was sought for this point on later rows, for whichever incumbent.
        """
        self._trials = Trials(
            online.recalibrator,
            incumbent,
            -math.inf if (fitted := fitted_on(incumbent)) is None else fitted,
            every=online.every,
            share=online.share,
            turns=dict(turns or {}),
        )
        self._full = online.rows
        self._before = before
        self.selections = selections
        self._sought_at: dict[int, int] = {}  # judge rows, by the candidate's number

    def look(self, window: Window) -> list[Found]:
        """Judge all candidates on a window of the point's newest rows, and begin with another if it is time.

        An incumbent that abstains on everything is judged as if it answered everything: no row would tell otherwise.
        """
        trials = self._trials
        if trials.incumbent.abstain_below == math.inf:
            window = replace(window, abstained=np.zeros(len(window), bool))
        if len(window) >= self._full:
            # Rows that are forgotten while a trial runs would be chosen after the fact.
            for one in list(trials.on_trial):
                if one.trial.after < window.time[0]:
                    trials.drop(one.trial.number)
        before = len(trials.spendings)
        found = [self._found(one, window) for one in trials.look(window)]
        if self._before is not None and (window.time > trials.fitted_until).any():
            trials.challenge(self._before, window)
            self._before = None
        for spending in trials.spendings[before:]:
            begun = next((one for one in trials.on_trial if one.trial.number == spending.number), None)
            more = {} if begun is None else {"after": begun.refit.after, "rows": list(begun.refit.rows)}
            found.append(Found("trial", trials.incumbent, {**self._about, **asdict(spending), **more}))
        return found

    def end(self, found: Found) -> None:
        """A candidate's verdict has been logged: it is no longer on trial."""
        if found.kind in ("accept", "refuse"):
            self._trials.drop(found.numbers["number"])

    @property
    def _about(self) -> dict[str, Any]:
        incumbent = self._trials.incumbent
        return {"point": incumbent.name, "incumbent": fitted_on(incumbent)}

    def _found(self, one: OnTrial, window: Window) -> Found:
        numbers = {**self._about, **_plain(asdict(one.decision)), "after": one.refit.after}
        kind: str = one.decision.verdict
        incumbent = self._trials.incumbent
        provenance = {**incumbent.provenance, ORIGIN: {"after": one.refit.after}}
        point = replace(one.refit.point, provenance=provenance)
        promise = incumbent.provenance.get(KEEPS_PROMISE)
        if kind == "accept" and isinstance(promise, Mapping):
            chosen = self._threshold(one, window, promise)
            if chosen is None:
                return Found("wait", point, numbers)
            numbers["selections"] = self.selections
            numbers["promise_broken"] = _broken(window.after(one.trial.after), chosen)
            if not (chosen.feasible or numbers["promise_broken"]):
                return Found("seek", point, numbers)
            about = {name: getattr(chosen, name) for name in ("level", "feasible", "coverage", "bound")}
            kept = {**promise, "method": f"sgr/{chosen.method}, online", **_plain(about)}
            point = replace(point, abstain_below=chosen.threshold, provenance={**provenance, KEEPS_PROMISE: kept})
        return Found(kind, point, numbers)

    def _threshold(self, one: OnTrial, window: Window, promise: Mapping[str, Any]) -> SelectiveRisk | None:
        """A threshold of abstention for the candidate that keeps the promise; None before it is time to seek again.

        Each time spends some of δ, so the next one waits for twice as many rows.
        """
        number, rows = one.trial.number, one.decision.rows
        if rows < 2 * self._sought_at.get(number, 0):
            return None
        self._sought_at[number] = rows
        self.selections += 1
        return abstention(
            window.after(one.trial.after),
            self._trials.incumbent,
            one.refit.point,
            risk=float(promise["risk"]),
            delta=float(promise["delta"]),
            version=self.selections,
        )


def _broken(rows: Window, chosen: SelectiveRisk) -> bool:
    """Whether the answered rows' risk is above the promised one, by Clopper–Pearson's lower limit."""
    answered = int(rows.answered.sum())
    right = int((rows.answered & rows.correct).sum())
    return bool(1.0 - risk_bound(right, answered, chosen.level) > chosen.target)


def promised_risk(point: OperatingPoint) -> float | None:
    """The selective risk that an operating point promises; None without a promise, or one that couldn't be kept."""
    promise = point.provenance.get(KEEPS_PROMISE)
    if not isinstance(promise, Mapping) or "risk" not in promise or not promise.get("feasible", True):
        return None
    return float(promise["risk"])


def fitted_on(point: OperatingPoint) -> float | None:
    """Seconds, the last row that a point made online was fitted on; None for one of the offline job's."""
    origin = point.provenance.get(ORIGIN)
    return float(origin["after"]) if isinstance(origin, Mapping) else None


def _plain(numbers: dict[str, Any]) -> dict[str, Any]:
    """As JSON can hold it: None for what is no number."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, dict):
            return _plain(value)
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        return value

    return {name: plain(value) for name, value in numbers.items()}
