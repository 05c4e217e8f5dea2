from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import calibration, scores
from offramp.runtime.errors import InputError
from offramp.runtime.online.window import Memory, capped, effective_rows, within_share
from offramp.runtime.points import OperatingPoint
from offramp.runtime.simulate import simulate
from served_rows import made_up, served

BARS = (2.0, 2.0, -np.inf)


class Recorded:
    def __init__(self, logits):
        self.logits = logits
        self.flops = np.ones(logits.shape[:2])


def test_a_window_says_what_the_cascade_said():
    logits, label = made_up(1000)
    window = served(logits, label, BARS, shadow=0.3)
    fitted = calibration.fit_exits("rank_preserving_power", logits, label, window.exit)
    point = OperatingPoint(BARS, calibrators=fitted)
    answers = simulate(Recorded(logits), point)
    assert np.array_equal(window.exit, answers.exit)
    assert np.array_equal(window.served, answers.label)
    assert np.array_equal(window.correct, answers.label == label)
    assert window.log_odds(point) == pytest.approx(answers.log_odds, abs=1e-6)
    warm = OperatingPoint(BARS, calibrators=calibration.fit_exits("temperature", logits, label, window.exit))
    assert window.log_odds(warm) == pytest.approx(simulate(Recorded(logits), warm).log_odds, abs=0.01)  # float16


def test_which_rows_are_which():
    logits, label = made_up(1000)
    window = served(logits, label, BARS, labelled=0.5, shadow=0.2, abstained=np.arange(1000) % 10 == 0)
    assert window.answered.sum() == ((window.label >= 0) & (np.arange(1000) % 10 != 0)).sum()
    assert np.array_equal(window.reached(2), window.exit == 2)
    assert window.complete[window.exit == 2].all()
    assert window.complete[window.exit < 2].mean() == pytest.approx(0.2, abs=0.05)
    assert window.complete_weights[window.complete & (window.exit < 2)] == pytest.approx(5.0)
    assert window.after(499.0).time[0] == 500
    assert len(window.since(2)) == 0
    assert len(window.at("balanced")) == 1000
    assert len(window.at("other")) == 0


def test_inverse_probabilities_make_up_for_what_was_not_asked():
    logits, label = made_up(20_000, seed=3)
    random = np.random.default_rng(0)
    score = scores.log_odds(logits[0])
    asked = np.where(score > 2, 0.2, 0.8)
    window = served(logits, label, BARS, asked=asked)
    window = window.take(random.random(20_000) < asked)
    truth = (logits[0].argmax(axis=1) == label)[score > -9].mean()
    first = window.logits[0].argmax(axis=1) == window.label
    assert np.average(first, weights=window.weights) == pytest.approx(truth, abs=0.01)


def test_memory_slides_and_fades_but_never_below_its_least():
    logits, label = made_up(1000)
    window = served(logits, label, BARS, labelled=0.5)
    known = int(window.known.sum())
    rows, weights = Memory(rows=300, half_life=np.inf, least=100).recall(window)
    assert len(rows) == 300
    assert (weights == 1).all()
    assert rows.time[-1] == window.time[window.known][-1]
    rows, weights = Memory(half_life=50, least=20).recall(window)
    assert len(rows) == known
    assert weights[-51] == pytest.approx(0.5)
    assert effective_rows(Memory(half_life=5, least=100).recall(window)[1]) >= 100
    assert Memory(rows=300, least=301).recall(window) is None
    assert Memory(least=known + 1).recall(window) is None
    with pytest.raises(InputError, match="memory"):
        Memory(rows=0)


@st.composite
def sent(draw):
    n = draw(st.integers(1, 60))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    keys = draw(st.integers(1, 6))
    return random.random(n) + 0.1, random.integers(0, keys, n) ** 2 // keys, random.integers(0, 3, n)


@settings(max_examples=150, deadline=None)
@given(sent(), st.sampled_from([0.2, 0.34, 0.5, 0.9]))
def test_no_key_weighs_more_than_its_share_anywhere(data, share):
    weights, key, group = data
    found = capped(weights, key, group, share)
    assert (found <= weights + 1e-12).all()
    most = max(share, 1 / len(np.unique(key)))
    for rows in (np.ones(len(key), bool), *(group == g for g in np.unique(group))):
        for one in np.unique(key):
            assert found[rows & (key == one)].sum() <= most * found[rows].sum() + 1e-6
    if len(np.unique(key)) == 1:
        assert np.array_equal(found, weights)


def test_a_flood_from_one_key_is_cut_to_its_share_and_others_stay_as_they_are():
    key = np.repeat([0, 1, 2], [900, 50, 50])
    found = capped(np.ones(1000), key, np.zeros(1000), 0.4)
    assert found[key == 0].sum() == pytest.approx(0.4 / 0.6 * 100)
    assert (found[key > 0] == 1).all()


def test_in_turn_no_key_goes_beyond_its_share():
    key = np.repeat([0, 1, 2], [900, 50, 50])
    kept = within_share(key, 0.5, allowance=10)
    counts = np.cumsum(kept & (key == 0)), np.arange(1, 1001)
    assert (counts[0] <= 0.5 * counts[1] + 10).all()
    assert kept[key > 0].all()
    assert within_share(key, 1.0).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("exit", np.full(50, 3)),
        ("label", np.full(50, 5)),
        ("asked", np.zeros(50)),
        ("shadow", np.full(50, 1.5)),
        ("key", np.zeros(49)),
        ("score", np.zeros((2, 50))),
    ],
)
def test_a_window_that_is_none_is_refused_by_its_field(field, value):
    logits, label = made_up(50)
    with pytest.raises(InputError, match=field):
        replace(served(logits, label, BARS), **{field: value})
