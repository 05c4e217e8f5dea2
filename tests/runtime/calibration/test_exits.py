import numpy as np
import pytest
from offramp.runtime import calibration, scores, thresholds
from offramp.runtime.errors import InputError
from offramp.runtime.points import OperatingPoint
from offramp.runtime.simulate import simulate


def test_each_exit_is_fitted_on_the_rows_that_reach_it():
    random = np.random.default_rng(0)
    z = random.normal(0, 2, (3, 1000, 4))
    y = random.integers(0, 4, 1000)
    y[:10] = -1
    left = np.repeat([0, 1, 2], [500, 350, 150])
    routing = [random.random((j + 2, 1000)) for j in range(3)]
    found = calibration.fit_exits("platt", z, y, left, aux=[{"routing": r} for r in routing])
    assert [one.name for one in found] == ["platt", "platt", "identity"]
    for j, first in ((0, 0), (1, 500)):
        alone = calibration.get("platt").fit(z[j, first:], y[first:])
        assert found[j].to_dict() == alone.to_dict()
    kernels = calibration.fit_exits("ar_condcal", z, y, left, aux=[{"routing": r} for r in routing], multiple=2.0)
    alone = calibration.get("ar_condcal", multiple=2.0).fit(z[1, 500:], y[500:], aux={"routing": routing[1][:, 500:]})
    assert kernels[1].to_dict() == alone.to_dict()
    assert calibration.fit_exits("platt", z, y, left, least=100)[2].name == "platt"


def test_rows_of_no_use_and_mistakes():
    z = np.zeros((2, 5, 3))
    assert [one.name for one in calibration.fit_exits("platt", z, [-1] * 5, [0] * 5)] == ["identity"] * 2
    with pytest.raises(InputError, match="left"):
        calibration.fit_exits("platt", z, [0] * 5, [2] * 5)
    with pytest.raises(InputError, match="aux"):
        calibration.fit_exits("platt", z, [0] * 5, [0] * 5, aux=[{}])


def test_a_fit_on_all_rows_makes_the_served_ones_worse(shared):
    """CLINC150, exit shares at q = ½: those that reach the last exit are the hard ones."""
    with np.load(shared("golden/clinc150_records.npz")) as archive:
        fit, test = (
            type("Recorded", (), {"logits": archive[f"{part}_logits"], "labels": archive[f"{part}_labels"]})
            for part in ("val", "test")
        )
    for part in (fit, test):
        part.flops = np.broadcast_to(np.arange(1.0, 7.0)[:, None], part.logits.shape[:2])
    score = np.stack([scores.log_odds(z) for z in fit.logits])
    bars = thresholds.thresholds_for_shares(score, thresholds.geometric_shares(6, np.log(0.5)))
    point = OperatingPoint(bars)
    answer = simulate(test, point)
    last = np.flatnonzero(answer.exit == 5)
    right = (answer.label[last] == test.labels[last]).mean()
    every_row = calibration.get("rank_preserving_power").fit(fit.logits[5], fit.labels)
    left = simulate(fit, point).exit
    served = calibration.fit_exits("rank_preserving_power", fit.logits, fit.labels, left, least=40)[5]
    given = {"score": answer.score[last]}
    raw, wrongly, rightly = (
        one.mean() for one in (answer.confidence[last], every_row.confidence(given), served.confidence(given))
    )
    assert (right, raw, wrongly) == pytest.approx((0.482, 0.541, 0.590), abs=2e-3)
    assert right < rightly < wrongly - 0.02
