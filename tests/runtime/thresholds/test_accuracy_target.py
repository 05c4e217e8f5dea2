import itertools

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


def every_cascade(scores):
    """All thresholds that differ in effect."""
    each = [[np.inf, *np.unique(s)] for s in scores[:-1]]
    return [(*bars, -np.inf) for bars in itertools.product(*each)]


def outcome(scores, correct, cost, bars):
    exits = [next(j for j, bar in enumerate(bars) if row[j] >= bar) for row in scores.T]
    rows = np.arange(scores.shape[1])
    drop = correct[-1].astype(float) - correct[exits, rows]
    return np.mean([cost[j] for j in exits]) / cost[-1], drop.mean(), drop.std() / np.sqrt(len(rows))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 3), st.sampled_from([0.0, 0.05, 0.2]), st.sampled_from([0.0, 1.0]))
def test_up_to_three_exits_nothing_cheaper_exists(seed, exits, drop, margin):
    scores, correct, cost = draw(seed, exits, 40)
    found = thresholds.accuracy_target(scores, correct, cost, drop, standard_errors=margin)
    cheapest = min(
        spent
        for spent, lost, error in (outcome(scores, correct, cost, bars) for bars in every_cascade(scores))
        if lost + margin * error <= drop + 1e-12
    )
    assert found.exact
    assert found.cost == pytest.approx(cheapest)
    spent, lost, error = outcome(scores, correct, cost, found.thresholds)
    assert (found.cost, found.drop, found.standard_error) == pytest.approx((spent, lost, error))
    assert found.drop + margin * found.standard_error <= drop + 1e-9


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.02, 0.1]))
def test_beyond_three_exits_the_search_comes_close_to_the_best(seed, drop):
    scores, correct, cost = draw(seed, 4, 30, 4)
    found = thresholds.accuracy_target(scores, correct, cost, drop, standard_errors=0)
    cheapest = min(
        spent
        for spent, lost, _ in (outcome(scores, correct, cost, bars) for bars in every_cascade(scores))
        if lost <= drop + 1e-12
    )
    assert not found.exact
    assert found.drop <= drop + 1e-12
    assert cheapest <= found.cost + 1e-12
    assert found.cost <= cheapest + 0.06


def test_the_frontier_runs_from_dear_to_cheap_and_each_point_is_what_it_says():
    scores, correct, cost = draw(1, 5, 300)
    found = thresholds.accuracy_target(scores, correct, cost, 0.02)
    costs, drops = [p.cost for p in found.frontier], [p.drop for p in found.frontier]
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


def test_corners_and_mistakes():
    lone = thresholds.accuracy_target([[1.0, 2.0]], [[1, 0]], [3.0])
    assert lone.thresholds == (-np.inf,)
    assert lone.exact
    assert not thresholds.accuracy_target(np.empty((3, 0)), np.empty((3, 0)), [1, 2, 3]).saves
    with pytest.raises(InputError, match="correct"):
        thresholds.accuracy_target(np.zeros((2, 3)), np.zeros((2, 2)), [1, 2])
    with pytest.raises(InputError, match="drop"):
        thresholds.accuracy_target(np.zeros((2, 3)), np.zeros((2, 3)), [1, 2], -0.1)
