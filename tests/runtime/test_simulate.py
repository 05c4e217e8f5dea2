import math
from types import SimpleNamespace

import numpy as np
import pytest
from offramp.runtime import calibration, scores
from offramp.runtime.errors import InputError
from offramp.runtime.points import OperatingPoint
from offramp.runtime.simulate import simulate


def recorded(rows=400, exits=3, classes=5, seed=0):
    random = np.random.default_rng(seed)
    logits = random.normal(0, 3, (exits, rows, classes)).astype(np.float32)
    return SimpleNamespace(
        logits=logits,
        flops=np.cumsum(random.integers(10, 20, (exits, rows)), axis=0),
        routing=random.random((4, rows)).astype(np.float32),
    )


def one_row(records, i, bars, abstain_below, calibrators):
    """The walk of a single row."""
    for j, bar in enumerate(bars):
        z = records.logits[j][i : i + 1]
        score = scores.log_odds(z)
        if bar != np.inf and (score[0] >= bar or j == len(bars) - 1):
            odds = calibrators[j].score({"logits": z, "score": score, "routing": records.routing[:, i : i + 1]})[0]
            return j, z.argmax(), score[0], odds, odds < abstain_below, records.flops[j, i]
    raise AssertionError("the last exit always answers")


@pytest.mark.parametrize("bars", [(2.0, 1.0), (np.inf, 0.5), (np.inf, np.inf), (-np.inf, 0.0)])
@pytest.mark.parametrize("names", [("identity",) * 3, ("temperature", "ar_condcal", "rank_preserving_power")])
def test_every_row_is_answered_as_if_it_came_alone(bars, names):
    records = recorded()
    labels = np.random.default_rng(1).integers(0, 5, 400)
    calibrators = tuple(
        calibration.get(name).fit(z, labels, aux={"routing": records.routing})
        for name, z in zip(names, records.logits, strict=True)
    )
    thresholds = (*bars, -np.inf)
    point = OperatingPoint(thresholds, 0.1, calibrators=calibrators)
    found = simulate(records, point)
    for i in range(0, 400, 7):
        exit_, label, score, odds, abstain, flops = one_row(records, i, thresholds, 0.1, calibrators)
        assert (found.exit[i], found.label[i], found.flops[i]) == (exit_, label, flops)
        assert found.score[i] == score
        assert found.log_odds[i] == pytest.approx(odds, abs=1e-9)
        assert found.confidence[i] == pytest.approx(scores.sigmoid(odds), abs=1e-9)
        assert found.abstain[i] == abstain


def test_recorded_scores_are_taken_as_they_are():
    records = recorded()
    records.score = np.stack([scores.log_odds(z) for z in records.logits])
    records.label = records.logits.argmax(2)
    again = simulate(records, OperatingPoint((2.0, 1.0, -np.inf)))
    fresh = simulate(recorded(), OperatingPoint((2.0, 1.0, -np.inf)))
    for name in ("exit", "label", "score", "confidence", "flops"):
        np.testing.assert_array_equal(getattr(again, name), getattr(fresh, name))


def test_each_exit_sees_only_the_routing_layers_it_has_run():
    records = recorded()
    labels = records.logits[0].argmax(1)
    calibrators = tuple(
        calibration.get("ar_condcal").fit(records.logits[j], labels, aux={"routing": records.routing[: j + 2]})
        for j in range(3)
    )
    point = OperatingPoint((3.0, 2.0, -np.inf), calibrators=calibrators)
    found = simulate(records, point, routing_layers=(2, 3, 4))
    for j in range(3):
        rows = found.exit == j
        given = {"score": found.score[rows], "routing": records.routing[: j + 2, rows]}
        np.testing.assert_allclose(found.log_odds[rows], calibrators[j].score(given))
    with pytest.raises(InputError, match="routing_layers"):
        simulate(records, point, routing_layers=(2, 3))
    del records.routing
    with pytest.raises(InputError, match="wasn't recorded"):
        simulate(records, point)


def test_no_rows_and_many_rows_are_fine():
    assert len(simulate(recorded(0), OperatingPoint((1.0, 1.0, -np.inf)))) == 0
    many = recorded(40_000, 2, 3)
    found = simulate(many, OperatingPoint((1.0, -np.inf)))
    expected = np.where(scores.log_odds(many.logits[0]).astype(float) >= 1.0, 0, 1)
    np.testing.assert_array_equal(found.exit, expected)


def test_it_equals_the_cascade_on_a_real_bundle(digits):
    from offramp.runtime import Cascade
    from offramp.runtime.sample import heldout

    cascade = Cascade.load(digits)
    inputs = {cascade.manifest.inputs[0].name: heldout()[0]}
    records = cascade.record(inputs)
    middle = [float(np.median(s)) for s in records.score[:-1]]
    for bars in (middle, [np.inf] * len(middle), [-1.0] * len(middle)):
        point = OperatingPoint((*bars, -np.inf), abstain_below=1.0)
        answer, found = cascade.at(point).predict(inputs), simulate(records, point)
        np.testing.assert_array_equal(found.exit, answer.exit)
        np.testing.assert_array_equal(found.label, answer.label)
        np.testing.assert_array_equal(found.flops, answer.flops)
        np.testing.assert_array_equal(found.abstain, answer.abstain)
        np.testing.assert_allclose(found.score, answer.score, rtol=1e-4, atol=1e-4)


def test_a_row_without_a_score_has_no_label_wherever_it_leaves():
    """Logits of one's own have no recorded label, and the arg max of a NaN is an index like any other."""
    logits = np.array([[[np.nan, 1.0], [2.0, 0.0]], [[np.nan, 0.0], [0.0, 3.0]]])
    records = SimpleNamespace(logits=logits, flops=np.array([[1, 1], [2, 2]]))
    early = simulate(records, OperatingPoint((-math.inf, -math.inf)))
    assert (early.exit.tolist(), early.label.tolist()) == ([0, 0], [-1, 0])
    late = simulate(records, OperatingPoint((5.0, -math.inf)))
    assert (late.exit.tolist(), late.label.tolist()) == ([1, 1], [-1, 1])
    assert late.abstain.tolist() == [True, False]
