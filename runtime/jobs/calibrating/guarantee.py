"""A promised accuracy drop: rules fixed on proposing rows, tested on certifying ones."""

from collections.abc import Sequence

import numpy as np
from offramp.runtime.jobs.calibrating.choice import MARGIN, Choice
from offramp.runtime.jobs.calibrating.rules import Rule
from offramp.runtime.jobs.calibrating.targets import Guarantee, percent
from offramp.runtime.jobs.data.labelled_rows import LabelledRows
from offramp.runtime.thresholds import binomial_bound, leave_at, risk_control

# A promise on exits is tested along at most this many rules, fixed before any certifying row is looked at.
# Few: abstention certified on the same rows shares its delta out over them.
CANDIDATES = 12


def guarantee(rules: Sequence[Rule], certify: LabelledRows, target: Guarantee) -> Choice:
    """The cheapest rule that passes on the certifying rows, full where none does. rules: the first is `full`."""
    sequence = _sequence(rules, target.epsilon)
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
        f"{len(certify)} certifying rows, so every row runs the full model: {_least(sequence, certify, target.delta)}."
    )
    return Choice(rules[0].thresholds, provenance, unmet, tested=len(sequence))


def _least(sequence: Sequence[Rule], certify: LabelledRows, delta: float) -> str:
    if not sequence or not len(certify):
        return "no rule leaves early"
    rows = np.arange(len(certify))
    left = leave_at(certify.score, sequence[0].thresholds)
    lost = certify.correct[-1] & ~certify.correct[left, rows]
    return f"the smallest these rows could promise is {percent(binomial_bound(lost.astype(np.float64), delta))}"


def _sequence(rules: Sequence[Rule], epsilon: float) -> list[Rule]:
    """The rules to test, costliest first: those of the family that looks cheapest within epsilon."""
    saving = [rule for rule in rules if rule.cost < 1]
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
