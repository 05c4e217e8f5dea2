"""What the cascade graph gave of many small batches is told apart as each batch would be by itself."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime.predictions import Reached, Seen, joined
from seeing import told_apart

CLASSES = 3
# Gate 1 is no exit of the manifest; gate 2's is closed at the second kind of batch; gate 0's is closed at the third.
KINDS = (((0, 0), (1, None), (2, 1), (3, 2)), ((0, 0), (3, 2)), ((0, None), (2, 1), (3, 2)))


def batch(gates, left, rng):
    """A batch as the graph gives it, and each row's score and logits at each exit, NaN where it didn't run."""
    score, logits = np.full((3, len(left)), np.nan, np.float32), np.zeros((3, len(left), CLASSES), np.float32)
    scores, those = [], []
    for gate, exit in gates:
        for row, last in enumerate(left):
            if last >= gate:
                scores.append(rng.normal())
                those.append(rng.normal(size=CLASSES))
                if exit is not None:
                    score[exit, row], logits[exit, row] = scores[-1], those[-1]
    left, scores = np.array(left, np.int32), np.array(scores, np.float32)
    return Reached(3, gates, left, scores, np.array(those, np.float32).reshape(-1, CLASSES)), score, logits


def leaving(gates):
    return st.lists(st.sampled_from([gate for gate, exit in gates if exit is not None]), max_size=5)


batches = st.sampled_from(KINDS).flatmap(lambda gates: st.tuples(st.just(gates), leaving(gates)))


@settings(deadline=None)
@given(st.lists(batches, min_size=1, max_size=6), st.integers(0, 100), st.booleans())
def test_many_batches_are_told_apart_as_each_by_itself(kinds, seed, some_seen):
    rng = np.random.default_rng(seed)
    made = [batch(gates, left, rng) for gates, left in kinds]
    parts = [one.apart() if some_seen and k % 2 else one for k, (one, *_) in enumerate(made)]
    found = joined(parts)
    score = np.concatenate([score for _, score, _ in made], axis=1)
    np.testing.assert_array_equal(found.score, score)
    np.testing.assert_array_equal(found.unfinished, np.isnan(score).any(axis=0))
    logits = np.concatenate([logits for *_, logits in made], axis=1)
    for exit, of_exit in enumerate(found.logits):
        ran = ~np.isnan(score[exit])
        assert (of_exit is not None) or not ran.any()
        if of_exit is not None:
            np.testing.assert_array_equal(of_exit[ran], logits[exit][ran])


def test_exits_come_in_their_order_with_rows_that_ascend():
    one, score, logits = batch(KINDS[0], [2, 0, 3, 3], np.random.default_rng(0))
    found = told_apart(one)
    assert [exit for exit, *_ in found] == [0, 1, 2]
    for exit, rows, scores, those in found:
        assert rows.tolist() == [[0, 1, 2, 3], [0, 2, 3], [2, 3]][exit]
        np.testing.assert_array_equal(scores, score[exit][rows])
        np.testing.assert_array_equal(those, logits[exit][rows])
    assert one.nbytes == sum(scores.nbytes + those.nbytes for *_, scores, those in found) + 3 * 4 * (1 + CLASSES)


def test_one_batch_in_which_all_rows_left_at_once():
    one, score, _ = batch(KINDS[0], [0, 0], np.random.default_rng(0))
    seen = joined([one])
    assert isinstance(seen, Seen)
    np.testing.assert_array_equal(seen.score, score)
    assert seen.logits[1] is None
