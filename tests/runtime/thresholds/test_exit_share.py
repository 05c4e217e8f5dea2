import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import thresholds
from offramp.runtime.errors import InputError


def rows_leaving(scores, bars):
    """Each row's exit, one row at a time."""
    return [next(j for j, bar in enumerate(bars) if row[j] >= bar) for row in scores.T]


def test_shares_are_of_all_rows_and_quantiles_of_the_rows_still_in_play():
    scores = np.array([np.arange(100.0), np.arange(100.0)[::-1], np.zeros(100)])
    bars = thresholds.thresholds_for_shares(scores, [0.5, 0.25, 0.25])
    assert bars == (50.0, 75.0, float("-inf"))
    assert np.bincount(rows_leaving(scores, bars)).tolist() == [50, 25, 25]


def test_tied_rows_leave_together():
    scores = np.array([[1.0, 1.0, 1.0, 0.0], np.zeros(4)])
    assert thresholds.thresholds_for_shares(scores, [0.25, 0.75]) == (1.0, float("-inf"))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.2, 1.0), st.integers(2, 5))
def test_the_budget_is_met_and_nearly_used_up(seed, budget, exits):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(exits, 500)).astype(np.float32)
    flops = np.cumsum(rng.uniform(1, 2, (exits, 500)), axis=0)
    found = thresholds.exit_share(scores, flops, budget=budget)
    cheapest = flops[0].mean() / flops[-1].mean()
    leaving = rows_leaving(scores, found.thresholds)
    spent = flops[leaving, np.arange(500)].mean() / flops[-1].mean()
    assert found.cost == pytest.approx(spent)
    assert found.budget_met == (found.cost <= budget)
    assert np.bincount(leaving, minlength=exits) / 500 == pytest.approx(np.array(found.shares))
    assert found.thresholds[-1] == float("-inf")
    if budget >= cheapest + 0.01:
        assert found.budget_met
        assert found.cost > budget - 0.03
    if budget < cheapest:
        assert not found.budget_met


def test_a_budget_no_exit_can_meet_is_said_so():
    found = thresholds.exit_share(np.zeros((2, 5)), [3.0, 4.0], budget=0.5)
    assert not found.budget_met
    assert found.cost == 0.75


def test_equal_scores_leave_all_or_nobody():
    found = thresholds.exit_share(np.zeros((3, 10)), [1.0, 2.0, 3.0], budget=0.7)
    assert found.cost <= 0.7
    assert found.shares[0] == 1.0 or found.shares[1] == 1.0


def test_without_rows_every_exit_stays_closed():
    found = thresholds.exit_share(np.empty((3, 0)), [1.0, 2.0, 3.0], budget=0.5)
    assert found.thresholds == (float("inf"), float("inf"), float("-inf"))
    assert not found.budget_met


def test_the_whole_budget_keeps_every_row_to_the_end():
    assert thresholds.exit_share(np.ones((3, 4)), [1.0, 2.0, 3.0], budget=1.0).shares == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("scores", "flops", "budget", "message"),
    [
        (np.zeros(3), [1.0], 0.5, "scores"),
        (np.zeros((2, 3)), [1.0, 2.0, 3.0], 0.5, "flops"),
        (np.zeros((2, 3)), [2.0, 1.0], 0.5, "cumulative"),
        (np.zeros((2, 3)), [1.0, np.nan], 0.5, "finite"),
        (np.zeros((2, 3)), [1.0, 2.0], 1.5, "budget"),
        (np.zeros((2, 3)), [1.0, 2.0], 0.0, "budget"),
        (np.array([[0, np.nan], [0, 0]]), [1.0, 2.0], 0.5, "NaN in row 1"),
    ],
)
def test_bad_arguments_are_named(scores, flops, budget, message):
    with pytest.raises(InputError, match=message):
        thresholds.exit_share(scores, flops, budget=budget)


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(InputError, match="flops: expected a cost above 0 at the last exit"):
        thresholds.exit_share(np.zeros((3, 5)), [0, 0, 0], budget=0.5)


@pytest.mark.parametrize("shares", [[0.5, 0.5, 0.5], [np.nan, 0.5, 0.5], [-0.1, 0.6, 0.5], [0.5, 0.5], [np.inf, 0, 0]])
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(InputError, match=r"shares: expected 3 numbers ≥ 0 that sum to at most 1"):
        thresholds.thresholds_for_shares(np.zeros((3, 5)), shares)


def test_what_shares_leave_over_goes_to_the_last_exit():
    scores = np.arange(10.0)[None].repeat(3, axis=0)
    assert thresholds.thresholds_for_shares(scores, [0.2, 0.1, 0]) == (8.0, 7.0, float("-inf"))
    assert thresholds.thresholds_for_shares(scores, [0.1] * 2 + [0.8000000001])[0] == 9.0


@pytest.mark.parametrize(("exits", "log_q", "named"), [(0, 0, "exits"), (2.5, 0, "exits"), (3, np.nan, "log_q")])
def test_geometric_shares_of_no_exit_or_ratio_are_refused(exits, log_q, named):
    with pytest.raises(InputError, match=named):
        thresholds.geometric_shares(exits, log_q)


@pytest.mark.parametrize("bars", [[np.nan, 0, -np.inf], [0, -np.inf]])
def test_leaving_at_thresholds_that_are_none_is_refused(bars):
    with pytest.raises(InputError, match="thresholds: expected 3 numbers, none of them NaN"):
        thresholds.leave_at(np.zeros((3, 5)), bars)
