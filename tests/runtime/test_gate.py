"""decide is the rule of the design, row by row, against a slow plain-Python oracle."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import InputError, OperatingPoint
from offramp.runtime.gate import Gate

number = st.one_of(st.floats(-8, 8, width=32), st.sampled_from([0.0, 3.0, -3.0]))
threshold = st.one_of(number, st.just(math.inf), st.just(-math.inf))


def oracle(scores, thresholds, abstain_below):
    """(exit, abstain) of one row, with Python floats."""
    for j, (score, bar) in enumerate(zip(scores, thresholds, strict=True)):
        if j == len(thresholds) - 1 or score >= bar:
            return j, not score >= abstain_below
    raise AssertionError


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_rows_leave_at_the_first_exit_whose_score_reaches_its_threshold(data):
    exits, rows = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 6))
    scores = np.array(
        data.draw(st.lists(st.lists(number, min_size=rows, max_size=rows), min_size=exits, max_size=exits)), np.float32
    ).reshape(exits, rows)
    thresholds = (*data.draw(st.lists(threshold, min_size=exits - 1, max_size=exits - 1)), -math.inf)
    below = data.draw(threshold)
    gate = Gate(OperatingPoint(thresholds, below), exits)
    playing, got = np.arange(rows), {}
    for j in range(exits):
        decision = gate.decide(j, np.zeros(len(playing), np.int64), scores[j, playing])
        for row, leave, abstain in zip(playing, decision.leave, decision.abstain, strict=True):
            if leave:
                got[int(row)] = (j, bool(abstain))
        playing = playing[~decision.leave]
    assert got == {i: oracle([float(s) for s in scores[:, i]], thresholds, below) for i in range(rows)}


def test_a_score_equal_to_its_threshold_leaves_however_float32_rounds():
    gate = Gate(OperatingPoint((0.1, -math.inf)), 2)
    at, under = np.float32(0.1), np.nextafter(np.float32(0.1), np.float32(0))
    # float32(0.1) is above 0.1, the float below is under it.
    assert gate.decide(0, np.zeros(2, int), np.array([at, under])).leave.tolist() == [True, False]


def test_confidence_is_the_probability_behind_the_log_odds():
    decision = Gate(OperatingPoint((-math.inf,)), 1).decide(0, np.zeros(3, int), np.array([0.0, 2.0, -1.0]))
    np.testing.assert_allclose(decision.confidence, [0.5, 1 / (1 + math.exp(-2)), 1 / (1 + math.e)])


def test_nan_never_leaves_early_and_always_abstains():
    gate = Gate(OperatingPoint((-1.0, -math.inf), abstain_below=-math.inf), 2)
    score = np.array([np.nan, 5.0], np.float32)
    assert gate.decide(0, np.zeros(2, int), score).leave.tolist() == [False, True]
    last = gate.decide(1, np.zeros(2, int), score)
    assert last.leave.tolist() == [True, True]
    assert last.abstain.tolist() == [True, False]


def test_stopping_at_an_exit_answers_everybody_there_a_nan_too():
    point = OperatingPoint((2.0, 1.0, -math.inf), 0.5, expected={"accuracy": 1.0})
    short = point.stopping_at(1)
    assert (short.thresholds, short.abstain_below, dict(short.expected)) == ((2.0, -math.inf, -math.inf), 0.5, {})
    assert point.stopping_at(2) is point
    assert Gate(short, 3).decide(1, np.zeros(2, int), np.array([np.nan, -9.0])).leave.all()
    with pytest.raises(InputError, match="exit is 3, expected 0 to 2"):
        point.stopping_at(3)


@pytest.mark.parametrize(
    ("thresholds", "below", "message"),
    [
        ((), 0.0, "one threshold an exit"),
        ((1.0, math.nan, -math.inf), 0.0, "none of them NaN"),
        ((1.0, -math.inf), math.nan, "abstain_below is NaN"),
        ((1.0, 2.0), 0.0, "the last threshold is 2.0, expected -inf.* It was given 2 thresholds"),
        (("high", -math.inf), 0.0, "expected numbers, one an exit"),
    ],
)
def test_operating_points_that_make_no_sense_are_refused(thresholds, below, message):
    with pytest.raises(InputError, match=message):
        OperatingPoint(thresholds, below)


def test_a_gate_of_another_number_of_exits_is_refused():
    with pytest.raises(InputError, match="has 2 thresholds, the model has 3 exits"):
        Gate(OperatingPoint((1.0, -math.inf)), 3)
