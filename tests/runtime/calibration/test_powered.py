"""A power of what another calibrator gives."""

import numpy as np
import pytest
from offramp.runtime import calibration, scores
from offramp.runtime.calibration import CwMCS, Powered, RankPreservingPower, ordered_by, same_order
from offramp.runtime.calibration.cwmcs import UNGUARDED
from offramp.runtime.errors import InputError


def draw(seed, rows=3000, classes=5, sharp=1.0):
    """Logits, calibrated at sharp = 1 but for a class in which a third of the rows are wrong, and labels."""
    random = np.random.default_rng(seed)
    z = random.normal(0, 2, (rows, classes))
    label = (z + random.gumbel(size=z.shape)).argmax(axis=1)
    moved = (z.argmax(axis=1) == 0) & (random.random(rows) < 1 / 3)
    return sharp * z, np.where(moved, 1, label)


@pytest.fixture(scope="module")
def first():
    return CwMCS().fit(*draw(0))


def test_the_order_is_that_of_the_first_and_the_confidence_that_of_the_drift(first):
    assert np.ptp(first.temperatures_) > 0.1
    z, label = draw(1, sharp=1.7)
    moved = Powered(first).fit(z, label)
    new, truth = draw(2, rows=20_000, sharp=1.7)
    before, after = (one.score({"logits": new}) for one in (first, moved))
    assert (np.argsort(before, kind="stable") == np.argsort(after, kind="stable")).all()
    right = new.argmax(axis=1) == truth
    gaps = [abs(scores.sigmoid(odds).mean() - right.mean()) for odds in (before, after)]
    assert gaps[0] > 0.02
    assert gaps[1] < 0.01
    assert (moved.apply(new).argmax(axis=1) == new.argmax(axis=1)).all()


def test_it_is_the_power_of_the_score_on_what_changes_nothing():
    z, label = draw(1, sharp=1.7)
    plain = RankPreservingPower().fit(z, label)
    moved = Powered("identity").fit(z, label)
    assert moved.alpha_ == pytest.approx(plain.alpha_, rel=1e-6)
    assert moved.preserves_ranking
    np.testing.assert_allclose(moved.score({"logits": z}), plain.score({"logits": z}), rtol=1e-6)


def test_powers_do_not_pile_up(first):
    once = Powered(first).fit(*draw(1, sharp=1.7))
    twice = Powered(once).fit(*draw(1, sharp=1.7))
    assert twice.first is first
    assert twice.alpha_ == once.alpha_


def test_whose_order_is_whose(first):
    moved, other = Powered(first).fit(*draw(1)), CwMCS().fit(*draw(3))
    assert ordered_by(moved) is first
    assert ordered_by(other) is other
    again = calibration.from_dict(moved.to_dict())
    assert same_order(again, first)
    assert same_order(again, moved)
    assert not same_order(moved, other)
    assert not same_order(moved, RankPreservingPower().fit(*draw(1)))
    assert same_order(Powered("identity"), RankPreservingPower())


def test_a_first_that_moves_labels_is_refused():
    with pytest.raises(InputError, match="first: cwmcs can change a row's label"):
        Powered(CwMCS(mode="class", **UNGUARDED))
    with pytest.raises(InputError, match="expected one of"):
        Powered("nothing")
