"""What the exits said comes back from its bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from offramp.runtime.errors import InputError, StoreError
from offramp.runtime.online.store.packing import MOST_DENSE, TOP, pack, relative, unpack


def plain(score, logits, classes):
    """Row by row and class by class."""
    exits, rows = score.shape
    out = np.full((exits, rows, classes), np.nan, np.float16)
    for j in range(exits):
        for i in range(rows):
            if score[j, i] == score[j, i]:
                top = max(logits[j][i].tolist())
                out[j, i] = [np.float16(np.float32(z) - np.float32(top)) for z in logits[j][i].tolist()]
    return out


@settings(deadline=None)
@given(
    score=arrays(np.float32, (3, 7), elements=st.just(np.nan) | st.floats(-50, 50, width=32)),
    logits=arrays(np.float32, (3, 7, 4), elements=st.floats(-500, 500, width=32)),
)
def test_scores_and_logits_come_back_where_an_exit_ran(score, logits):
    got_score, got_logits = unpack(pack(score, logits, 4), 3, 4)
    np.testing.assert_array_equal(got_score, score)
    np.testing.assert_array_equal(got_logits, plain(score, logits, 4))


@settings(deadline=None)
@given(arrays(np.float32, (5, 6), elements=st.floats(allow_nan=False, width=32)))
def test_half_precision_keeps_the_winner_and_finite_numbers_finite(logits):
    half = relative(logits)
    assert (half.max(axis=1) == 0).all()
    assert (half[np.arange(5), logits.argmax(axis=1)] == 0).all()
    finite = np.isfinite(logits).all(axis=1)
    assert np.isfinite(half[finite]).all()


def test_infinite_logits_have_an_answer():
    half = relative(np.array([[np.inf, 1, -np.inf], [np.inf, np.inf, 0], [-np.inf, 3, 2]], np.float32))
    np.testing.assert_array_equal(half, [[0, -np.inf, -np.inf], [0, 0, -np.inf], [-np.inf, 0, -1]])


def test_six_exits_of_150_classes_take_less_than_two_kilobytes():
    rng = np.random.default_rng(0)
    (row,) = pack(rng.normal(size=(6, 1)), rng.normal(size=(6, 1, 150)).astype(np.float32), 150)
    assert len(row) < 1850


def test_above_a_thousand_classes_the_largest_and_the_mass_of_the_others_come_back():
    classes, rng = MOST_DENSE + 500, np.random.default_rng(0)
    logits = (rng.normal(size=(2, 3, classes)) * 5).astype(np.float32)
    packed = pack(np.ones((2, 3), np.float32), logits, classes)
    assert len(packed[0]) < 2 * (TOP * 6 + 10)
    _, got = unpack(packed, 2, classes)
    exact = logits - logits.max(axis=2, keepdims=True)
    order = np.argsort(-exact, axis=2)
    largest, others = order[..., :TOP], order[..., TOP:]
    np.testing.assert_allclose(
        np.take_along_axis(got, largest, 2), np.take_along_axis(exact, largest, 2), rtol=1e-3, atol=1e-3
    )
    wide = got.astype(np.float64)
    np.testing.assert_allclose(
        np.exp(np.take_along_axis(wide, others, 2)).sum(axis=2),
        np.exp(np.take_along_axis(exact, others, 2)).sum(axis=2),
        rtol=1e-2,
    )


def test_logits_that_do_not_fit_are_refused_by_their_exit():
    score = np.zeros((2, 3), np.float32)
    with pytest.raises(InputError, match=r"logits\[1\] is None"):
        pack(score, [np.zeros((3, 4), np.float32), None], 4)
    with pytest.raises(InputError, match=r"logits\[0\] is of the shape \(3, 5\)"):
        pack(score, [np.zeros((3, 5), np.float32)] * 2, 4)


@settings(deadline=None)
@given(st.binary(max_size=11))  # one byte less than the shortest row
def test_bytes_that_are_no_row_are_refused(data):
    if data == b"\0":  # a row that ran no exit
        assert np.isnan(unpack([data], 2, 3)[1]).all()
        return
    with pytest.raises(StoreError, match="damaged"):
        unpack([data], 2, 3)
