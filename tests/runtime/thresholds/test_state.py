"""Rules that carry something from exit to exit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from offramp.runtime import scores, thresholds
from offramp.runtime.errors import InputError

LABELS = np.array([[0, 1, 2, 0], [0, 2, 2, 1], [1, 2, 2, 0], [1, 2, 1, 1]])


@pytest.mark.parametrize(
    ("patience", "exits"), [(1, [0, 0, 0, 0]), (2, [1, 2, 1, 3]), (3, [3, 3, 2, 3]), (4, [3, 3, 3, 3])]
)
def test_a_row_leaves_when_enough_exits_in_a_row_agree(patience, exits):
    assert thresholds.patience_exits(LABELS, patience).tolist() == exits


def test_steps_on_the_rows_that_went_on_give_the_same_as_the_whole():
    exits, playing, state = np.full(4, 3), np.arange(4), None
    for j, label in enumerate(LABELS):
        agreeing, state = thresholds.patience_step(label[playing], state)
        gone = agreeing >= 2
        exits[playing[gone]] = np.minimum(exits[playing[gone]], j)
        playing, state = playing[~gone], {name: values[~gone] for name, values in state.items()}
    assert exits.tolist() == thresholds.patience_exits(LABELS, 2).tolist()


def test_the_cheapest_patience_within_the_drop_is_chosen():
    correct = np.array([[1, 0, 1, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 1, 0, 1]], bool)
    found = thresholds.choose_patience(LABELS, correct, [1, 2, 3, 4], drop=0.0)
    assert found.patience == 1
    strict = thresholds.choose_patience(LABELS, np.array([[0] * 4] * 3 + [[1] * 4], bool), [1, 2, 3, 4], drop=0.0)
    assert (strict.patience, strict.cost, strict.drop) == (4, 1.0, 0.0)
    assert np.isnan(thresholds.choose_patience(LABELS[:, :0], correct[:, :0], [1, 2, 3, 4]).cost)
    with pytest.raises(InputError, match="patience"):
        thresholds.patience_exits(LABELS, 0)


@given(st.integers(0, 1000), st.integers(1, 4))
def test_ensembling_is_the_running_geometric_mean_of_probabilities(seed, exits):
    z = np.random.default_rng(seed).normal(0, 3, (exits, 5, 4))
    p = np.stack([scores.softmax(one) for one in z])
    found = thresholds.running_geometric_mean(z)
    for j in range(exits):
        mean = np.prod(p[: j + 1], axis=0) ** (1 / (j + 1))
        np.testing.assert_allclose(scores.softmax(found[j]), mean / mean.sum(1, keepdims=True), rtol=1e-9)


def test_an_ensemble_never_takes_back_an_impossible_class():
    _, state = thresholds.ensemble_step([[0.0, -np.inf, 0.0]], None)
    after, _ = thresholds.ensemble_step([[0.0, 9.0, 0.0]], state)
    assert scores.softmax(after)[0, 1] == 0.0
