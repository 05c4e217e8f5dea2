"""Thresholds for a target. A target that can't be met says so and names the closest that can."""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from offramp.runtime import calibration
from offramp.runtime.arrays import Floats
from offramp.runtime.calibration import Platt
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.bundles.time_model import TimeModel
from offramp.runtime.jobs.calibrating.choice import MARGIN, Choice
from offramp.runtime.jobs.calibrating.denied import drop_denied, least_drop
from offramp.runtime.jobs.calibrating.guarantee import guarantee
from offramp.runtime.jobs.calibrating.targets import AbstainRisk, Budget, Guarantee, MaxDrop, MaxMs, Target, percent
from offramp.runtime.jobs.data.labelled_rows import LabelledRows
from offramp.runtime.thresholds import Rule, cheapest_within, leave_at, pareto, search
from offramp.runtime.thresholds.searching import EQUAL_COST

Cost = Literal["flops", "ms"]
_COSTS = {"flops": "FLOPs", "ms": "full model's time"}


@dataclass(frozen=True)
class Chooser:
    """Everything that targets are chosen from. cost: what that of `rules` is.

    times: None where nobody measured or gave any. abstain: what will be promised at each point besides, if anything.
    """

    propose: LabelledRows
    certify: LabelledRows
    rules: tuple[Rule, ...]
    times: TimeModel | None = None
    cost: Cost = "flops"
    abstain: AbstainRisk | None = None

    @classmethod
    def of(
        cls,
        proposing: LabelledRows,
        certify: LabelledRows,
        times: TimeModel | None = None,
        cost: Cost = "flops",
        abstain: AbstainRisk | None = None,
    ) -> "Chooser":
        """cost: "flops", or "ms" of a row by itself, for which times are needed. InputError where there are none."""
        if cost not in ("flops", "ms"):
            raise InputError(f'cost: expected "flops" or "ms", got {cost!r}.')
        if cost == "ms" and times is None:
            raise InputError(
                "cost: ms needs the milliseconds of each exit: a bundle to measure on this machine, or times."
            )
        leaving = None if cost == "flops" or times is None else lambda opened: np.asarray(times.leaving(opened))
        rules = search(
            proposing.score,
            proposing.correct,
            proposing.flops,
            maps=_confidence_maps(proposing) if len(proposing) else None,
            exit_cost=leaving,
        )
        return cls(proposing, certify, rules, times, cost, abstain)

    @property
    def full(self) -> Rule:
        return self.rules[0]

    def frontier(self) -> tuple[Rule, ...]:
        """What no other rule beats in both cost and drop, on the proposing rows."""
        return pareto(self.rules)

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
                choice = guarantee(self.rules, self.certify, target, self.propose, self.abstain)
        asked = {key: value for key, value in asdict(target).items() if key != "name"}
        choice.provenance.update(target=asked, met=choice.unmet is None)
        if choice.unmet is not None:
            choice.provenance["closest"] = choice.unmet
        return choice

    def _budget(self, target: Budget) -> Choice:
        within = [rule for rule in self.rules if rule.cost + MARGIN * rule.cost_error <= target.share]
        if within:
            return self._taken("exit budget", self._simplest_of_the_best(within))
        cheapest = min(self.rules, key=lambda rule: rule.cost + MARGIN * rule.cost_error)
        return self._taken(
            "exit budget",
            cheapest,
            f"a budget of {percent(target.share)} of the {_COSTS[self.cost]} can't be kept: the cheapest rule costs "
            f"{percent(cheapest.cost + MARGIN * cheapest.cost_error)} at 95% confidence, which is the closest.",
        )

    def _simplest_of_the_best(self, rules: Sequence[Rule]) -> Rule:
        """The most accurate rule; of those within a standard error of it, at no more cost, the best of the simplest.

        The error is that of the difference on the same rows, counting one row more than seen to differ. What is left is
        beaten by no rule as simple on these rows.
        """
        best = min(rules, key=lambda rule: (rule.drop, rule.cost))
        mine = self._right(best)
        picked = best
        simpler = [r for r in rules if r.complexity < best.complexity and r.cost <= best.cost * (1 + EQUAL_COST)]
        for _, alike in itertools.groupby(sorted(simpler, key=_by_complexity), key=_by_complexity):
            passing = [r for r in _most_accurate(alike) if self._within_noise(mine, self._right(r))]
            if passing:
                picked = min(passing, key=lambda rule: (rule.drop, rule.cost))
                break
        beaten_by = [
            r for r in rules if r.complexity <= picked.complexity and r.cost <= picked.cost and r.drop <= picked.drop
        ]
        return min(beaten_by, key=lambda rule: (rule.cost, rule.drop))

    def _right(self, rule: Rule) -> Floats:
        rows = self.propose
        right: Floats = rows.correct[leave_at(rows.score, rule.thresholds), np.arange(len(rows))].astype(np.float64)
        return right

    @staticmethod
    def _within_noise(best: Floats, other: Floats) -> bool:
        lost = best - other
        return bool(lost.sum() <= np.sqrt((lost**2).sum() + 1.0))

    def _max_ms(self, target: MaxMs) -> Choice:
        if self.times is None:
            raise InputError(
                "max_ms: needs the milliseconds of each exit: a bundle to measure on this machine, or times."
            )
        spent = [self.times.ms(self.propose.score, rule.thresholds) for rule in self.rules]
        within = [rule for rule, ms in zip(self.rules, spent, strict=True) if ms <= target.ms]
        if within:
            choice = self._taken("time budget", self._simplest_of_the_best(within))
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
        best = cheapest_within(self._keeping(target.drop), target.drop, MARGIN)
        if best is not None:
            return self._taken("accuracy target", best)
        why = drop_denied(self.rules, self.propose, self._bearing, target.drop, _COSTS[self.cost])
        return self._taken("accuracy target", self.full, why)

    @property
    def _bearing(self) -> LabelledRows | None:
        """The rows that must bear a drop out: where abstention is promised, certify is kept for the promise."""
        return self.certify if self.abstain is None and len(self.certify) else None

    def _keeping(self, drop: float) -> Sequence[Rule]:
        """The rules that keep a drop; of them the cheapest, and what costs as much."""
        kept: list[Rule] = []
        for rule in sorted(self.rules, key=lambda rule: rule.cost):
            if kept and rule.cost > kept[0].cost * (1 + EQUAL_COST):
                break
            if rule.drop_in_hand(MARGIN) <= drop + 1e-12 and least_drop(rule, self._bearing) <= drop + 1e-12:
                kept.append(rule)
        return kept

    def _taken(self, method: str, rule: Rule, unmet: str | None = None) -> Choice:
        provenance = {
            "method": method,
            "family": rule.family,
            "rows": len(self.propose),
            f"{self.cost}_fraction": rule.cost,
            "drop": rule.drop,
        }
        return Choice(rule.thresholds, provenance, unmet)


def _confidence_maps(rows: LabelledRows) -> tuple[Floats, Floats]:
    """Each early exit's slope and intercept of P(right | score)."""
    fitted = []
    for s, right in zip(rows.score[:-1].astype(np.float64), rows.correct[:-1], strict=True):
        one = calibration.get("platt")
        assert isinstance(one, Platt)
        fitted.append(one.fit_score(s, right))
    return np.array([p.slope_ for p in fitted]), np.array([p.intercept_ for p in fitted])


def _by_complexity(rule: Rule) -> tuple[int, int]:
    return rule.complexity


def _most_accurate(rules: Iterable[Rule], most: int = 32) -> list[Rule]:
    """The few that lose least: comparing rules row by row isn't free."""
    return heapq.nsmallest(most, rules, key=lambda rule: (rule.drop, rule.cost))
