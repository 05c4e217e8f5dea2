"""The guard at work: candidates are fitted as labels come, tried side by side, and the incumbent is replaced by one."""

from dataclasses import dataclass, field, replace

from offramp.runtime.errors import InputError
from offramp.runtime.online.fitting.recalibrator import Recalibrator, Refit
from offramp.runtime.online.guard import ALPHA, Decision, Trial, judge, open_trial
from offramp.runtime.online.window import Window
from offramp.runtime.points import OperatingPoint

_EVIDENCE = 1.5  # e-value on the rows that a candidate was fitted on, without which it isn't tried


@dataclass(frozen=True)
class OnTrial:
    """A candidate, the test that was fixed for it, and what the last look found."""

    refit: Refit
    trial: Trial
    decision: Decision


@dataclass
class Trials:
    """One operating point's incumbent and the candidates that would replace it.

    Each candidate takes a part of alpha along, and there is little of it: a rank-preserving one is tried only if the
    very rows that it was fitted on speak for it.

    incumbent: in force, fitted on rows answered up to `fitted_until` (seconds). every: labelled rows between two
    candidates, at least. most: candidates on trial at once; the oldest makes room. share: of one key among judge rows.
    opened: candidates of this incumbent so far.
    """

    recalibrator: Recalibrator
    incumbent: OperatingPoint
    fitted_until: float
    every: int = 100
    most: int = 12
    alpha: float = ALPHA
    share: float = 1.0
    opened: int = 0
    on_trial: list[OnTrial] = field(default_factory=list)
    _last: float = float("-inf")

    def __post_init__(self) -> None:
        if not (self.every >= 1 and self.most >= 1):
            raise InputError("trials: expected every and most of at least 1.")

    def look(self, window: Window) -> list[OnTrial]:
        """Judge all candidates on the window and begin with another if it is time; what was found, oldest first.

        window: rows of the operating point, oldest first, with all that were answered since the oldest open trial's
        `after`. A candidate that is refused leaves. One that is accepted is returned, too, and stays on trial until the
        caller says `promote` or `drop`: whether it is put in force may be for a person to say.
        """
        found = [
            OnTrial(
                one.refit,
                one.trial,
                judge(one.trial, window, self.incumbent, one.refit.point, share=self.share),
            )
            for one in self.on_trial
        ]
        self.on_trial = [one for one in found if one.decision.verdict != "refuse"]
        if not any(one.decision.verdict == "accept" for one in found):
            self._begin(window)
        return found

    def _begin(self, window: Window) -> None:
        """Fit a candidate and fix its test, where enough labels came since the last."""
        fresh = int((window.known & (window.time > max(self._last, self.fitted_until))).sum())
        if fresh < self.every:
            return
        recalled = self.recalibrator.recall(window)
        if recalled is None:
            return
        refit = self.recalibrator.fit(*recalled, self.incumbent)
        if refit is None:
            return
        self._last = refit.after
        after = max(refit.after, self.fitted_until)
        number = self.opened + 1
        # How far confidence moves is told by rows as they come now.
        now = window.take(window.time >= recalled[0].time[0])
        trial = open_trial(now, self.incumbent, refit.point, after=after, number=number, alpha=self.alpha)
        if not self._spoken_for(replace(trial, after=self.fitted_until), recalled[0], refit.point):
            return
        self.opened = number
        decision = judge(trial, window, self.incumbent, refit.point, share=self.share)
        if decision.verdict == "refuse":
            return
        if len(self.on_trial) >= self.most:
            self.on_trial.pop(0)
        self.on_trial.append(OnTrial(refit, trial, decision))

    def _spoken_for(self, trial: Trial, fitted_on: Window, candidate: OperatingPoint) -> bool:
        """Whether a candidate convinces at all on the rows it was fitted on. One that moves classes apart isn't asked:
        what it gains is spread over so many that its own rows say too little."""
        if not all(one.preserves_ranking for one in candidate.calibrators):
            return True
        return judge(trial, fitted_on, self.incumbent, candidate, share=self.share).e_value >= _EVIDENCE

    def drop(self, number: int) -> None:
        """End a candidate's trial; its part of alpha stays spent."""
        self.on_trial = [one for one in self.on_trial if one.trial.number != number]

    def promote(self, number: int) -> OperatingPoint:
        """Put a candidate in force. Its own candidates begin anew, with an alpha of their own."""
        for one in self.on_trial:
            if one.trial.number == number:
                self.incumbent, self.fitted_until = one.refit.point, one.refit.after
                self.opened, self.on_trial = 0, []
                return self.incumbent
        raise InputError(f"number: expected one of {[one.trial.number for one in self.on_trial]}, got {number!r}.")
