"""The cheapest rule within a drop, against every rule with one bar over every set of exits, judged row by row."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import thresholds
from offramp.runtime.errors import InputError


def draw(seed, exits, rows, levels=8):
    random = np.random.default_rng(seed)
    ability = random.normal(size=rows)
    scores = (ability + random.normal(0, 0.7, (exits, rows))).round(1)
    scores = np.round(scores * levels / 8, 1)
    correct = scores + random.normal(0, 0.5, (exits, rows)) > np.linspace(-0.2, -1, exits)[:, None]
    return scores, correct, np.cumsum(random.uniform(1, 2, exits))


def one_bar_for_any_exits(scores):
    """Everybody at each exit, and every bar between scores at every set of early exits."""
    early = len(scores) - 1
    for j in range(early):
        yield (*(math.inf,) * j, -math.inf, *(math.inf,) * (early - j - 1), -math.inf)
    values = np.unique(scores[:-1])
    for opened in itertools.chain.from_iterable(itertools.combinations(range(early), k) for k in range(1, early + 1)):
        for bar in (values[1:] + values[:-1]) / 2:
            yield (*(bar if j in opened else math.inf for j in range(early)), -math.inf)


def outcome(scores, correct, cost, bars):
    """Cost, drop and its standard error with one row more than seen to differ."""
    exits = [next(j for j, bar in enumerate(bars) if row[j] >= bar) for row in scores.T]
    rows = np.arange(scores.shape[1])
    drop = correct[-1].astype(float) - correct[exits, rows]
    return np.mean([cost[j] for j in exits]) / cost[-1], drop.mean(), math.sqrt((drop**2).sum() + 1) / len(rows)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.sampled_from([0.05, 0.1, 0.3]), st.sampled_from([0.0, 1.0]))
def test_no_rule_with_one_bar_is_cheaper_within_the_drop(seed, exits, drop, margin):
    scores, correct, cost = draw(seed, exits, 40)
    found = thresholds.accuracy_target(scores, correct, cost, drop, standard_errors=margin)
    within = [1.0]
    for spent, lost, error in (outcome(scores, correct, cost, bars) for bars in one_bar_for_any_exits(scores)):
        if min(max(lost, 0.0) + margin * error, lost + (margin + 1) * error) <= drop + 1e-12:
            within.append(spent)
    assert found.cost <= min(within) * 1.02 + 1e-9
    spent, lost, error = outcome(scores, correct, cost, found.thresholds)
    assert (found.cost, found.drop) == pytest.approx((spent, lost))
    assert found.saves == (found.cost < 1)
    if found.saves:
        assert found.standard_error == pytest.approx(error)
        assert found.drop + margin * found.standard_error <= drop + 1e-9


def test_the_frontier_runs_from_dear_to_cheap_and_each_point_is_what_it_says():
    scores, correct, cost = draw(1, 5, 300)
    found = thresholds.accuracy_target(scores, correct, cost, 0.02)
    costs, drops = [p.cost for p in found.frontier], [p.drop for p in found.frontier]
    assert len(costs) > 5
    assert costs == sorted(costs, reverse=True)
    assert drops == sorted(drops)
    for point in found.frontier[::4]:
        spent, lost, _ = outcome(scores, correct, cost, point.thresholds)
        assert (point.cost, point.drop) == pytest.approx((spent, lost))


def test_useless_exits_are_left_shut():
    random = np.random.default_rng(2)
    scores = random.normal(size=(3, 400))
    correct = np.stack([np.zeros(400), np.zeros(400), np.ones(400)]).astype(bool)
    found = thresholds.accuracy_target(scores, correct, [1, 2, 3], 0.0)
    assert found.thresholds == (np.inf, np.inf, -np.inf)
    assert not found.saves
    assert found.standard_error == 0


def test_an_exit_that_is_as_good_as_the_last_answers_everybody():
    right = np.random.default_rng(0).random(2000) < 0.8
    scores = np.random.default_rng(1).normal(size=(3, 2000))
    found = thresholds.accuracy_target(scores, np.stack([np.zeros(2000, bool), right, right]), [1, 2, 10], 0.01)
    assert found.thresholds == (np.inf, -np.inf, -np.inf)
    assert found.cost == pytest.approx(0.2)


def test_corners_and_mistakes():
    lone = thresholds.accuracy_target([[1.0, 2.0]], [[1, 0]], [3.0])
    assert lone.thresholds == (-np.inf,)
    assert not lone.saves
    assert not thresholds.accuracy_target(np.empty((3, 0)), np.empty((3, 0)), [1, 2, 3]).saves
    with pytest.raises(InputError, match="correct"):
        thresholds.accuracy_target(np.zeros((2, 3)), np.zeros((2, 2)), [1, 2])
    with pytest.raises(InputError, match="drop"):
        thresholds.accuracy_target(np.zeros((2, 3)), np.zeros((2, 3)), [1, 2], -0.1)
