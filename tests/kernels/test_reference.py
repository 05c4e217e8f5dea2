"""The reference gate agrees with offramp.runtime.scores, and with plain softmax where that is exact."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from offramp.kernels import exit_gate
from offramp.kernels.reference import rounded_up
from offramp.runtime import scores

finite = st.floats(-50, 50, width=32)
matrices = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=8), elements=finite)


@settings(max_examples=150, deadline=None)
@given(matrices)
def test_label_and_score_are_those_of_the_runtime(z):
    got = exit_gate(z)
    assert (got.label == scores.top_label(z)).all()
    np.testing.assert_allclose(got.score, scores.log_odds(z), rtol=1e-5, atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(matrices, st.floats(0.1, 5))
def test_confidence_entropy_and_margin_are_those_of_softmax(z, inverse):
    got = exit_gate(z, inv_temperature=inverse)
    p = np.exp((z.astype(np.float64) - z.max(axis=1, keepdims=True)) * inverse)
    p /= p.sum(axis=1, keepdims=True)
    ordered = np.sort(p, axis=1)
    np.testing.assert_allclose(got.confidence, ordered[:, -1], rtol=1e-9)
    np.testing.assert_allclose(got.margin, ordered[:, -1] - (ordered[:, -2] if p.shape[1] > 1 else 0), atol=1e-9)
    np.testing.assert_allclose(got.entropy, -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(1), atol=1e-9)


def test_scale_and_bias_move_the_label_and_the_threshold_is_inclusive():
    z = np.array([[1.0, 2.0, 0.0]])
    assert exit_gate(z, scale=[3, 1, 1], bias=[0, 0, 0.5]).label.tolist() == [0]
    score = float(exit_gate(z).score[0])
    assert exit_gate(z, threshold=score).leave.tolist() == [True]
    assert exit_gate(z, threshold=np.nextafter(score, 9)).leave.tolist() == [False]


@pytest.mark.parametrize("row", [[np.nan, 1.0], [np.nan, np.nan]])
def test_a_nan_row_says_nothing_and_stays(row):
    got = exit_gate([row])
    assert got.label.tolist() == [-1]
    assert np.isnan([got.confidence[0], got.score[0], got.entropy[0], got.margin[0]]).all()
    assert not got.leave[0]


def test_infinite_logits_and_no_rows_are_defined():
    got = exit_gate([[np.inf, np.inf, 0.0], [-np.inf] * 3, [np.inf, 0, 0]])
    np.testing.assert_allclose(got.confidence, [0.5, 1 / 3, 1])
    np.testing.assert_allclose(got.score[:2], [0, -np.log(2)], atol=1e-7)
    assert np.isfinite(got.score).all()
    assert len(exit_gate(np.zeros((0, 4))).label) == 0


@settings(max_examples=300, deadline=None)
@given(st.floats(allow_nan=False), st.floats(width=32, allow_nan=False))
def test_a_float32_score_reaches_a_rounded_threshold_exactly_if_it_reaches_the_threshold(threshold, score):
    bar = rounded_up(threshold)
    assert bar == np.float32(bar)
    assert (np.float32(score) >= np.float32(bar)) == (float(np.float32(score)) >= threshold)


def test_a_threshold_that_float32_rounds_down_is_rounded_up():
    # float32(0.7) is below 0.7, and numpy says that it isn't: it rounds the Python number first.
    assert rounded_up(0.7) == float(np.nextafter(np.float32(0.7), np.float32(1)))
    assert rounded_up(0.1) == float(np.float32(0.1))
