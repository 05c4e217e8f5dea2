"""Thresholds for a target. A target that can't be met says so and names the closest that can."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.bundles.time_model import TimeModel
from offramp.runtime.jobs.calibrating.choice import MARGIN, Choice
from offramp.runtime.jobs.calibrating.guarantee import guarantee
from offramp.runtime.jobs.calibrating.rules import Rule, propose
from offramp.runtime.jobs.calibrating.targets import Budget, Guarantee, MaxDrop, MaxMs, Target, percent
from offramp.runtime.jobs.data.labelled_rows import LabelledRows
from offramp.runtime.thresholds import FrontierPoint, pareto


@dataclass(frozen=True)
class Chooser:
    """Everything that targets are chosen from. times: None where nobody measured or gave any."""

    propose: LabelledRows
    certify: LabelledRows
    rules: tuple[Rule, ...]
    times: TimeModel | None = None

    @classmethod
    def of(cls, proposing: LabelledRows, certify: LabelledRows, times: TimeModel | None = None) -> "Chooser":
        rules = propose(proposing.score, proposing.correct, proposing.flops.astype(np.float64))
        return cls(proposing, certify, tuple(rules), times)

    @property
    def full(self) -> Rule:
        return self.rules[0]

    def frontier(self) -> tuple[FrontierPoint, ...]:
        """What no other rule beats in both cost and drop, on the proposing rows."""
        return pareto([FrontierPoint(r.thresholds, r.cost, r.drop) for r in self.rules])

    def choose(self, target: Target) -> Choice:
        """Thresholds for a target. Raises InputError where times are needed and there are none."""
        match target:
            case Budget():
                choice = self._budget(target)
            case MaxMs():
                choice = self._max_ms(target)
            case MaxDrop():
                choice = self._max_drop(target)
            case Guarantee():
                choice = guarantee(self.rules, self.certify, target, self.propose)
        asked = {key: value for key, value in asdict(target).items() if key != "name"}
        choice.provenance.update(target=asked, met=choice.unmet is None)
        if choice.unmet is not None:
            choice.provenance["closest"] = choice.unmet
        return choice

    def _budget(self, target: Budget) -> Choice:
        within = [rule for rule in self.rules if rule.cost <= target.share]
        if within:
            return self._taken("exit budget", _most_accurate(within))
        cheapest = min(self.rules, key=lambda rule: rule.cost)
        return self._taken(
            "exit budget",
            cheapest,
            f"a budget of {percent(target.share)} of the FLOPs can't be kept: the first exit alone costs "
            f"{percent(cheapest.cost)}, which is the closest.",
        )

    def _max_ms(self, target: MaxMs) -> Choice:
        if self.times is None:
            raise InputError(
                "max_ms: needs the milliseconds of each exit: a bundle to measure on this machine, or times."
            )
        spent = [self.times.ms(self.propose.score, rule.thresholds) for rule in self.rules]
        within = [rule for rule, ms in zip(self.rules, spent, strict=True) if ms <= target.ms]
        if within:
            choice = self._taken("time budget", _most_accurate(within))
        else:
            k = int(np.argmin(spent))
            choice = self._taken(
                "time budget",
                self.rules[k],
                f"{target.ms:g} ms a row can't be kept: the quickest rule takes {spent[k]:.3g} ms on this machine, "
                "which is the closest.",
            )
        choice.provenance["ms"] = self.times.ms(self.propose.score, choice.thresholds)
        choice.provenance["exit_ms"] = list(self.times.exit_ms)
        return choice

    def _max_drop(self, target: MaxDrop) -> Choice:
        # What leaving early seems to gain isn't counted on.
        within = [rule for rule in self.rules if max(rule.drop, 0.0) + MARGIN * rule.margin <= target.drop]
        if within:
            best = min(within, key=lambda rule: (rule.cost, rule.drop))
            if best.cost < 1:
                return self._taken("accuracy target", best)
        saving = [rule for rule in self.rules if rule.cost < 1]
        closest = min((max(rule.drop, 0.0) + MARGIN * rule.margin for rule in saving), default=math.inf)
        least = (
            f"from {len(self.propose)} rows the smallest drop that saves anything is {percent(closest)}"
            if math.isfinite(closest) and closest < 1
            else "no rule leaves early"
        )
        return self._taken(
            "accuracy target",
            self.full,
            f"a drop of at most {percent(target.drop)} can be had only from the full model: {least}.",
        )

    def _taken(self, method: str, rule: Rule, unmet: str | None = None) -> Choice:
        provenance = {
            "method": method,
            "family": rule.family,
            "rows": len(self.propose),
            "flops_fraction": rule.cost,
            "drop": rule.drop,
        }
        return Choice(rule.thresholds, provenance, unmet)


def _most_accurate(rules: Sequence[Rule]) -> Rule:
    """The least drop; among equals the costliest, which has most in hand."""
    return min(rules, key=lambda rule: (rule.drop, -rule.cost))
