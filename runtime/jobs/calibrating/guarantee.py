"""A promised accuracy drop: rules, their order and the test fixed on proposing rows, tested on certifying ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from offramp.runtime.arrays import Array, Bools, Floats
from offramp.runtime.jobs.calibrating.choice import Choice
from offramp.runtime.jobs.calibrating.closest import smallest
from offramp.runtime.jobs.calibrating.targets import AbstainRisk, Guarantee, percent
from offramp.runtime.jobs.data.labelled_rows import LabelledRows
from offramp.runtime.thresholds import RiskControl, Rule, expected_coverage, leave_at, risk_control
from offramp.runtime.thresholds.risk_control import STAKES, best_stakes

# A promise on exits is tested along at most this many rules: each is one more at which the walk may end, and
# abstention certified on the same rows shares its delta out over them.
CANDIDATES = 24
_LENGTHS = (6, 12, CANDIDATES)
# Where rows abstain, too, fewer rules leave more of delta to the one that is chosen: single ones of so many as well.
_FEW, _SINGLE = (2, 3), 12
_RESAMPLES = 200
_LIKELY = 0.95
# Rules this many standard errors beyond what is allowed are tested in vain.
_HOPELESS = -2.0


@dataclass(frozen=True)
class Test:
    """How it is tested that a rule's mean loss is below epsilon (see `risk_control`)."""

    bound: Literal["binomial", "wsr", "plug_in"]
    loss: Literal["lost", "signed"]


BINOMIAL, BETTING, PLUG_IN = Test("binomial", "lost"), Test("wsr", "signed"), Test("plug_in", "signed")


@dataclass(frozen=True)
class Plan:
    """What is tested, fixed before a certifying row is seen.

    rules: from costly to cheap. cost: expected, a fraction of full. shares: how often each rule would be the answer,
    the last one for `full`; they sum to 1. abstained: rows expected to abstain, if they may.
    """

    test: Test
    rules: tuple[Rule, ...]
    cost: float
    shares: tuple[float, ...]
    abstained: float = 0.0

    @property
    def likely(self) -> tuple[int, int]:
        """First and one past the last of the rules that are nearly always the answer, if any is.

        A further promise on the same rows is tested for all of them and `full` at once, which neighbours cost each
        other less than sharing delta out would; each other rule has its own share.
        """
        share = np.array(self.shares[:-1])
        first, last = 0, len(share)
        while last - first > 1:
            ends = share[first], share[last - 1]
            if share[first:last].sum() - min(ends) < _LIKELY * share.sum():
                break
            first, last = (first + 1, last) if ends[0] < ends[1] else (first, last - 1)
        return first, last

    @property
    def share(self) -> float:
        """Of a further delta, for the rules that are nearly always the answer and `full`."""
        first, last = self.likely
        return min(sum(self.shares[first:last]) + self.shares[-1], 1.0)


def guarantee(
    rules: Sequence[Rule],
    certify: LabelledRows,
    target: Guarantee,
    propose: LabelledRows | None = None,
    abstain: AbstainRisk | None = None,
) -> Choice:
    """The cheapest rule that passes on the certifying rows, full where none does.

    rules: the first is `full`; their figures are of the proposing rows. propose: those rows, which choose the test
    and how many rules are tried; without them it is the binomial test. abstain: what is promised on the same rows
    besides.
    """
    plan = planned(rules, len(certify), target, propose, abstain)
    answer = tested(plan, certify, target, propose)
    choice = chosen(plan, answer, rules[0], len(certify))
    choice.provenance.update(_counts(certify, answer))
    if choice.provenance["feasible"]:
        return choice
    least = _least(rules, certify, target, propose, abstain)
    unmet = (
        f"a drop of at most {percent(target.epsilon)} can't be promised at delta {percent(target.delta)} from "
        f"{len(certify)} certifying rows, so every row runs the full model: {least}."
    )
    return replace(choice, unmet=unmet)


def chosen(plan: Plan, answer: RiskControl, full: Rule, rows: int) -> Choice:
    """What a plan came to on so many certifying rows, with what a further promise on them must be tested for."""
    provenance = {
        "method": f"risk control/ltt, {plan.test.bound} on {plan.test.loss} rows, fixed sequence",
        "rows": rows,
        "candidates": len(plan.rules),
        "tested": answer.tested,
        "loss": answer.loss,
        "bound": answer.bound,
        "p_value": answer.p_value,
        "flops_fraction": answer.cost,
        "feasible": answer.feasible,
    }
    first, last = plan.likely
    rivals = (full.thresholds, *(rule.thresholds for rule in plan.rules[first:last]))
    like = rivals[1 + int(np.argmax(plan.shares[first:last]))] if first < last else None
    if not answer.feasible:
        return Choice(full.thresholds, provenance, share=plan.share, rivals=rivals, like=like)
    provenance["family"] = plan.rules[answer.index].family
    if first <= answer.index < last:
        return Choice(answer.thresholds, provenance, share=plan.share, rivals=rivals, like=like)
    return Choice(answer.thresholds, provenance, share=plan.shares[answer.index])


def _counts(certify: LabelledRows, answer: RiskControl) -> dict[str, int]:
    """How many certifying rows leaving early loses, and how many it gains: what the bound rests on."""
    drop = _signed(answer.thresholds, certify)
    return {"lost": int((drop > 0).sum()), "gained": int((drop < 0).sum())}


def planned(
    rules: Sequence[Rule],
    rows: int,
    target: Guarantee,
    propose: LabelledRows | None,
    abstain: AbstainRisk | None = None,
) -> Plan:
    """The test and rules that are expected to end cheapest on `rows` certifying rows.

    abstain: then a row that abstains counts as one more run of the full model, since somebody has to answer it; the
    more rules are tried, the less of its delta is left for each.
    """
    if propose is None or not len(propose):
        line = _thinned(_line(rules, target.epsilon, BINOMIAL), CANDIDATES // 2)
        return Plan(BINOMIAL, tuple(line), math.nan, (1 / (len(line) + 1),) * (len(line) + 1))
    weights = _resampled(len(propose), rows)
    plans = []
    for tests in ((BINOMIAL,), (BETTING, PLUG_IN)):
        line = _line(rules, target.epsilon, tests[0])
        for some in _sequences(line, abstain is not None):
            losses = np.array([_signed(rule.thresholds, propose) for rule in some]).reshape(len(some), len(propose))
            for test in tests:
                passed = _passes(test, losses, weights, target)
                plans.append(_plan(test, some, passed))
    plans.sort(key=lambda plan: plan.cost)
    if abstain is None:
        return plans[0]
    best: Plan | None = None
    for plan in plans:  # cheapest first: what abstains on nothing ends the search
        if best is not None and plan.cost >= best.cost + best.abstained:
            break
        weighed = replace(plan, abstained=_abstained(plan, rules[0], propose, rows, abstain))
        if best is None or weighed.cost + weighed.abstained < best.cost + best.abstained:
            best = weighed
    return best or plans[0]


def _sequences(line: list[Rule], abstains: bool) -> list[list[Rule]]:
    lengths = (*_FEW, *_LENGTHS) if abstains else _LENGTHS
    several = list({len(kept): kept for kept in (_thinned(line, most) for most in lengths)}.values())
    return several + [[rule] for rule in _thinned(line, _SINGLE)] if abstains else several


def _abstained(plan: Plan, full: Rule, propose: LabelledRows, rows: int, abstain: AbstainRisk) -> float:
    """The share of rows expected to abstain, by the rules that are tested together: nearly always one of them it is."""
    first, last = plan.likely
    every = np.arange(len(propose))
    left = [leave_at(propose.score, rule.thresholds) for rule in (full, *plan.rules[first:last])]
    return 1 - expected_coverage(
        np.stack([propose.score[at, every] for at in left]),
        np.stack([~propose.correct[at, every] for at in left]),
        rows,
        abstain.risk,
        abstain.delta * plan.share,
    )


def _line(rules: Sequence[Rule], epsilon: float, test: Test) -> list[Rule]:
    """Rules that save, costly to cheap, each safer than all cheaper ones: the first has the smallest p-value."""
    saving = [rule for rule in rules if rule.cost < 1]
    safety = [_safety(rule, epsilon, test) for rule in saving]
    line: list[Rule] = []
    best = -math.inf
    for k in sorted(range(len(saving)), key=lambda k: (saving[k].cost, -safety[k])):
        if safety[k] > best:
            best = safety[k]
            if best > _HOPELESS:
                line.append(saving[k])
    if not line and saving:
        line = [saving[int(np.argmax(safety))]]
    return line[::-1]


def _safety(rule: Rule, epsilon: float, test: Test) -> float:
    """Standard errors between the loss seen and epsilon."""
    if test.loss == "signed":
        return (epsilon - rule.drop) / rule.margin
    # margin² = (rows that differ + 1) / n², of which the lost ones and the one more are wanted.
    differ = 2 * rule.lost - rule.drop
    n = (differ + math.sqrt(differ**2 + 4 * rule.margin**2)) / (2 * rule.margin**2)
    return (epsilon - rule.lost) / (math.sqrt(rule.lost * n + 1) / n)


def _thinned(line: list[Rule], most: int) -> list[Rule]:
    """At most so many, evenly by cost; the first and the last stay."""
    if len(line) <= most:
        return line
    cost = np.array([rule.cost for rule in line])
    picked = np.abs(cost[None, :] - np.linspace(cost[0], cost[-1], most)[:, None]).argmin(axis=1)
    return [line[k] for k in np.unique(picked)]


def _signed(thresholds: Sequence[float], rows: LabelledRows) -> Array:
    """(N,) 1 where leaving early loses a right answer, −1 where it gains one."""
    left = leave_at(rows.score, thresholds)
    drop: Array = rows.correct[-1].astype(np.float64) - rows.correct[left, np.arange(len(rows))]
    return drop


def _resampled(proposing: int, rows: int) -> Floats:
    """(resamples, proposing + 1) how often each proposing row, and one that every rule loses, is among `rows`."""
    rng = np.random.default_rng(0)
    drawn = rng.standard_exponential((_RESAMPLES, proposing + 1))
    return rng.multinomial(rows, drawn / drawn.sum(axis=1, keepdims=True)).astype(np.float64)


def _passes(test: Test, losses: Array, weights: Floats, target: Guarantee) -> Bools:
    """(resamples, rules) which rules pass; bets are judged by what they end with."""
    from scipy.special import bdtr, logsumexp

    epsilon, rows = target.epsilon, int(weights[0].sum())
    lost = weights[:, :-1] @ (losses == 1).T + weights[:, -1:]
    if test.bound == "binomial":
        return np.asarray(bdtr(lost, rows, epsilon) <= target.delta)
    gained = weights[:, :-1] @ (losses == -1).T
    counts = np.stack([lost, rows - lost - gained, gained])
    values = np.array([1.0, 0.0, -1.0])
    if test.bound == "plug_in":
        known = np.stack([(losses == value).sum(axis=1) for value in values]) + np.array([[1], [0], [0]])
        growth = np.log1p(best_stakes(known, epsilon) * (epsilon - values)[:, None])
        wealth = np.einsum("vbr,vr->br", counts, growth)
    else:
        grows = np.log1p(STAKES * ((epsilon - values) / (1 - epsilon))[:, None])
        wealth = logsumexp(np.tensordot(counts, grows, axes=(0, 0)), axis=2) - math.log(len(STAKES))
    return np.asarray(wealth >= -math.log(target.delta))


def _plan(test: Test, rules: list[Rule], passed: Bools) -> Plan:
    count = np.logical_and.accumulate(passed, axis=1).sum(axis=1)  # of rules passed before the first failure
    costs = np.array([1.0, *(rule.cost for rule in rules)])
    # One more than seen for each: what never happened in resamples may happen.
    often = np.bincount(count, minlength=len(costs)) + 1.0
    shares = np.roll(often / often.sum(), -1)
    return Plan(test, tuple(rules), float(costs[count].mean()), tuple(float(share) for share in shares))


def tested(plan: Plan, certify: LabelledRows, target: Guarantee, propose: LabelledRows | None) -> RiskControl:
    """The last rule of the plan that passed on the certifying rows."""
    return risk_control(
        certify.score,
        certify.correct,
        certify.flops,
        [rule.thresholds for rule in plan.rules],
        target.epsilon,
        target.delta,
        bound=plan.test.bound,
        loss=plan.test.loss,
        proposing=None if propose is None else (propose.score, propose.correct),
    )


def _least(
    rules: Sequence[Rule],
    certify: LabelledRows,
    target: Guarantee,
    propose: LabelledRows | None,
    abstain: AbstainRisk | None,
) -> str:
    """The smallest drop, to three digits, that the same procedure would have promised."""

    def passes(epsilon: float) -> bool:
        one = replace(target, epsilon=epsilon)
        return tested(planned(rules, len(certify), one, propose, abstain), certify, one, propose).feasible

    if not any(rule.cost < 1 for rule in rules) or not len(certify):
        return "no rule leaves early"
    best = smallest(target.epsilon, 20, passes)
    if best is None:
        return "no drop below 99% could be"
    return f"the smallest these rows could promise is {percent(best)}"
