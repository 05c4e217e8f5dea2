import numpy as np
import pytest
from offramp.runtime import calibration, metrics, scores
from offramp.runtime.online.bound import betting_bound
from offramp.runtime.online.gauges import measure
from offramp.runtime.points import OperatingPoint
from served_rows import made_up, served

BARS = (2.0, 2.0, -np.inf)


@pytest.fixture(scope="module")
def rows():
    return made_up(20_000, sharp=1.4, seed=6)


def in_force(logits, label):
    left = served(logits, label, BARS).exit
    return OperatingPoint(BARS, calibrators=calibration.fit_exits("rank_preserving_power", logits, label, left))


def test_every_gauge_is_the_offline_figure_of_the_same_rows(rows):
    logits, label = rows
    point = in_force(logits, label)
    abstained = np.arange(20_000) % 7 == 0
    window = served(logits, label, BARS, abstained=abstained)
    found = measure(window, point, coverages=(0.5, 0.9))
    left = window.exit
    everything = np.arange(20_000)
    answer = logits.argmax(axis=2)[left, everything]
    score = np.stack([scores.log_odds(z) for z in logits])
    odds = np.array([point.calibrators[left[i]].score({"score": score[left[i], i : i + 1]})[0] for i in range(2000)])
    assert window.take(np.arange(2000)).log_odds(point) == pytest.approx(odds, abs=1e-6)
    odds = window.log_odds(point)
    assert (found.rows, found.labelled, found.complete) == (20_000,) * 3
    assert found.coverage == pytest.approx((~abstained).mean(), abs=1e-6)
    wrong = answer != label
    assert found.selective_risk == pytest.approx(wrong[~abstained].mean(), abs=1e-6)
    counts = (~wrong & ~abstained).sum(), (wrong & ~abstained).sum()
    assert found.selective_risk_bound == pytest.approx(float(betting_bound(*counts)), abs=1e-6)
    assert found.aurc == pytest.approx(metrics.aurc(odds, wrong), abs=1e-6)
    for c in (0.5, 0.9):
        assert found.risk_at_coverage[c] == pytest.approx(metrics.risk_at_coverage(odds, wrong, c), abs=1e-6)
    correct = logits.argmax(axis=2) == label
    assert found.eefp == pytest.approx(metrics.eefp(score, correct), abs=1e-6, nan_ok=True)
    for j in range(3):
        here = left >= j
        confidence = point.calibrators[j].confidence({"score": score[j, here]})
        assert found.confce_corr[j] == pytest.approx(metrics.confce_corr(confidence, correct[j, here]), abs=1e-6)
        assert found.ece[j] == pytest.approx(metrics.ece(confidence, correct[j, here]), abs=1e-6)


def test_weights_undo_how_rows_were_sampled(rows):
    """Labels asked for by confidence, shadow runs for a third: the figures are near those of all rows."""
    logits, label = rows
    point = in_force(logits, label)
    full = served(logits, label, BARS)
    every = measure(full, point)
    asked = np.where(full.log_odds(point) < 0.3, 0.9, 0.25)
    known = np.where(np.random.default_rng(5).random(20_000) < asked, label, -1)
    found = measure(served(logits, known, BARS, shadow=0.33, asked=asked), point)
    assert found.labelled == (known >= 0).sum()
    plain = measure(served(logits, known, BARS), point)
    for name, near in (("selective_risk", 0.015), ("aurc", 0.015), ("eefp", 0.02), ("ece", 0.02)):
        assert getattr(found, name) == pytest.approx(getattr(every, name), abs=near, nan_ok=True)
    assert plain.selective_risk > every.selective_risk + 0.05
    assert plain.aurc > every.aurc + 0.03


def test_the_bound_is_about_the_version_in_force(rows):
    logits, label = rows
    window = served(logits, label, BARS, version=3)
    assert measure(window, OperatingPoint(BARS), version=4).selective_risk_bound == 1
    assert measure(window, OperatingPoint(BARS), version=3).selective_risk_bound < 1


def test_nothing_known_is_nothing_said(rows):
    logits, _ = rows
    window = served(logits[:, :20], np.full(20, -1), BARS)
    for one in (window, window.take(np.arange(0))):
        found = measure(one, OperatingPoint(BARS))
        assert np.isnan([found.selective_risk, found.aurc, *found.ece, *found.eefp, *found.confce_corr]).all()
        assert found.selective_risk_bound == 1
