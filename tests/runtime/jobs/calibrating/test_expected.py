"""What an operating point is expected to do: plain counts over the rows, with intervals that hold."""

import math

import numpy as np
import pytest
from made_rows import labelled, made_rows
from offramp.runtime import OperatingPoint, metrics
from offramp.runtime.jobs.data.expected import drop_interval, expected, flops_interval, share
from offramp.runtime.points import full


def test_without_rows_there_is_no_interval():
    none = made_rows(10).take(np.arange(0))
    assert share(0, 0) is None
    assert drop_interval(none.correct[-1], none.correct[-1]) is None
    assert flops_interval(none, full(4), none.flops[-1]) is None
    assert set(expected(none, full(4))["intervals"].values()) == {None}


def test_no_difference_and_one_exit_for_all_are_not_certain():
    rows = made_rows(300)
    found = expected(rows, OperatingPoint((-math.inf,) * 4))
    assert found["exit_shares"][0] == 1.0
    low, high = found["intervals"]["flops_fraction"]
    assert low == pytest.approx(0.25)
    assert 0.25 + 0.75 / 300 < high < 0.25 + 0.75 * 5 / 300
    everybody_right = np.ones(300, bool)
    low, high = drop_interval(everybody_right, everybody_right)
    assert -0.02 < low < 0 < high < 0.02


def test_what_costs_the_same_whatever_the_rows_do_has_no_width():
    found = expected(made_rows(300), full(4))
    assert found["intervals"]["flops_fraction"] == (1.0, 1.0)


def test_rows_of_unequal_length_move_the_share_of_flops_by_what_they_save():
    rows = made_rows(400)
    length = np.random.default_rng(1).integers(1, 50, 400)
    long = labelled(np.stack([z[np.arange(400)] for z in rows.logits]), rows.truth)
    object.__setattr__(long, "flops", rows.flops * length)
    halfway = OperatingPoint((math.inf, -math.inf, -math.inf, -math.inf))
    found = expected(long, halfway)
    # Everybody costs half of its own full cost, so the ratio doesn't vary though the FLOPs do.
    assert found["flops_fraction"] == pytest.approx(0.5)
    low, high = found["intervals"]["flops_fraction"]
    assert low == pytest.approx(0.5)
    assert high < 0.53


def test_figures_are_counted_over_the_rows():
    rows = made_rows(400, seed=4)
    point = OperatingPoint((2.0, 2.0, 2.0, -math.inf), abstain_below=1.0)
    left = [next(j for j, bar in enumerate(point.thresholds) if rows.score[j, i] >= bar) for i in range(400)]
    right = np.array([rows.correct[j, i] for i, j in enumerate(left)])
    kept = np.array([rows.score[j, i] >= 1.0 for i, j in enumerate(left)])
    found = expected(rows, point)
    assert found["rows"] == 400
    assert found["accuracy"] == pytest.approx(right.mean())
    assert found["drop"] == pytest.approx(rows.correct[-1].mean() - right.mean())
    assert found["flops_fraction"] == pytest.approx(np.mean([100 * (j + 1) for j in left]) / 400)
    assert found["coverage"] == pytest.approx(kept.mean())
    assert found["risk"] == pytest.approx(1 - right[kept].mean())
    assert found["exit_shares"] == pytest.approx((np.bincount(left, minlength=4) / 400).tolist())
    assert found["intervals"]["accuracy"] == pytest.approx(metrics.share_interval(int(right.sum()), 400))


def test_where_nothing_is_answered_the_risk_is_not_known():
    found = expected(made_rows(100), OperatingPoint(full(4).thresholds, math.inf))
    assert found["coverage"] == 0
    assert found["risk"] is None
