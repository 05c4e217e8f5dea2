import numpy as np
import pytest
from offramp.runtime import thresholds
from offramp.runtime.errors import InputError


def sample(n=3000, seed=0):
    random = np.random.default_rng(seed)
    ease = random.random(n)
    scores = np.stack([ease + random.normal(0, 0.1, n), ease + random.normal(0, 0.05, n), ease])
    return scores, random.random((3, n)) < np.array([[0.9], [1.0], [1.05]]) * np.sqrt(ease)


def test_a_looser_risk_is_served_more_cheaply():
    scores, correct = sample()
    strict, loose = (
        thresholds.joint_choice(scores, scores, correct, [1, 2, 3], risk, min_coverage=0.5) for risk in (0.22, 0.4)
    )
    assert strict.feasible
    assert loose.feasible
    assert loose.cost <= strict.cost < 1
    assert loose.abstain_below < strict.abstain_below


def test_what_is_chosen_is_certified_on_the_other_half():
    scores, correct = sample()
    found = thresholds.joint_choice(scores, scores, correct, [1, 2, 3], 0.2, 0.1, min_coverage=0.5, candidates=5)
    assert found.feasible
    assert found.abstention.coverage >= 0.5
    assert found.abstention.bound <= 0.2
    assert found.abstention.delta == pytest.approx(0.1 / 5)
    assert found.abstain_below == found.abstention.threshold


def test_a_risk_nobody_can_keep_abstains_on_everything():
    scores, correct = sample()
    found = thresholds.joint_choice(scores, scores, ~correct & False, [1, 2, 3], 0.01)
    assert not found.feasible
    assert found.abstain_below == np.inf


def test_mistakes_are_named():
    scores, correct = sample(10)
    with pytest.raises(InputError, match="log_odds"):
        thresholds.joint_choice(scores, scores[:2], correct, [1, 2, 3])
    with pytest.raises(InputError, match="at least 2 rows"):
        thresholds.joint_choice(scores[:, :1], scores[:, :1], correct[:, :1], [1, 2, 3])
    with pytest.raises(InputError, match="candidates"):
        thresholds.joint_choice(scores, scores, correct, [1, 2, 3], candidates=0)
