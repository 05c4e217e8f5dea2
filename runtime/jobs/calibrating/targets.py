"""What an operating point is asked for, and the thresholds that give it.

Each target is a frozen dataclass; `choose` turns one into thresholds. A target that can't be met says so and
names the closest that can.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from offramp.runtime import arrays
from offramp.runtime.arrays import Floats
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.bundles.time_model import TimeModel
from offramp.runtime.jobs.calibrating.rules import Rule, propose
from offramp.runtime.jobs.data.labelled_rows import LabelledRows
from offramp.runtime.thresholds import FrontierPoint, SelectiveRisk, binomial_bound, leave_at, pareto, risk_control, sgr

# A promise on exits is tested along at most this many rules, fixed before any certifying row is looked at.
# Few: abstention certified on the same rows shares its delta out over them.
CANDIDATES = 12
# Standard errors of the measured drop that are kept in hand: of hundreds of rules the luckiest is taken.
MARGIN = 1.645


@dataclass(frozen=True)
class Budget:
    """At most this share of the full model's FLOPs, in (0, 1]: the most accurate rule that keeps it."""

    share: float
    name: str = ""
    kind: str = field(default="budget", init=False)

    def __post_init__(self) -> None:
        arrays.fraction(self.share, "budget", high_open=False)


@dataclass(frozen=True)
class MaxMs:
    """At most this many milliseconds a row on average, as the `TimeModel` of this machine expects them."""

    ms: float
    name: str = ""
    kind: str = field(default="max-ms", init=False)

    def __post_init__(self) -> None:
        if not (self.ms > 0 and math.isfinite(self.ms)):
            raise InputError(f"max_ms: expected milliseconds above 0, got {self.ms!r}.")


@dataclass(frozen=True)
class MaxDrop:
    """Accuracy at most this much below the full model's, as measured: the cheapest rule, with 1.645
    standard errors in hand."""

    drop: float
    name: str = ""
    kind: str = field(default="max-drop", init=False)

    def __post_init__(self) -> None:
        arrays.fraction(self.drop, "max_drop")


@dataclass(frozen=True)
class Guarantee:
    """Accuracy at most `epsilon` below the full model's, with probability ≥ 1 − delta over the certifying rows."""

    epsilon: float
    delta: float = 0.05
    name: str = ""
    kind: str = field(default="guarantee", init=False)

    def __post_init__(self) -> None:
        arrays.fraction(self.epsilon, "guarantee")
        arrays.fraction(self.delta, "delta")


@dataclass(frozen=True)
class AbstainRisk:
    """Error among the answered rows at most `risk`, with probability ≥ 1 − delta over the certifying rows."""

    risk: float
    delta: float = 0.05

    def __post_init__(self) -> None:
        arrays.fraction(self.risk, "abstain_risk")
        arrays.fraction(self.delta, "delta")


Target = Budget | MaxMs | MaxDrop | Guarantee
DEFAULT = (Budget(0.5, "balanced"), Budget(0.3, "fast"))


@dataclass(frozen=True)
class Choice:
    """Thresholds for a target. unmet: what couldn't be kept and the closest that can, in words; None if met.

    tested: how many rules, fixed beforehand, certifying rows chose among; a further promise on the same rows
    must share its delta out over them.
    """

    thresholds: tuple[float, ...]
    provenance: dict[str, Any]
    unmet: str | None = None
    tested: int = 1


def label_of(target: Target) -> str:
    """The operating point's name where none was given."""
    if target.name:
        return target.name
    if isinstance(target, Budget):
        return f"budget-{percent(target.share)}"
    if isinstance(target, MaxMs):
        return f"max-ms-{target.ms:g}"
    if isinstance(target, MaxDrop):
        return f"max-drop-{percent(target.drop)}"
    return f"guarantee-{percent(target.epsilon)}"


def percent(share: float) -> str:
    return f"{share * 100:.6g}%"


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
                choice = self._guarantee(target)
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

    def _guarantee(self, target: Guarantee) -> Choice:
        sequence = self._sequence(target.epsilon)
        certify = self.certify
        answer = risk_control(
            certify.score,
            certify.correct,
            certify.flops,
            [rule.thresholds for rule in sequence],
            target.epsilon,
            target.delta,
        )
        provenance = {
            "method": "risk control/ltt, binomial, fixed sequence",
            "rows": len(certify),
            "candidates": len(sequence),
            "tested": answer.tested,
            "loss": answer.loss,
            "bound": answer.bound,
            "p_value": answer.p_value,
            "flops_fraction": answer.cost,
            "feasible": answer.feasible,
        }
        if answer.feasible:
            provenance["family"] = sequence[answer.index].family
            return Choice(answer.thresholds, provenance, tested=len(sequence))
        unmet = (
            f"a drop of at most {percent(target.epsilon)} can't be promised at delta {percent(target.delta)} from "
            f"{len(certify)} certifying rows, so every row runs the full model: {self._least(sequence, target.delta)}."
        )
        return Choice(self.full.thresholds, provenance, unmet, tested=len(sequence))

    def _least(self, sequence: Sequence[Rule], delta: float) -> str:
        if not sequence or not len(self.certify):
            return "no rule leaves early"
        rows = np.arange(len(self.certify))
        left = leave_at(self.certify.score, sequence[0].thresholds)
        lost = self.certify.correct[-1] & ~self.certify.correct[left, rows]
        return f"the smallest these rows could promise is {percent(binomial_bound(lost.astype(np.float64), delta))}"

    def _sequence(self, epsilon: float) -> list[Rule]:
        """The rules to test, costliest first: those of the family that looks cheapest within epsilon."""
        saving = [rule for rule in self.rules if rule.cost < 1]
        if not saving:
            return []
        safe = [rule for rule in saving if rule.lost + MARGIN * rule.margin <= epsilon]
        family = min(safe or saving, key=lambda rule: rule.cost if safe else rule.lost).family
        line = sorted((rule for rule in saving if rule.family == family), key=lambda rule: -rule.cost)
        # Begin where hardly anything is lost, end where more is lost than can pass; the costliest goes first, in
        # case even the beginning is too daring.
        safest = max((k for k, rule in enumerate(line) if rule.lost <= epsilon / 5), default=0)
        last = max((k for k, rule in enumerate(line) if rule.lost <= 1.5 * epsilon), default=0)
        picked = np.linspace(safest, max(last, safest), CANDIDATES - 1).round().astype(np.int64)
        return [line[k] for k in np.unique(np.append(0, picked))]

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
