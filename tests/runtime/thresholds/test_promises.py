"""Promises are broken as seldom as promised, by simulation, where choosing by the estimate breaks them often."""

import numpy as np
import pytest
from offramp.runtime import thresholds

RESAMPLES, DELTA = 1000, 0.1
# δ + 3σ of a share estimated from 1,000 resamples
ALLOWED = DELTA + 3 * np.sqrt(DELTA * (1 - DELTA) / RESAMPLES)
RISK = 0.1


def selective_draw(random, n):
    """Scores in (0, 1) with P(wrong | score u) = 0.6·(1 − u)²."""
    u = random.random(n)
    return u, random.random(n) < 0.6 * (1 - u) ** 2


def true_risk(threshold):
    """Of {u ≥ threshold}: ∫ 0.6(1 − u)² du / (1 − threshold) = 0.2(1 − threshold)²."""
    return 0.2 * (1 - threshold) ** 2


def plug_in(score, error):
    """The lowest threshold whose empirical risk is within the target: no promise at all."""
    order = np.argsort(-score)
    risk = np.cumsum(error[order]) / np.arange(1, len(score) + 1)
    good = np.flatnonzero(risk <= RISK)
    return score[order][good[-1]] if len(good) else np.inf


@pytest.mark.parametrize("n", [300, 3000])
@pytest.mark.parametrize("method", ["fixed_sequence", "binary"])
def test_sgr_keeps_its_promise_where_the_plug_in_rule_does_not(n, method):
    random = np.random.default_rng(n)
    broken = plug_in_broken = feasible = 0
    for _ in range(RESAMPLES):
        score, error = selective_draw(random, n)
        plug_in_broken += true_risk(plug_in(score, error)) > RISK
        found = thresholds.sgr(score, error, RISK, DELTA, method)
        feasible += found.feasible
        broken += found.feasible and true_risk(found.threshold) > RISK
    assert plug_in_broken / RESAMPLES > 0.3
    assert broken / RESAMPLES <= ALLOWED
    if method == "fixed_sequence":
        assert feasible / RESAMPLES >= 0.5


EPSILON = 0.1
BARS = np.linspace(0.95, 0.05, 19)
SEQUENCE = [(bar, -np.inf) for bar in BARS]


def cascade_draw(random, n):
    """Two exits; leaving at score u loses the right answer with probability 0.6·(1 − u)²."""
    u = random.random(n)
    lost = random.random(n) < 0.6 * (1 - u) ** 2
    full = np.ones(n, bool)
    # Where nothing is lost a tenth of the rows is wrong at both exits.
    full[~lost] = random.random((~lost).sum()) > 0.1
    return np.stack([u, np.zeros(n)]), np.stack([full & ~lost, full])


def true_loss(bar):
    """Lost to leaving at u ≥ bar: ∫ 0.6(1 − u)² du = 0.2(1 − bar)³."""
    return 0.2 * (1 - bar) ** 3


@pytest.mark.parametrize("n", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_guaranteed_exits_keep_their_promise_where_the_cheapest_estimate_does_not(n):
    random = np.random.default_rng(n + 1)
    rules = {
        "binomial ltt": {"bound": "binomial"},
        "hb ucb": {"bound": "hb", "method": "ucb"},
        "wsr ucb": {"bound": "wsr", "method": "ucb"},
        "wsr signed": {"bound": "wsr", "loss": "signed"},
    }
    broken = dict.fromkeys(rules, 0)
    saves = dict.fromkeys(rules, 0)
    plug_in_broken = 0
    for _ in range(RESAMPLES):
        scores, correct = cascade_draw(random, n)
        drops = [(correct[1] & ~correct[0] & (scores[0] >= bar)).mean() for bar in BARS]
        good = np.flatnonzero(np.array(drops) <= EPSILON)
        plug_in_broken += true_loss(BARS[good[-1]]) > EPSILON
        for name, rule in rules.items():
            found = thresholds.risk_control(scores, correct, [1.0, 2.0], SEQUENCE, EPSILON, DELTA, **rule)
            broken[name] += found.feasible and true_loss(found.thresholds[0]) > EPSILON
            saves[name] += found.cost < 1
    assert plug_in_broken / RESAMPLES > 0.3
    for name in rules:
        assert broken[name] / RESAMPLES <= ALLOWED, name
        assert saves[name] / RESAMPLES > 0.9, name


def test_the_joint_choice_keeps_its_promise():
    random = np.random.default_rng(8)
    broken = feasible = 0
    for k in range(300):
        scores, correct = cascade_draw(random, 2000)
        odds = np.stack([scores[0], scores[0]])
        found = thresholds.joint_choice(
            scores, odds, correct, [1.0, 2.0], 0.2, DELTA, min_coverage=0.1, candidates=4, method="binary", seed=k
        )
        feasible += found.feasible
        if np.isfinite(found.abstain_below):
            fresh, right = cascade_draw(random, 40_000)
            left = (fresh[0] < found.thresholds[0]).astype(int)
            kept = fresh[0] >= found.abstain_below
            broken += (~right[left, np.arange(40_000)][kept]).mean() > 0.2 + 0.005
    assert feasible > 150
    assert broken / 300 <= DELTA + 3 * np.sqrt(DELTA * (1 - DELTA) / 300)
