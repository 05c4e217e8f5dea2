"""What an operating point is expected to do: plain counts over the rows, with intervals that hold."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_rows import made_rows
from offramp.runtime import OperatingPoint
from offramp.runtime.jobs.data.expected import Z, expected, mean_interval, wilson
from offramp.runtime.points import full


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_ends_are_where_the_count_is_just_two_sided_significant(counted):
    hits, total = counted
    low, high = wilson(hits, total)
    assert 0 <= low < high <= 1
    assert low - 1e-12 <= hits / total <= high + 1e-12
    for end in (low, high):
        assert abs(hits / total - end) == pytest.approx(Z * math.sqrt(end * (1 - end) / total), abs=1e-7)


def test_without_rows_there_is_no_interval():
    assert wilson(0, 0) is None
    assert mean_interval(np.array([1.0])) is None
    assert mean_interval(np.array([])) is None


def test_the_interval_of_a_mean_is_z_standard_errors_wide():
    low, high = mean_interval(np.array([1.0, 2.0, 3.0, 4.0]))
    assert (low + high) / 2 == pytest.approx(2.5)
    assert high - low == pytest.approx(2 * Z * math.sqrt(5 / 3 / 4))


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
    assert found["intervals"]["accuracy"] == pytest.approx(wilson(int(right.sum()), 400))


def test_where_nothing_is_answered_the_risk_is_not_known():
    found = expected(made_rows(100), OperatingPoint(full(4).thresholds, math.inf))
    assert found["coverage"] == 0
    assert found["risk"] is None
