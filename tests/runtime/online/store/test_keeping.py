"""Rows that were appended are read as they were, until they are let go."""

import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_rows import CLASSES, opened, rows
from offramp.runtime.errors import StoreError
from offramp.runtime.online.store.database import Database
from offramp.runtime.online.store.keeping import Values
from offramp.runtime.online.store.packing import relative
from offramp.runtime.online.store.schema import models, served
from offramp.runtime.online.store.store import Store

ROOT = Path(__file__).parents[4]


def test_a_row_comes_back_as_it_was_served(where):
    given = rows(
        ["a", "b"], row=[3, 9], time=[5.0, 6.0], left=1, version=4, point="careful", abstained=[True, False], asked=0.25
    )
    with opened(where) as store:
        assert store.append(given)
        store.flush()
        window = store.window()
    assert window.time.tolist() == [5.0, 6.0]
    assert window.version.tolist() == [4, 4]
    assert window.point.tolist() == ["careful"] * 2
    assert window.exit.tolist() == [1, 1]
    assert window.abstained.tolist() == [True, False]
    np.testing.assert_array_equal(window.score, given.score)
    np.testing.assert_array_equal(window.logits[1], relative(given.logits[1]))
    assert np.isnan(window.logits[2]).all()
    assert window.label.tolist() == [-1, -1]
    assert np.isnan(window.labelled).all()
    assert window.shadow.tolist() == [0.5, 0.5]
    assert window.asked.tolist() == [0.25, 0.25]
    assert window.key.tolist() == [-1, -1]


def test_a_window_has_the_newest_rows_that_fit_oldest_first(where):
    with opened(where) as store:
        for k in range(6):
            point = "fast" if k % 2 else "slow"
            store.append(rows([f"r{k}"], time=float(k), point=point, left=2 if k in (1, 4) else 0))
        store.feedback(["r0", "r3"], [0, 0], [1, 2])
        assert store.window(limit=2).time.tolist() == [4, 5]
        assert store.window(point="fast").time.tolist() == [1, 3, 5]
        assert store.window(since=4.0).time.tolist() == [4, 5]
        assert store.window(complete=True).time.tolist() == [1, 4]
        assert store.window(labelled=True).time.tolist() == [0, 3]
        assert store.window(labelled=True, complete=True).time.tolist() == []
        assert store.window(point="neither").logits.shape == (3, 0, CLASSES)


def test_a_window_of_many_rows_has_them_all_in_their_order(where):
    count = 2345  # they are read so many hundred at a time
    given = rows([f"r{k}" for k in range(count)], time=np.arange(count, dtype=float), left=1)
    with opened(where, unflushed=10_000) as store:
        assert store.append(given)
        store.flush()
        window, newest = store.window(), store.window(limit=1000)
    assert window.time.tolist() == list(range(count))
    assert (np.diff(window.seq) > 0).all()
    np.testing.assert_array_equal(window.score, given.score)
    np.testing.assert_array_equal(window.logits[1], relative(given.logits[1]))
    assert newest.time.tolist() == list(range(count - 1000, count))


def test_rows_of_another_bundle_or_model_are_no_part_of_a_window(where):
    names = [f"class {k}" for k in range(CLASSES)]
    with opened(where) as store:
        store.append(rows(["old"]))
        store.flush()
    with Store.open(where, model="intents", bundle="newer", exits=3, classes=names) as newer:
        assert len(newer.window()) == 0
    with Store.open(where, model="others", bundle="digest", exits=3, classes=names) as others:
        assert len(others.window()) == 0


def test_a_name_that_comes_again_keeps_what_it_has(where):
    with opened(where) as store:
        store.append(rows(["a", "a"], row=[0, 0], time=[1.0, 2.0]))
        store.flush()
        store.append(rows(["a", "a"], row=[0, 1], time=3.0))
        store.flush()
        assert store.window().time.tolist() == [1.0, 3.0]
        assert (store.counts.kept, store.counts.repeated) == (2, 2)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=()), min_size=1, max_size=200), unique=True, max_size=5))
def test_any_text_is_an_id(tmp_path_factory, ids):
    with opened(tmp_path_factory.mktemp("ids") / "store.db") as store:
        for name in ids:
            store.append(rows([name]))
        assert store.feedback(ids, [0] * len(ids), [1] * len(ids)) == ["accepted"] * len(ids)
        assert store.delete(ids) == len(ids)


def test_surrogates_and_zeros_are_ids_anywhere(where):
    ids = ["\ud800", "a\0b", "a\0c", "é", "e\u0301", "'; DROP TABLE served; --"]
    with opened(where) as store:
        store.append(rows(ids))
        assert store.feedback(ids, [0] * 6, [1] * 6) == ["accepted"] * 6


def test_a_row_is_inserted_in_the_order_of_its_columns():
    inserted = [column.name for column in served.columns if column.name in Values.__annotations__]
    assert inserted == list(Values.__annotations__)


@pytest.mark.parametrize("unknown", [np.nan, 0.0])
def test_a_row_of_which_it_is_not_known_how_its_label_is_sought_counts_as_one(where, unknown):
    with opened(where) as store:
        store.append(rows(["a", "b"], asked=[unknown, 0.25]))
        store.flush()
        assert store.window().asked.tolist() == [1.0, 0.25]


def test_rows_that_do_not_fit_are_counted_and_hold_up_nobody(where):
    with opened(where) as store:
        store.append(rows(["a"], classes=CLASSES + 1))
        store.append(rows(["b"], asked=1.5))
        store.append(rows(["c"], exit=7))
        store.append(rows(["d"], time=[1.0, 2.0]))
        store.append(rows(["e"]))
        store.flush()
        assert (store.counts.refused, store.counts.kept) == (4, 1)
        assert store.alarm is None


def test_inputs_are_kept_only_where_they_are_handed_over(tmp_path):
    with opened(tmp_path / "store.db") as store:
        store.append(rows(["a"], inputs=[b"some words"]))
        store.append(rows(["b"]))
    found = sqlite3.connect(tmp_path / "store.db").execute("SELECT inputs FROM served ORDER BY seq").fetchall()
    assert found == [(b"some words",), (None,)]


def test_the_oldest_rows_go_when_there_are_too_many(where):
    with opened(where, rows=10) as store:
        for k in range(25):
            store.append(rows([f"r{k}"], time=float(k)))
            store.flush()
        assert store.window().time.tolist() == list(range(15, 25))
        assert store.counts.let_go == 15


def test_the_oldest_rows_go_when_they_take_too_much(where):
    with opened(where) as store:
        store.append(rows(["a"]))
        store.flush()
    size = 3 + 4 + 2 * CLASSES  # one exit's bytes, with an id of one character
    with opened(where, bytes=4 * size) as store:
        store.append(rows(list("bcdefg"), time=np.arange(6) + 2e9))
        store.flush()
        store.append(rows(["h"], time=3e9))
        store.flush()
        assert store.window().time.tolist() == [2e9 + 3, 2e9 + 4, 2e9 + 5, 3e9]


def test_rows_go_when_they_are_too_old(where):
    with opened(where) as store:
        store.append(rows(["old"], time=1e9))
        store.append(rows(["new"], time=4e9))
    with opened(where, days=30) as store:
        store.flush()
        assert store.window().time.tolist() == [4e9]
        assert store.feedback(["old"], [0], [1]) == ["late"]


def test_deleted_rows_are_gone_from_the_file_too(tmp_path):
    secret = "a-name-that-nobody-may-find"
    with opened(tmp_path / "store.db") as store:
        for k in range(200):
            store.append(rows([f"r{k}" if k % 10 else f"{secret}-{k}"], inputs=[b"what somebody said " * 9]))
        store.flush()
        assert secret.encode() in b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert store.delete([f"{secret}-{k}" for k in range(0, 200, 10)]) == 20
        assert secret.encode() not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert store.feedback([f"{secret}-0"], [0], [1]) == ["unknown"]
        assert len(store.window()) == 180


def test_a_row_that_waits_is_deleted_too(where):
    with opened(where) as store:
        store.append(rows(["a", "a", "b"], row=[0, 1, 0]))
        assert store.delete(["a", "never"]) == 2
        assert len(store.window()) == 1


def test_what_shadow_runs_add_makes_rows_complete(where):
    begun = rows(["a", "b", "c"], left=1)
    deeper = rows(["x", "x", "x"], left=2)
    score = np.where(np.arange(3)[:, None] == 2, deeper.score, np.float32(np.nan))
    with opened(where) as store:
        store.append(begun)
        assert store.complete(["b", "c", "nobody"], [0, 0, 0], score, [None, None, deeper.logits[2]])
        store.flush()
        window = store.window()
        assert window.complete.tolist() == [False, True, True]
        np.testing.assert_array_equal(window.score[:2], begun.score[:2])
        np.testing.assert_array_equal(window.score[2, 1:], deeper.score[2, :2])
        np.testing.assert_array_equal(window.logits[1], relative(begun.logits[1]))
        np.testing.assert_array_equal(window.logits[2, 1:], relative(deeper.logits[2])[:2])
        assert len(store.window(complete=True)) == 2
        assert store.counts.completed == 2


def test_an_exit_that_is_known_stays_as_it_is_and_a_row_without_a_probability_is_passed_by(where):
    again = rows(["x", "x"], left=2)
    with opened(where) as store:
        store.append(known := rows(["a"], left=1))
        store.append(rows(["b"], left=1, shadow=0.0))
        store.complete(["a", "b"], [0, 0], again.score, again.logits)
        store.complete(["a"], [0], again.score[:, :1], [None, None, None])  # nothing that fits
        store.flush()
        window = store.window()
        np.testing.assert_array_equal(window.score[:2, 0], known.score[:2, 0])
        assert window.complete.tolist() == [True, False]


def test_who_went_the_whole_way_by_himself_needed_no_luck_for_it(where):
    with opened(where) as store:
        store.append(rows(["a"], left=2, shadow=0.01))
        store.flush()
        assert store.window().shadow.tolist() == [1.0]


def test_what_is_counted_is_what_is_there(tmp_path):
    with opened(tmp_path / "store.db", rows=20) as store:
        for k in range(6):
            store.append(rows([f"r{k}-{i}" for i in range(7)], time=float(k), inputs=[b"x" * k] * 7))
            store.flush()
        deeper = rows(["x"], left=2)
        store.complete(["r5-0"], [0], deeper.score, deeper.logits)
        store.delete(["r4-1", "r5-6"])
    connection = sqlite3.connect(tmp_path / "store.db")
    counted = connection.execute("SELECT rows, bytes FROM models").fetchall()
    there = "SELECT count(*), sum(length(exits) + length(request) + coalesce(length(inputs), 0)) FROM served"
    assert counted == connection.execute(there).fetchall()


def test_space_that_nothing_needs_is_given_back(tmp_path):
    path = tmp_path / "store.db"
    with opened(path, unflushed=10**6) as store:
        for k in range(20):
            store.append(rows([f"r{k}-{i}" for i in range(500)], time=float(k), inputs=[b"x" * 2000] * 500))
        store.flush()
    large = path.stat().st_size
    with opened(path, rows=100, unflushed=10**6) as store:
        for _ in range(12):
            store.flush()
    assert path.stat().st_size < large / 2


def test_engines_that_keep_and_let_go_at_once_count_the_same_rows(where):
    stores = [opened(where, rows=40) for _ in range(3)]

    def serve(store: Store, engine: int) -> None:
        for k in range(30):
            store.append(rows([f"{k}-{i}" if i == 0 else f"{engine}-{k}-{i}" for i in range(4)], time=float(k)))
            store.flush()

    threads = [threading.Thread(target=serve, args=(store, k)) for k, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept, gone = (sum(getattr(store.counts, name) for store in stores) for name in ("kept", "let_go"))
    for store in stores:
        store.close()
    database = Database(where)
    with database.reading() as connection:
        there = sa.select(sa.func.count(), sa.func.sum(served.c.size)).select_from(served)
        counted = connection.execute(sa.select(models.c.rows, models.c.bytes)).one()
        assert counted == connection.execute(there).one()
        assert 30 < counted.rows <= 40
        assert counted.rows == kept - gone
    database.close()


def test_what_waits_at_the_interpreters_end_is_written(tmp_path):
    code = (
        "import sys; sys.path.insert(0, 'tests/support')\n"
        "from kept_rows import opened, rows\n"
        "store = opened(sys.argv[1], seconds=3600)\n"
        "store.append(rows(['a', 'b']))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "store.db")], check=True, cwd=ROOT)
    with opened(tmp_path / "store.db") as store:
        assert len(store.window()) == 2


def test_a_forked_child_leaves_its_parents_store_alone(tmp_path):
    with opened(tmp_path / "store.db") as store:
        store.append(rows(["a"]))
        store.flush()
        child = os.fork()
        if child == 0:
            refused = False
            try:
                store.flush()
            except StoreError:
                refused = True
            store.close()
            os._exit(0 if refused else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        store.append(rows(["b"]))
        store.flush()
        assert len(store.window()) == 2


def test_a_closed_store_says_so_and_answering_goes_on(where):
    store = opened(where)
    store.close()
    store.close()
    assert not store.append(rows(["a"]))
    assert store.dropped == 1
    with pytest.raises(StoreError, match="closed"):
        store.feedback(["a"], [0], [1])
