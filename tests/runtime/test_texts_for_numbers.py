"""Texts where numbers belong are refused with one sentence that names the parameter: nothing parses them by chance."""

import numpy as np
import pytest
from offramp.runtime import Cascade, InputError, calibration, metrics, sample, scores, thresholds

RNG = np.random.default_rng(0)
PROBABILITIES, LABELS = RNG.dirichlet(np.ones(3), 12), RNG.integers(0, 3, 12)
SCORES, RIGHT = RNG.standard_normal((3, 12)), RNG.random((3, 12)) < 0.5
FLOPS = np.cumsum(np.ones((3, 12)), axis=0)
BARS = np.array(["0.5", "1", "-inf"])

CALLS = {
    "probabilities": lambda: metrics.ece(PROBABILITIES.astype(str), LABELS),
    "labels": lambda: metrics.nll(PROBABILITIES, LABELS.astype(str)),
    "bins": lambda: metrics.ece(PROBABILITIES, LABELS, bins="15"),
    "score": lambda: metrics.aurc(SCORES[0].astype(str), ~RIGHT[0]),
    "error": lambda: metrics.aurc(SCORES[0], RIGHT[0].astype(str)),
    "thresholds": lambda: metrics.eef1(SCORES, RIGHT, BARS),
    "thresholds ": lambda: metrics.eef1(SCORES, RIGHT, "0.5"),
    "thresholds  ": lambda: thresholds.leave_at(SCORES, BARS),
    "thresholds   ": lambda: metrics.eef1(SCORES, RIGHT, BARS.astype(object)),
    "loss": lambda: metrics.expected_loss(LABELS, LABELS, np.eye(3).astype(str)),
    "scores": lambda: thresholds.exit_share(SCORES.astype(str), FLOPS, budget=0.5),
    "flops": lambda: thresholds.exit_share(SCORES, FLOPS.astype(str), budget=0.5),
    "budget": lambda: thresholds.exit_share(SCORES, FLOPS, budget="0.5"),
    "shares": lambda: thresholds.thresholds_for_shares(SCORES, ["0.5", "0.25", "0.25"]),
    "risk": lambda: thresholds.sgr(SCORES[0], ~RIGHT[0], risk="0.05", delta=0.05),
    "delta": lambda: thresholds.sgr(SCORES[0], ~RIGHT[0], risk=0.05, delta="5%"),
    "delta ": lambda: thresholds.sgr(SCORES[0], ~RIGHT[0], risk=0.05, delta=None),
    "coverage": lambda: metrics.risk_at_coverage(SCORES[0], ~RIGHT[0], coverage="0.8"),
    "confidence": lambda: metrics.share_interval(3, 10, confidence="0.95"),
    "routing": lambda: metrics.routing.profile(RNG.random((2, 12)).astype(str)),
    "log_odds": lambda: scores.sigmoid("0.5"),
    "logits": lambda: calibration.get("temperature").fit(PROBABILITIES.astype(str), LABELS),
    "labels ": lambda: calibration.get("temperature").fit(PROBABILITIES, LABELS.astype(str)),
    "threads": lambda: Cascade.load(sample.BUNDLE, threads="2"),
    "batch_rows": lambda: Cascade.load(sample.BUNDLE, batch_rows="2"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_text_for_a_number_is_refused_by_the_parameters_name(name):
    with pytest.raises(InputError, match=rf"^{name.strip()}\b.* expected ") as raised:
        CALLS[name]()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("option", "value"), [("deadline", "1"), ("max_exit", "1"), ("fetch", "everything")])
def test_an_option_of_predict_is_refused_by_its_name(option, value):
    with Cascade.load(sample.BUNDLE) as cascade, pytest.raises(InputError, match=rf"^{option} .*expected"):
        cascade.predict({"x": sample.heldout()[0][:2]}, **{option: value})
