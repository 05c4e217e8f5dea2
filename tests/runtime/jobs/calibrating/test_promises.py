"""What a point promises is read in one place, and held against what was seen; estimates are no promises."""

import math

import pytest
from offramp.runtime import OperatingPoint, metrics
from offramp.runtime.jobs.calibrating.promises import Promised, estimated, held, overrun, promised


def point(**provenance):
    return OperatingPoint((-math.inf,), provenance=provenance)


def test_measured_and_guaranteed_drops_are_asked_for_alike():
    assert promised(point()) == Promised(None, None, None)
    assert promised(point(target={"drop": 0.02})).drop == promised(point(target={"epsilon": 0.02})).drop == 0.02
    assert promised(point(abstention={"risk": 0.05, "feasible": False})).risk is None, "can't be kept"
    assert promised(point(target={"share": 0.5}, abstention={"risk": 0.05})) == Promised(0.05, None, 0.5)


# What test rows show of "at most 2%": the value seen, its 95% interval, and whether that is a yes (True), a no (False)
# or neither (None).
SHOWN = [
    (0.0197, 0.0122, 0.0318, None),  # within, but the interval isn't: nobody has shown that it holds
    (0.01, 0.005, 0.0199, True),
    (0.01, 0.005, 0.02, True),
    (0.0, 0.0, 0.02, True),
    (-0.01, -0.02, 0.0, True),
    (0.03, 0.015, 0.05, None),
    (0.03, 0.02, 0.05, None),
    (0.03, 0.0201, 0.05, False),
    (None, None, None, None),
    (0.01, None, None, None),
]


@pytest.mark.parametrize(("seen", "low", "high", "want"), SHOWN)
def test_yes_and_no_take_the_whole_interval(seen, low, high, want):
    line = {"drop": seen, "drop_low": low, "drop_high": high}
    (promise,) = held(point(target={"epsilon": 0.02, "delta": 0.1}), line)
    (estimate,) = estimated(point(target={"drop": 0.02}), line)
    assert promise["held"] is want
    assert estimate["within"] is want
    for one in (promise, estimate):
        assert (one["target"], one["seen"], one["low"], one["high"]) == (0.02, seen, low, high)
        assert one["excess"] == (None if seen is None else pytest.approx(max(0.0, seen - 0.02)))


def test_only_what_was_certified_is_a_promise():
    measured = [{"share": 0.5}, {"ms": 3.0}, {"drop": 0.01}]
    for target in measured:
        assert held(point(target=target), {}) == []
        assert len(estimated(point(target=target), {})) == 1
    assert estimated(point(target={"epsilon": 0.01}, abstention={"risk": 0.05}), {}) == []
    assert [one["promise"] for one in held(point(target={"epsilon": 0.01}, abstention={"risk": 0.05}), {})] == [
        "risk among the answered",
        "accuracy drop",
    ]
    nothing = point(target={"epsilon": 0.01}, feasible=False, abstention={"risk": 0.05, "feasible": False})
    assert held(nothing, {}) == [], "what can't be promised isn't"


def test_a_budget_is_held_against_the_cost_that_it_is_about():
    line = {"flops_fraction": 0.4, "flops_fraction_low": 0.39, "flops_fraction_high": 0.41}
    line |= {"ms_fraction": 0.6, "ms_fraction_low": 0.59, "ms_fraction_high": 0.61}
    (by_flops,) = estimated(point(target={"share": 0.5}, flops_fraction=0.4), line)
    (by_time,) = estimated(point(target={"share": 0.5}, ms_fraction=0.4), line)
    assert (by_flops["estimate"], by_flops["within"]) == ("FLOPs", True)
    assert (by_time["estimate"], by_time["within"]) == ("time", False)


def test_a_promise_says_how_it_was_tested():
    tested = {"rows": 800, "answered": 700, "errors": 7, "bound": 0.018, "method": "sgr", "tested_for": 3}
    (line,) = held(point(abstention={"risk": 0.02, "delta": 0.1, "level": 0.05, **tested}), {})
    assert {key: line[key] for key in ("delta", "level", "test", "tested", "errors", "answered", "bound")} == {
        "delta": 0.1, "level": 0.05, "test": "sgr", "tested": 3, "errors": 7, "answered": 700, "bound": 0.018,
    }  # fmt: skip
    guaranteed = point(target={"epsilon": 0.02, "delta": 0.1}, rows=800, lost=3, gained=1, tested=5, method="ltt")
    (line,) = held(guaranteed, {})
    assert (line["level"], line["tested"], line["lost"], line["gained"], line["errors"]) == (0.1, 5, 3, 1, None)


def test_a_risk_without_an_interval_is_judged_by_its_counts():
    (line,) = held(point(abstention={"risk": 0.05}), {"risk": 0.5, "errors_answered": 50, "answered": 100})
    assert line["held"] is False
    assert (line["low"], line["high"]) == metrics.share_interval(50, 100)
    (line,) = held(point(abstention={"risk": 0.05}), {"risk": None})
    assert line["held"] is None


@pytest.mark.parametrize(
    ("seen", "low", "high", "said"),
    [
        (4 / 600, 0.001, 0.015, "0.667% on 600 rows that decided nothing, more than the 0.5% asked for, within their"),
        (0.03, 0.02, 0.04, "3% on 600 rows that decided nothing, more than the 0.5% asked for, beyond their"),
        (0.0050001, 0.001, 0.015, "0.50001% on"),
        (0.005, 0.001, 0.015, None),
        (-0.01, -0.02, 0.0, None),
        (None, None, None, None),
    ],
)
def test_a_drop_above_what_was_asked_is_said_with_its_rows_and_noise(seen, low, high, said):
    line = {"drop": seen, "drop_low": low, "drop_high": high}
    (estimate,) = estimated(point(target={"drop": 0.005}), line)
    found = overrun(estimate, 600)
    assert found is None if said is None else found.startswith(f"its accuracy drop was {said}")
    assert said is None or found.endswith("noise; `offramp calibrate … --guarantee` promises a drop.")


def test_only_a_drop_is_said_to_overrun():
    (estimate,) = estimated(point(target={"share": 0.5}), {"flops_fraction": 0.6})
    assert overrun(estimate, 100) is None
