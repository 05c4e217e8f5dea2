"""The guard at work: candidates are fitted as labels come, tried side by side, and the incumbent is replaced by one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from offramp.runtime import scores
from offramp.runtime.errors import InputError
from offramp.runtime.online.fitting.recalibrator import Recalibrator, Refit
from offramp.runtime.online.guard import ALPHA, Decision, Trial, judge, keeps_order, open_trial
from offramp.runtime.online.window import Window
from offramp.runtime.points import OperatingPoint

# Of the way that both move confidence: those less far apart say the same, and the later one has less to show it by.
_ALIKE = 0.3
_EVIDENCE = 1.5  # e-value on the rows that a candidate was fitted on, without which it isn't tried


@dataclass(frozen=True)
class Spending:
    """number: of a candidate. purse: the part of alpha that it spends of. turn: the how-manieth that does."""

    number: int
    purse: str
    turn: int


@dataclass(frozen=True)
class OnTrial:
    """A candidate, what it spends, the test that was fixed for it, and what the last look found."""

    refit: Refit
    spending: Spending
    trial: Trial
    decision: Decision


ANY, SAME_ORDER, OTHER_ORDER = PURSES = ("any", "same order", "other order")
"""What candidates spend of: one alpha, or, where there are two kinds of them, a half each. Else those that are shown
soon would pay for those that aren't."""


def turns_of(log: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """`Trials.turns`, by what the log says of candidates that began. An earlier offramp had one purse."""
    turns: dict[str, int] = {}
    for numbers in log:
        if "number" in numbers and "verdict" not in numbers:
            purse, turn = numbers.get("purse", ANY), numbers.get("turn", numbers["number"])
            turns[purse] = max(turns.get(purse, 0), turn)
    return turns


@dataclass
class Trials:
    """One operating point's incumbent and the candidates that would replace it.

    Each candidate takes a part of alpha along, and there is little of it: one is tried only if it isn't much like one
    that is on trial, and, where it keeps the order, if the very rows that it was fitted on speak for it.

    incumbent: in force, fitted on rows answered up to `fitted_until` (seconds). every: labelled rows between two
    occasions, at least. most: candidates of a purse on trial at once; the oldest makes room. share: of one key among
    judge rows. turns: candidates of this incumbent so far, by what they have spent of.
    """

    recalibrator: Recalibrator
    incumbent: OperatingPoint
    fitted_until: float
    every: int = 100
    most: int = 12
    alpha: float = ALPHA
    share: float = 1.0
    turns: dict[str, int] = field(default_factory=dict)
    on_trial: list[OnTrial] = field(default_factory=list)
    spendings: list[Spending] = field(default_factory=list)
    _last: float = float("-inf")

    def __post_init__(self) -> None:
        if not (self.every >= 1 and self.most >= 1):
            raise InputError("trials: expected every and most of at least 1.")

    @property
    def opened(self) -> int:
        """At least the number of candidates of this incumbent so far; none has a greater number."""
        return sum(self.turns.values())

    def look(self, window: Window) -> list[OnTrial]:
        """Judge all candidates on the window and begin with another if it is time; what was found, oldest first.

        window: rows of the operating point, oldest first, with all that were answered since the oldest open trial's
        `after`. A candidate that is refused leaves. One that is accepted is returned, too, and stays on trial until the
        caller says `promote` or `drop`: whether it is put in force may be for a person to say.
        """
        found = [replace(one, decision=self._judged(one.trial, window, one.refit.point)) for one in self.on_trial]
        self.on_trial = [one for one in found if one.decision.verdict != "refuse"]
        if not any(one.decision.verdict == "accept" for one in found):
            self._begin(window)
        return found

    def _begin(self, window: Window) -> None:
        """Fit candidates and fix their tests, where enough labels came since the last."""
        fresh = int((window.known & (window.time > max(self._last, self.fitted_until))).sum())
        if fresh < self.every:
            return
        for refit, fitted_on in self.recalibrator.candidates(window, self.incumbent):
            self._last = refit.after
            self._try(window, refit, fitted_on)

    def _try(self, window: Window, refit: Refit, fitted_on: Window) -> None:
        """Begin with a candidate, if it convinces on the rows it was fitted on."""
        after = max(refit.after, self.fitted_until)
        # How far confidence moves is told by rows as they come now.
        now = window.take(window.time >= fitted_on.time[0])
        spending, alpha = self._next(refit.point)
        if self._alike(refit.point, spending.purse, now):
            return
        trial = self._opened(now, refit.point, after, spending, alpha)
        if self._spoken_for(replace(trial, after=self.fitted_until), fitted_on, refit.point):
            self._begin_trial(refit, spending, trial, window)

    def challenge(self, before: OperatingPoint, window: Window) -> None:
        """Try whom the incumbent has replaced, on rows that come from now on."""
        now = float(window.time[-1])
        spending, alpha = self._next(before)
        trial = self._opened(window, before, now, spending, alpha)
        self._begin_trial(Refit(before, now, (0,) * window.exits, 0.0, 0.0), spending, trial, window)

    def _opened(
        self, window: Window, candidate: OperatingPoint, after: float, spending: Spending, alpha: float
    ) -> Trial:
        number, turn = spending.number, spending.turn
        return open_trial(window, self.incumbent, candidate, after=after, number=number, turn=turn, alpha=alpha)

    def _next(self, candidate: OperatingPoint) -> tuple[Spending, float]:
        """What a candidate would spend, and of which alpha."""
        purse, alpha = ANY, self.alpha
        shared: tuple[str, ...] = PURSES
        if self.recalibrator.in_pairs:
            purse = SAME_ORDER if keeps_order(self.incumbent, candidate) else OTHER_ORDER
            alpha, shared = self.alpha / 2, (purse, ANY)  # with another method it was all one purse
        turn = 1 + max(self.turns.get(one, 0) for one in shared)
        return Spending(self.opened + 1, purse, turn), alpha

    def _begin_trial(self, refit: Refit, spending: Spending, trial: Trial, window: Window) -> None:
        self.turns[spending.purse] = spending.turn
        self.spendings.append(spending)
        decision = self._judged(trial, window, refit.point)
        if decision.verdict == "refuse":
            return
        those = self._of_purse(spending.purse)
        if len(those) >= self.most:
            self.drop(those[0].trial.number)
        self.on_trial.append(OnTrial(refit, spending, trial, decision))

    def _alike(self, candidate: OperatingPoint, purse: str, now: Window) -> bool:
        """Whether a candidate hardly differs from one that is on trial already."""
        rows = now.take(~now.abstained)
        old, new = (scores.sigmoid(rows.log_odds(point)) for point in (self.incumbent, candidate))

        def hardly_differs(one: OperatingPoint) -> bool:
            other = scores.sigmoid(rows.log_odds(one))
            moved = min(np.abs(new - old).mean(), np.abs(other - old).mean())
            return bool(np.abs(new - other).mean() <= _ALIKE * moved)

        return any(hardly_differs(one.refit.point) for one in self._of_purse(purse))

    def _of_purse(self, purse: str) -> list[OnTrial]:
        return [one for one in self.on_trial if one.spending.purse == purse]

    def _judged(self, trial: Trial, window: Window, candidate: OperatingPoint) -> Decision:
        return judge(trial, window, self.incumbent, candidate, share=self.share)

    def _spoken_for(self, trial: Trial, fitted_on: Window, candidate: OperatingPoint) -> bool:
        """Whether a candidate convinces at all on the rows it was fitted on. One that moves classes apart isn't asked:
        what it gains is spread over so many that its own rows say too little."""
        if not keeps_order(self.incumbent, candidate):
            return True
        return self._judged(trial, fitted_on, candidate).e_value >= _EVIDENCE

    def drop(self, number: int) -> None:
        """End a candidate's trial; its part of alpha stays spent."""
        self.on_trial = [one for one in self.on_trial if one.trial.number != number]

    def promote(self, number: int) -> OperatingPoint:
        """Put a candidate in force. Its own candidates begin anew, with an alpha of their own."""
        for one in self.on_trial:
            if one.trial.number == number:
                self.incumbent, self.fitted_until = one.refit.point, one.refit.after
                self.turns, self.on_trial, self.spendings = {}, [], []
                return self.incumbent
        raise InputError(f"number: expected one of {[one.trial.number for one in self.on_trial]}, got {number!r}.")
