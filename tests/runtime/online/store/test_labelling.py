"""What becomes of a label, whenever it comes."""

import random
import sqlite3

import numpy as np
import pytest
from kept_rows import opened, rows
from offramp.runtime.errors import InputError


def test_each_label_is_told_what_became_of_it(where):
    with opened(where) as store:
        store.append(rows(["a", "a", "b"], row=[0, 1, 0]))
        store.flush()
        asked = ["a", "a", "b", "b", "a", "nobody", "a"]
        said = store.feedback(asked, [0, 1, 0, 0, 0, 0, 7], [1, 2, "class 3", 3, 4, 0, 0])
        assert said == ["accepted", "accepted", "accepted", "duplicate", "conflicting", "unknown", "unknown"]
        assert store.feedback(["a", "b"], [1, 0], [2, 0]) == ["duplicate", "conflicting"]
        assert store.window().label.tolist() == [1, 2, 3]
        assert dict(store.counts.feedback) == {"accepted": 3, "duplicate": 2, "conflicting": 2, "unknown": 2}


def test_a_label_may_come_before_its_row_is_on_the_disk(where):
    with opened(where, seconds=3600) as store:
        store.append(rows(["a"]))
        assert store.feedback(["a"], [0], [2]) == ["accepted"]
        assert store.window(labelled=True).label.tolist() == [2]


def test_a_label_that_was_accepted_is_on_the_disk(tmp_path):
    with opened(tmp_path / "store.db") as store:
        store.append(rows(["a"]))
        store.feedback(["a"], [0], [2])
        assert sqlite3.connect(tmp_path / "store.db").execute("SELECT label FROM served").fetchall() == [(2,)]


def test_a_label_for_a_row_that_was_let_go_is_late(where):
    with opened(where, rows=3) as store:
        for k in range(5):
            store.append(rows([f"r{k}"], time=float(k)))
            store.flush()
        assert store.feedback(["r0", "r1", "r2", "x"], [0] * 4, [1] * 4) == ["late", "late", "accepted", "unknown"]


def test_a_label_for_a_row_of_another_bundle_is_late(where):
    from kept_rows import CLASSES
    from offramp.runtime.online.store.store import Store

    with opened(where) as store:
        store.append(rows(["a"]))
    names = [f"class {k}" for k in reversed(range(CLASSES))]
    with Store.open(where, model="intents", bundle="newer", exits=3, classes=names) as newer:
        assert newer.feedback(["a"], [0], ["class 0"]) == ["late"]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([1, 5], r"labels\[1\] is 5"),
        (["class 1", "class 9"], r"labels\[1\] is 'class 9'"),
        ([1, None], r"labels\[1\] is None, which is none of"),
        ([1, -1], r"labels\[1\] is -1, expected 0…4\.$"),
        ([1, 1.5], r"labels\[1\] is 1\.5"),
        ([1], "labels has 1 entries, expected 2"),
    ],
)
def test_labels_that_are_none_are_refused_together_with_all_of_the_call(tmp_path, labels, said):
    with opened(tmp_path / "store.db") as store:
        store.append(rows(["a", "b"]))
        with pytest.raises(InputError, match=said):
            store.feedback(["a", "b"], [0, 0], labels)
        assert store.window(labelled=True).label.tolist() == []
    with pytest.raises(InputError, match=r"request\[0\]"):
        store.feedback([""], [0], [1])
    with pytest.raises(InputError, match="rows has 2 entries"):
        store.feedback(["a"], [0, 1], [1])


def test_who_labelled_is_a_small_number_and_the_key_is_nowhere(tmp_path):
    with opened(tmp_path / "store.db") as store:
        store.append(rows(list("abcd"), time=np.arange(4)))
        for name, key in zip("abcd", ["secret-1", "secret-2", "secret-1", None], strict=True):
            store.feedback([name], [0], [1], key=key)
        keys = store.window().key.tolist()
    assert keys[0] == keys[2] != keys[1]
    assert min(keys[:3]) >= 0
    assert keys[3] == -1
    assert b"secret" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_any_order_of_labels_ends_as_a_dictionary_would(where):
    rng = random.Random(3)
    names = [(f"r{k // 3}", k % 3) for k in range(30)]
    known: dict[tuple[str, int], int] = {}
    with opened(where) as store:
        for at in range(0, 30, 3):
            store.append(rows([names[at][0]] * 3, row=[0, 1, 2], time=float(at)))
        for _ in range(40):
            asked = [rng.choice([*names, ("nobody", 0)]) for _ in range(rng.randint(1, 6))]
            labels = [rng.randrange(3) for _ in asked]
            expected = []
            for name, said in zip(asked, labels, strict=True):
                if name not in names:
                    expected.append("unknown")
                    continue
                first = name not in known
                same = known.setdefault(name, said) == said
                expected.append("accepted" if first else "duplicate" if same else "conflicting")
            assert store.feedback([n for n, _ in asked], [r for _, r in asked], labels) == expected
        assert store.window().label.tolist() == [known.get(name, -1) for name in names]


@pytest.mark.parametrize("asked", [0.0, 1e-300, 9e-4, 1.5, float("nan"), "x"])
def test_no_label_stands_for_more_than_a_thousand_rows(tmp_path, asked):
    with opened(tmp_path / "store.db") as store:
        store.append(rows(["a"]))
        with pytest.raises(InputError, match="asked"):
            store.feedback(["a"], [0], [1], asked=asked)
        assert store.feedback(["a"], [0], [1], asked=1e-3) == ["accepted"]
        assert store.window().weights.tolist() == [1000.0]


def test_a_row_that_says_it_is_hardly_ever_asked_for_is_weighed_like_one_in_a_thousand(tmp_path):
    with opened(tmp_path / "store.db") as store:
        store.append(rows(["a"], asked=1e-310))
        store.feedback(["a"], [0], [1])
        assert store.window().weights.tolist() == [1000.0]
