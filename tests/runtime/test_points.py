"""An operating point is a rule that always answers; what isn't one is refused by the point's name."""

import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from offramp.runtime import InputError, OperatingPoint, calibration
from offramp.runtime.points import full
from offramp.runtime.thresholds.rule import effective

INF = math.inf
BARS = st.lists(st.floats(allow_nan=False), max_size=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thresholds": ()}, "'mine': expected one threshold an exit"),
        ({"thresholds": (math.nan, -INF)}, "'mine': expected one threshold an exit, none of them NaN"),
        ({"thresholds": (1.0, 2.0)}, "'mine': the last threshold is 2.0, expected -inf.*given 2 thresholds"),
        ({"thresholds": (1.0, INF)}, "'mine': the last threshold is inf, expected -inf"),
        ({"thresholds": (math.nan,)}, "none of them NaN"),
        ({"thresholds": ("high", -INF)}, r"'mine': thresholds is \('high', -inf\), expected numbers, one an exit"),
        ({"thresholds": ("0.5", -INF)}, r"thresholds is \('0.5', -inf\), expected numbers"),
        ({"thresholds": "0.5"}, "'mine': thresholds is '0.5', expected numbers, one an exit"),
        ({"thresholds": b"05"}, "thresholds is b'05', expected numbers"),
        ({"thresholds": np.array(["0.5", "-inf"])}, "thresholds is array.*, expected numbers"),
        ({"thresholds": np.array(["0.5", "-inf"], object)}, "thresholds is array.*, expected numbers"),
        ({"thresholds": (True, -INF)}, "thresholds is .*, expected numbers"),
        ({"thresholds": (None, -INF)}, "expected numbers, one an exit"),
        ({"thresholds": 3.0}, "thresholds is 3.0, expected numbers, one an exit"),
        ({"abstain_below": "never"}, "'mine': abstain_below is 'never', expected a number"),
        ({"abstain_below": "0.5"}, "'mine': abstain_below is '0.5', expected a number"),
        ({"abstain_below": None}, "'mine': abstain_below is None, expected a number"),
        ({"abstain_below": math.nan}, "'mine': abstain_below is NaN"),
        ({"calibrators": (calibration.get("identity"),)}, "'mine': 1 calibrators for 2 exits"),
    ],
)
def test_what_is_no_rule_is_refused_by_its_name(options, message):
    with pytest.raises(InputError, match=message):
        OperatingPoint(**{"thresholds": (1.0, -INF), "name": "mine", **options})


@given(BARS)
def test_any_numbers_before_the_last_exit_are_a_rule(bars):
    point = OperatingPoint([*bars, "-inf"])
    assert point.thresholds == (*map(effective, bars), -INF)
    assert all(type(bar) is float for bar in point.thresholds)
    assert point.exits == tuple(j for j, bar in enumerate([*map(effective, bars), -INF]) if bar < INF)
    assert hash(point) == hash(OperatingPoint((*bars, -INF)))


@given(BARS, st.data())
def test_stopping_earlier_keeps_the_rule_up_to_there_and_nothing_that_was_measured(bars, data):
    point = OperatingPoint(
        (*bars, -INF), 0.5, "mine", expected={"accuracy": 0.9}, provenance={"target": {"kind": "budget"}}
    )
    last = data.draw(st.integers(0, len(bars)))
    short = point.stopping_at(last)
    assert short.thresholds[:last] == point.thresholds[:last]
    assert set(short.thresholds[last:]) == {-INF}
    assert (short.abstain_below, short.name) == (0.5, "mine")
    if short.thresholds == point.thresholds:
        assert short is point
    else:
        assert (short.expected, short.provenance) == ({}, {})
    assert short.stopping_at(len(bars)).thresholds == short.thresholds


@pytest.mark.parametrize("exit", [-1, 3])
def test_stopping_where_there_is_no_exit_is_refused(exit):
    with pytest.raises(InputError, match=f"exit is {exit}, expected 0 to 2"):
        full(3).stopping_at(exit)


def test_full_runs_to_the_end_and_never_abstains():
    assert full(1).thresholds == (-INF,)
    point = full(3)
    assert (point.name, point.thresholds, point.abstain_below) == ("full", (INF, INF, -INF), -INF)
    assert point.exits == (2,)


def test_what_was_measured_does_not_make_another_rule():
    one = OperatingPoint((1.0, -INF), expected={"accuracy": 0.9})
    assert one == OperatingPoint((1.0, -INF), provenance={"seed": 1})
    assert one != OperatingPoint((1.0, -INF), abstain_below=0.0)


def fitted(seed, name="temperature"):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((200, 3))
    return calibration.get(name).fit(logits, (logits + rng.standard_normal((200, 3))).argmax(1))


@pytest.mark.parametrize("name", ["temperature", "isotonic", "vector"])
def test_points_are_equal_by_value_calibrators_included_and_can_be_keys(name):
    def point(seed):
        return OperatingPoint((1.0, -INF), calibrators=(fitted(seed, name), calibration.get("identity")))

    one, again, other = point(1), point(1), point(2)
    assert one == again
    assert hash(one) == hash(again)
    assert one != other
    assert one != OperatingPoint((1.0, -INF))
    assert {one: "x"}[again] == "x"
    stored = calibration.from_dict(json.loads(json.dumps(one.calibrators[0].to_dict())))
    assert stored == one.calibrators[0]
    assert pickle.loads(pickle.dumps(one)) == one


def test_calibrators_of_different_kinds_or_options_differ():
    assert calibration.get("temperature") != calibration.get("identity")
    assert calibration.get("temperature") == calibration.get("temperature")
    assert calibration.get("temperature") != fitted(1)
    assert calibration.get("temperature") != "temperature"
