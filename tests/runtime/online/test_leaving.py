"""Exit thresholds derived again: from one half of the rows that were run to the end, tried on the other."""

import numpy as np
import pytest
from offramp.runtime import InputError, OperatingPoint
from offramp.runtime.online.contest import KEEPS_PROMISE, ORIGIN
from offramp.runtime.online.leaving import Aim, rederive
from offramp.runtime.thresholds import leave_at
from served_rows import made_up, served

BARS = (4.0, 4.0, -np.inf)
FLOPS = (1.0, 2.0, 3.0)
USUAL = {"expected": {"exit_shares": [0.2, 0.1, 0.7], "drop": 0.01}}


def point(**changes):
    return OperatingPoint(BARS, name="balanced", **changes)


def drifted(rows=8000, sharp=2.0, shadow=0.5, seed=1):
    """Scores twice as large as at calibration, so that rows leave too early."""
    logits, label = made_up(rows, sharp=sharp, seed=seed)
    return served(logits, label, BARS, shadow=shadow, labelled=0.6, seed=seed)


def test_shares_are_held_anew_and_the_promise_is_kept_on_other_rows():
    promise = {"risk": 0.4, "delta": 0.05, "feasible": True}
    incumbent = point(**USUAL, provenance={KEEPS_PROMISE: promise}, abstain_below=-5.0)
    found = rederive(drifted(), incumbent, FLOPS, Aim.of("shares", incumbent, 1))
    assert found.kind == "propose"
    fresh, label = made_up(8000, sharp=2.0, seed=9)
    score = served(fresh, label, BARS).score
    left = leave_at(score, found.point.thresholds)
    assert np.bincount(left) / 8000 == pytest.approx([0.2, 0.1, 0.7], abs=0.03)
    before, after = found.numbers["accuracy"]
    assert after > before
    assert found.numbers["flops_fraction"][1] > found.numbers["flops_fraction"][0]
    moved = served(fresh, label, found.point.thresholds)
    answered = moved.log_odds(found.point) >= found.point.abstain_below
    assert answered.mean() > 0.8
    assert (~moved.correct)[answered].mean() < 0.4
    assert found.point.provenance[ORIGIN]["hold"] == "shares"
    assert found.point.provenance[KEEPS_PROMISE]["level"] == pytest.approx(0.05 * 6 / np.pi**2)


def test_a_drop_and_a_promised_one_are_held():
    window = drifted()
    target = {"target": {"kind": "max-drop", "drop": 0.02}}
    found = rederive(window, point(provenance=target), FLOPS, Aim.of("drop", point(provenance=target), 1))
    assert found.kind == "propose"
    assert found.numbers["flops_fraction"][1] < 1
    promised = point(provenance={"target": {"kind": "guarantee", "epsilon": 0.08, "delta": 0.05}})
    found = rederive(window, promised, FLOPS, Aim.of("risk", promised, 2))
    assert found.kind == "propose"
    assert found.numbers["turn"] == 2


def test_what_nothing_holds_is_refused():
    strict = point(provenance={"target": {"kind": "guarantee", "epsilon": 1e-6, "delta": 0.05}})
    found = rederive(drifted(), strict, FLOPS, Aim.of("risk", strict, 1))
    assert found.kind == "refuse"
    assert found.numbers["reason"] == "No thresholds are seen to hold the risk."


def test_a_promise_that_no_threshold_keeps_ends_in_abstention():
    incumbent = point(**USUAL, provenance={KEEPS_PROMISE: {"risk": 1e-4, "delta": 0.05}})
    found = rederive(drifted(), incumbent, FLOPS, Aim.of("shares", incumbent, 1))
    assert found.point.abstain_below == np.inf
    assert not found.numbers["abstention"]["feasible"]
    assert found.numbers["abstention"]["bound"] is None


def test_a_rule_that_is_worse_and_costs_no_less_is_refused():
    # Here the first exit is the best one, and its share is to be nothing.
    logits, label = made_up(8000, seed=3)
    window = served(logits[::-1].copy(), label, (-50.0, np.inf, -np.inf), shadow=1.0)
    incumbent = OperatingPoint((-50.0, np.inf, -np.inf), name="balanced", expected={"exit_shares": [0.0, 0.0, 1.0]})
    found = rederive(window, incumbent, FLOPS, Aim.of("shares", incumbent, 1))
    assert found.kind == "refuse"
    assert "are less accurate" in found.numbers["reason"]


def test_mistakes_are_named():
    with pytest.raises(InputError, match="hold is 'speed'"):
        Aim.of("speed", point(), 1)
    with pytest.raises(InputError, match="hold is 'risk', but the bundle's calibration says nothing"):
        Aim.of("risk", point(**USUAL), 1)
    with pytest.raises(InputError, match=r"rows have all exits known: .*Shadow runs and labels make more"):
        rederive(drifted(300), point(**USUAL), FLOPS, Aim.of("shares", point(**USUAL), 1))
