"""What a point promises is read in one place, and held against what was seen."""

import math

import pytest
from offramp.runtime import OperatingPoint, metrics
from offramp.runtime.jobs.calibrating.promises import Promised, held, promised


def point(**provenance):
    return OperatingPoint((-math.inf,), provenance=provenance)


def test_measured_and_guaranteed_drops_are_one_promise():
    assert promised(point()) == Promised(None, None, None)
    assert promised(point(target={"drop": 0.02})).drop == promised(point(target={"epsilon": 0.02})).drop == 0.02
    assert promised(point(abstention={"risk": 0.05, "feasible": False})).risk is None, "can't be kept"
    assert promised(point(target={"share": 0.5}, abstention={"risk": 0.05})) == Promised(0.05, None, 0.5)


@pytest.mark.parametrize(("seen", "low", "want"), [(0.01, 0.0, True), (0.03, 0.015, None), (0.03, 0.025, False)])
def test_a_promise_is_broken_only_where_the_whole_interval_is_beyond_it(seen, low, want):
    (line,) = held(point(target={"drop": 0.02}), {"drop": seen, "drop_low": low, "drop_high": 0.05})
    assert line["held"] is want
    assert line["excess"] == pytest.approx(max(0.0, seen - 0.02))


def test_a_risk_without_an_interval_is_judged_by_its_counts():
    (line,) = held(point(abstention={"risk": 0.05}), {"risk": 0.5, "errors_answered": 50, "answered": 100})
    assert line["held"] is False
    assert (line["low"], line["high"]) == metrics.share_interval(50, 100)
    (line,) = held(point(abstention={"risk": 0.05}), {"risk": None})
    assert line["held"] is None
