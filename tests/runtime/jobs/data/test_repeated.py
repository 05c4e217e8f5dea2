"""Rows that are there more than once are found, said, and in one part."""

from dataclasses import replace

import numpy as np
import pytest
from made_rows import made_rows
from offramp.runtime.jobs.data.repeated import find_repeated
from offramp.runtime.jobs.data.splits import SHARES, split_labelled, split_rows
from offramp.runtime.scores import LARGEST


def repeating(rows=300, again=60, torn=0, seed=0):
    """Rows of which some are there twice, some of these with another label the second time; shuffled."""
    made = made_rows(rows, seed=seed)
    at = np.r_[np.arange(rows), np.arange(again)]
    truth = made.truth[at]
    truth[rows : rows + torn] = (truth[rows : rows + torn] + 1) % made.classes
    order = np.random.default_rng(seed).permutation(len(at))
    return replace(made.take(at), truth=truth).take(order), at[order]


def part_of(split, rows):
    part = np.full(rows, -1)
    for k, name in enumerate(SHARES):
        part[getattr(split, name)] = k
    return part


def test_repeated_rows_are_found_whatever_their_labels_and_said_with_their_number():
    rows, original = repeating(torn=7)
    found = find_repeated(rows)
    same = found.group[:, None] == found.group
    assert (same == (original[:, None] == original)).all()
    assert found.notes[0].startswith("120 of 360 rows are 60 repeated ones")
    assert found.notes[1] == "14 of 360 rows have conflicting labels: 7 rows are there with more than one label."


@pytest.mark.parametrize("seed", range(5))
def test_a_row_and_its_repetitions_are_in_one_part(seed):
    rows, original = repeating(seed=seed, torn=20)
    split = split_labelled(rows, seed)
    assert len(split.notes) == 2
    part = part_of(split.split, len(rows))
    assert part.min() >= 0
    for one in range(60):
        assert len(set(part[original == one])) == 1
    assert not np.isin(split.keys[split.split.test], split.made_from).any()


def test_parts_have_their_share_on_average_however_large_the_groups():
    labels, together = np.arange(400) % 4, np.r_[np.zeros(80), np.arange(320) // 4 + 1]
    sizes = np.mean([list(split_rows(labels, seed, together).sizes().values()) for seed in range(400)], axis=0)
    # A group of 80 of 400 rows: a standard error of about 80 / 2 / 20 rows.
    assert sizes == pytest.approx([share * 400 for share in SHARES.values()], abs=8)


def test_without_repeated_rows_parts_are_as_they_were():
    rows = made_rows(500)
    assert find_repeated(rows).notes == ()
    split, plain = split_labelled(rows, 3).split, split_rows(rows.truth, 3)
    assert all((getattr(split, part) == getattr(plain, part)).all() for part in SHARES)


def test_unlabelled_rows_among_those_kept_together_are_in_no_part():
    split = split_rows([0, -1, 1, -1, 0, 1] * 20, 0, np.arange(120) // 2)
    assert sum(split.sizes().values()) == 80


def test_ties_of_scores_with_few_values_are_no_repeated_rows():
    rows = made_rows(2000)
    tied = replace(rows, score=np.round(rows.score))
    found = find_repeated(tied)
    assert len(np.unique(found.group)) == 2000
    assert "scores take so few values" in found.notes[0]
    one_fine = replace(rows, score=np.concatenate([np.round(rows.score[:-1]), rows.score[-1:]]))
    assert find_repeated(one_fine).notes == ()
    assert find_repeated(one_fine.take(np.r_[np.arange(2000), np.arange(9)])).notes[0].startswith("18 of 2009 rows")


def test_rows_at_the_end_of_the_scale_are_not_taken_for_each_other():
    rows = made_rows(600)
    score, label = rows.score.copy(), rows.label.copy()
    score[:, :100], label[:, :100] = LARGEST, 0
    found = find_repeated(replace(rows, score=score, label=label))
    assert len(np.unique(found.group)) == 600
    assert found.notes == ()


def test_the_same_scores_with_another_answer_are_another_row():
    rows = made_rows(300)
    twice = rows.take(np.r_[np.arange(300), np.arange(300)])
    other = twice.label.copy()
    other[:, 300:] = (other[:, 300:] + 1) % rows.classes
    assert len(np.unique(find_repeated(twice).group)) == 300
    # Then scores are shared by different rows, and don't tell.
    assert len(np.unique(find_repeated(replace(twice, label=other)).group)) == 600


@pytest.mark.parametrize("rows", [0, 1, 60])
def test_rows_that_hardly_differ_are_left_alone(rows):
    same = made_rows(1).take(np.zeros(rows, np.int64))
    found = find_repeated(same)
    assert found.group.tolist() == list(range(rows))
    assert found.notes == (() if rows < 2 else ("only 1 of 60 rows differ in any exit's answer or score.",))
