"""Compaction moves every row's own data and loses none, whatever leaves and however batches are formed."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime.execution.cpu.survivors import GONE, BlockQueue, Scratch, gather_rows, gathering_pays


def arrays_of(ids):
    """Two tensors whose values tell their row: batch axis 0 and batch axis 1."""
    ids = np.asarray(ids, np.float32)
    return {"a": np.stack([ids, ids + 0.5], axis=1), "b": np.broadcast_to(ids[None, :, None], (3, len(ids), 2)).copy()}


def check(arrays, ids):
    here = ids != GONE
    np.testing.assert_array_equal(arrays["a"][here], np.stack([ids[here], ids[here] + 0.5], axis=1))
    np.testing.assert_array_equal(arrays["b"][:, here], np.broadcast_to(ids[here][None, :, None], (3, here.sum(), 2)))
    assert arrays["a"].shape[0] == arrays["b"].shape[1] == len(ids)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_rows_come_out_once_in_order_with_their_own_data(data):
    queue, fresh, expected, got = BlockQueue({"a": 0, "b": 1}), 0, [], []
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
            count = data.draw(st.integers(1, 7))
            ids = np.arange(fresh, fresh + count)
            fresh += count
            stays = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
            if not stays.any():
                continue
            expected += ids[stays].tolist()
            if data.draw(st.booleans()):
                queue.push(arrays_of(ids), ids[stays], np.flatnonzero(stays))
            else:
                queue.push(arrays_of(ids), np.where(stays, ids, GONE))
        elif len(queue):
            arrays, ids = queue.take(data.draw(st.integers(1, 6)))
            check(arrays, ids)
            got += ids[ids != GONE].tolist()
    while len(queue):
        before = len(queue)
        arrays, ids = queue.take(4)
        assert len(queue) < before
        check(arrays, ids)
        got += ids[ids != GONE].tolist()
    assert got == expected


def test_a_batch_nobody_left_is_handed_on_without_a_copy():
    queue = BlockQueue({"a": 0})
    source = arrays_of(range(4))
    queue.push(source, np.arange(4))
    taken, _ = queue.take(4)
    assert taken["a"] is source["a"]


def test_gathering_pays_when_the_work_saved_outweighs_the_copy():
    assert not gathering_pays(live=100, gone=0, row_bytes=1, row_flops=10**9)
    assert gathering_pays(live=100, gone=1, row_bytes=18_000, row_flops=42_000_000)
    assert not gathering_pays(live=1000, gone=1, row_bytes=10_000, row_flops=1_000)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_scratch_gives_the_rows_asked_for_while_its_memory_is_used_again(data):
    scratch, rng = Scratch(), np.random.default_rng(0)
    source = rng.standard_normal((3, 40, 300)).astype(np.float32)
    for axis in (0, 1):
        rows = source if axis else np.ascontiguousarray(source.transpose(1, 0, 2))
        for _ in range(3):  # gathered from what was gathered, as a tensor that is passed on is
            count = rows.shape[axis]
            picked = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))))
            expected = np.take(rows, picked, axis=axis).copy()
            rows = scratch.gather(f"t{axis}", rows, picked, axis)
            np.testing.assert_array_equal(rows, expected)


@given(st.permutations(range(6)), st.integers(1, 6), st.integers(0, 1))
def test_rows_may_be_asked_for_in_any_order(order, count, axis):
    array = np.arange(36).reshape(6, 6)
    at = np.array(order[:count])
    (made,) = gather_rows([({"x": array}, at)], {"x": axis}).values()
    assert made.tolist() == np.take(array, at, axis=axis).tolist()
