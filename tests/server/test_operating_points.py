"""A server's operating points: chosen by name and last exit, over the same sessions, told as they are."""

import json
import math

import numpy as np
import pytest
from offramp.runtime import Cascade, InputError, OperatingPoint, sample
from offramp.server.operating_points import OperatingPoints

X = sample.heldout()[0][:40]


@pytest.fixture(scope="module")
def cascade():
    with Cascade.load(sample.BUNDLE, threads=1, operating_point="balanced") as cascade:
        yield cascade


@pytest.fixture
def points(cascade):
    return OperatingPoints(cascade)


def test_a_request_that_names_nothing_gets_the_servers_point_to_the_end(points):
    assert points.choose(None, None) == ("balanced", 2)
    assert points.choose("full", None) == ("full", 2)
    assert points.choose(None, 0) == ("balanced", 0)


@pytest.mark.parametrize(
    ("name", "max_exit", "message"),
    [
        ("quick", None, r"operating_point is 'quick', expected one of \[.*'full'"),
        ("", None, "operating_point is ''"),
        (None, 3, r"max_exit is 3, expected 0 to 2 \(the exits"),
        (None, -1, "max_exit is -1, expected 0 to 2"),
    ],
)
def test_what_there_is_none_of_is_named(points, name, max_exit, message):
    with pytest.raises(InputError, match=message):
        points.choose(name, max_exit)


@pytest.mark.parametrize("last", [0, 1, 2])
def test_nobody_goes_past_the_last_exit_and_the_others_stay_where_they_left(cascade, points, last):
    free, held = cascade.predict({"x": X}), points.cascade("balanced", last).predict({"x": X})
    np.testing.assert_array_equal(held.exit, np.minimum(free.exit, last))
    stay = free.exit <= last
    np.testing.assert_array_equal(held.label[stay], free.label[stay])


@pytest.mark.parametrize("name", ["full", "balanced", "fast"])
@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_request_that_stops_early_is_as_sure_as_the_runtime_is(cascade, points, name, last):
    held, own = points.cascade(name, last).predict({"x": X}), cascade.at(name).predict({"x": X}, max_exit=last)
    np.testing.assert_allclose(held.confidence, own.confidence, atol=1e-6)
    np.testing.assert_array_equal(held.abstain, own.abstain)


def test_a_cascade_is_made_once(points):
    assert points.cascade("full", 1) is points.cascade("full", 1)
    assert points.cascade("full", 1) is not points.cascade("full", 2)


def test_a_point_that_the_bundle_has_not_is_offered_by_its_name(cascade):
    mine = cascade.at(OperatingPoint((math.inf, 1.5, -math.inf), 0.5, "mine", provenance={"by": "hand"}))
    points = OperatingPoints(mine)
    assert points.choose(None, None) == ("mine", 2)
    told = points.describe()
    assert told["operating_point"] == "mine"
    assert set(told["operating_points"]) == {*cascade.calibration.points, "mine"}
    assert told["operating_points"]["mine"] == {
        "thresholds": ["inf", 1.5, "-inf"],
        "abstain_below": 0.5,
        "expected": {},
        "provenance": {"by": "hand"},
    }
    json.dumps(told, allow_nan=False)
