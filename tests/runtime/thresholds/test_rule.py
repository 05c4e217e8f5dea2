"""The leave rule, against a plain oracle: one for the gate, the metrics, the searches and the jobs."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import InputError, OperatingPoint, metrics, thresholds
from offramp.runtime.gate import Gate

number = st.one_of(st.floats(-8, 8, width=32), st.sampled_from([0.0, 3.0, -3.0, math.nan, math.inf, -math.inf]))
bar = st.one_of(st.floats(-8, 8), st.sampled_from([0.0, 3.0, math.inf, -math.inf]))


def oracle(scores, bars):
    """The exit of one row, with Python floats."""
    for j, (score, threshold) in enumerate(zip(scores, bars, strict=True)):
        if threshold == -math.inf or (threshold != math.inf and score >= threshold):
            return j
    return len(bars) - 1


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_rows_leave_where_the_oracle_says_nan_and_infinities_too(data):
    exits, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 20))
    scores = np.array(
        data.draw(st.lists(st.lists(number, min_size=rows, max_size=rows), min_size=exits, max_size=exits)), np.float32
    ).reshape(exits, rows)
    bars = (*data.draw(st.lists(bar, min_size=exits - 1, max_size=exits - 1)), -math.inf)
    want = [oracle(scores[:, i].tolist(), bars) for i in range(rows)]
    assert thresholds.leave_at(scores, bars).tolist() == want
    gate, playing, got = Gate(OperatingPoint(bars), exits), np.arange(rows), [-1] * rows
    for j in range(exits):
        leave = gate.decide(j, np.zeros(len(playing), np.int64), scores[j, playing]).leave
        for row in playing[leave]:
            got[row] = j
        playing = playing[~leave]
    assert got == want


@pytest.mark.parametrize("rows", [3, 300])
def test_everybody_leaves_at_minus_infinity_a_row_without_a_score_too(rows):
    scores = np.full((2, rows), np.nan, np.float32)
    assert thresholds.leave_at(scores, (-math.inf, -math.inf)).tolist() == [0] * rows
    assert thresholds.leave_at(scores, (-1e9, -math.inf)).tolist() == [1] * rows


def test_the_f1_of_leaving_counts_whom_the_rule_lets_leave():
    correct = np.array([[1, 0, 1], [1, 1, 1]], bool)
    scores = np.array([[2.0, 1.0, 0.0], [5.0, 5.0, 5.0]])
    assert metrics.eef1(scores, correct, (-math.inf, -math.inf))[0] == pytest.approx(2 * 2 / (3 + 2))
    assert metrics.eef1(scores, correct, (math.inf, -math.inf))[0] == 0.0


def test_thresholds_of_another_number_or_nan_are_refused():
    for bars in ((1.0,), (math.nan, 0.0)):
        with pytest.raises(InputError, match="expected 2 numbers, none of them NaN"):
            thresholds.leave_at(np.zeros((2, 4)), bars)
