"""Looks at the same rows are known again by a small sketch."""

import numpy as np
import pytest
from offramp.runtime.jobs.calibrating.looks import LOOKS, MOST, SKETCH, Look, how_often, note_look, read_looks
from offramp.runtime.jobs.calibrating.targets import Budget


def rows(*numbers):
    """Numbers as `row_keys` gives them: anywhere in the range."""
    return np.random.default_rng(0).integers(0, 2**64, 200_000, np.uint64)[np.r_[numbers]]


def look(keys, seed=0, asked="b"):
    return Look.at(keys, [asked, seed], seed)


@pytest.mark.parametrize(
    ("mine", "other", "share"),
    [
        (slice(0, 600), slice(0, 600), 1.0),
        (slice(0, 600), slice(300, 900), 0.5),
        (slice(0, 300), slice(0, 900), 1.0),
        (slice(0, 600), slice(600, 900), 0.0),
    ],
)
def test_the_share_of_few_rows_is_exact(mine, other, share):
    assert look(rows(mine)).shared(look(rows(other))) == pytest.approx(share)


@pytest.mark.parametrize(("other", "share"), [(50_000, 1.0), (25_000, 0.5), (5_000, 0.1), (0, 0.0)])
def test_the_share_of_many_rows_is_near(other, share):
    mine = look(rows(slice(0, 50_000)))
    assert len(mine.sketch) == SKETCH
    theirs = look(rows(slice(50_000 - other, 100_000 - other)))
    assert mine.shared(theirs) == pytest.approx(share, abs=0.06)


def test_only_other_seeds_or_options_on_these_rows_count_and_each_once():
    here, there = rows(slice(0, 400)), rows(slice(400, 800))
    now = look(here)
    assert how_often(now, []) == 1
    assert how_often(now, [look(here)] * 3) == 1, "the same once more"
    assert how_often(now, [look(here, seed=1), look(here, seed=1), look(here, asked="c")]) == 3
    assert how_often(now, [look(there, seed=1)]) == 1
    assert how_often(now, [look(rows(slice(150, 550)), seed=1)]) == 2, "on more than half of the rows"
    assert how_often(now, [look(rows(slice(250, 650)), seed=1)]) == 1


def test_looks_are_read_as_they_were_noted_and_the_same_takes_the_first_ones_place(tmp_path):
    one, two = look(rows(slice(0, 3000))), look(rows(slice(0, 400)), seed=1)
    for each in (one, two, one):
        note_look(tmp_path / "history", each)
    found = read_looks(tmp_path / "history")
    assert [vars(each) | {"sketch": each.sketch.tolist()} for each in found] == [
        vars(each) | {"sketch": each.sketch.tolist()} for each in (two, one)
    ]


def test_lines_that_cannot_be_read_are_left_out(tmp_path):
    note_look(tmp_path, look(rows(slice(0, 60))))
    whole = (tmp_path / LOOKS).read_bytes()
    (tmp_path / LOOKS).write_bytes(b'{}\nnull\n\xff\n{"sketch": "?"}\n' + whole + whole[: len(whole) // 2])
    assert len(read_looks(tmp_path)) == 1
    assert read_looks(tmp_path / "nowhere") == []


def test_old_looks_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr("offramp.runtime.jobs.calibrating.looks.MOST", 3)
    for seed in range(5):
        note_look(tmp_path, look(rows(slice(0, 60)), seed))
    assert [one.seed for one in read_looks(tmp_path)] == [2, 3, 4]
    assert MOST == 1000


def test_what_was_asked_for_is_part_of_the_look():
    keys = rows(slice(0, 60))
    assert Look.at(keys, [Budget(0.5)], 0).asked == Look.at(keys, [Budget(0.5)], 0).asked
    assert Look.at(keys, [Budget(0.5)], 0).asked != Look.at(keys, [Budget(0.4)], 0).asked
