"""Lots are kept as their rows would be one by one, and one that doesn't fit takes none of the others along."""

import numpy as np
import pytest
from kept_rows import CLASSES, EXITS, opened
from offramp.runtime.online.store.lot import Lot, served_of
from offramp.runtime.predictions import Seen


def lot(name, rows=2, left=0, *, classes=CLASSES, **other):
    """Rows of two requests that left at an exit."""
    rng = np.random.default_rng(len(name) + rows + left)
    seen = Seen(EXITS, rows)
    for j in range(left + 1):
        logits = rng.normal(size=(rows, classes)).astype(np.float32)
        seen.keep(j, np.arange(rows), rng.normal(size=rows).astype(np.float32), logits)
    half = rows // 2
    of = [(f"{name}-a", np.arange(half)), (f"{name}-b", np.arange(3, 3 + rows - half))]
    exit, abstain = np.full(rows, left, np.int32), np.arange(rows) % 2 == 1
    given = {"time": 1e9, "version": 0, "point": "balanced", "shadow": 0.25, **other}
    return Lot(of, given["time"], given["version"], given["point"], exit, abstain, seen, given["shadow"])


def test_lots_of_a_kind_are_one_batch_and_nothing_is_mixed_up():
    given = [lot("first", 3, left=1), lot("second", 4, left=0, shadow=0.5, time=2e9), lot("third", 1, left=EXITS - 1)]
    (one,) = served_of(given)
    alone = [each.served() for each in given]
    assert list(one.request) == [name for each in alone for name in each.request]
    for column in ("row", "time", "exit", "abstained", "shadow"):
        np.testing.assert_array_equal(getattr(one, column), np.concatenate([getattr(each, column) for each in alone]))
    np.testing.assert_array_equal(one.score, np.concatenate([each.score for each in alone], axis=1))
    start = 0
    for each in alone:
        for j in range(EXITS):
            if each.logits[j] is not None:
                np.testing.assert_array_equal(one.logits[j][start : start + len(each)], each.logits[j])
        start += len(each)
    assert one.shadow.tolist() == [0.25] * 3 + [0.5] * 4 + [1.0]  # the last one went the whole way by itself


def test_a_batch_for_each_version_and_point():
    lots = [lot("a"), lot("b", version=1), lot("c", point="fast"), lot("d")]
    found = {(each.version, each.point): len(each) for each in served_of(lots)}
    assert found == {(0, "balanced"): 4, (1, "balanced"): 2, (0, "fast"): 2}


def test_lots_come_back_as_they_were(tmp_path):
    lots = [lot("a", 3, left=1), lot("b", 2, left=2, version=1), lot("c", 4)]
    with opened(tmp_path / "kept.db") as store:
        assert all(store.append(each) for each in lots)
        store.flush()
        window = store.window()
        assert store.counts.kept == 9
    assert np.bincount(window.version).tolist() == [7, 2]
    assert np.bincount(window.exit).tolist() == [4, 3, 2]
    assert window.abstained.sum() == sum(each.abstain.sum() for each in lots)
    score = np.sort(np.concatenate([each.seen.score[0] for each in lots]))
    np.testing.assert_array_equal(np.sort(window.score[0]), score)


@pytest.mark.parametrize("wrong", ["name", "classes"])
def test_a_lot_that_does_not_fit_is_refused_alone(tmp_path, wrong):
    odd = lot("x" * 300) if wrong == "name" else lot("odd", classes=CLASSES + 1)
    with opened(tmp_path / "kept.db") as store:
        for each in (lot("a"), odd, lot("b", 3)):
            store.append(each)
        store.flush()
        assert (store.counts.kept, store.counts.refused) == (5, 2)


def test_what_finds_no_room_is_dropped(tmp_path):
    with opened(tmp_path / "kept.db", unflushed=5, seconds=60.0) as store:
        assert store.append(lot("a", 3))
        assert not store.append(lot("b", 4))
        assert store.dropped == 2
        store.flush()
        assert len(store.window()) == 5
