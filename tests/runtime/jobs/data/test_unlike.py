"""A part that differs from the others beyond chance is named with what differs; one that doesn't is not."""

from dataclasses import replace

import numpy as np
import pytest
from made_rows import made_rows
from offramp.runtime.jobs.data.splits import SplitRows, split_labelled, split_rows
from offramp.runtime.jobs.data.unlike import LEVEL, unlike


@pytest.fixture(scope="module")
def rows():
    return made_rows(1200, exits=3)


def test_another_share_of_a_class_is_named(rows):
    split = split_rows(rows.truth, 0)
    truth = rows.truth.copy()
    truth[split.certify[:90]] = 4
    said, *_ = unlike(SplitRows(rows, replace(rows, truth=truth), split))
    assert said.startswith("the certify part differs from the others beyond chance in its labels")
    assert "Holm over 20 tests" in said


def test_another_accuracy_is_named(rows):
    split = split_rows(rows.truth, 0)
    label = rows.label.copy()
    label[-1, split.test] = np.where(np.arange(len(split.test)) % 4, label[-1, split.test], 0)
    said = unlike(SplitRows(rows, replace(rows, label=label), split))
    assert any(one.startswith("the test part") and "in its accuracy of the last exit (p = " in one for one in said)


def test_other_scores_are_named_by_exit(rows):
    split = split_rows(rows.truth, 0)
    score = rows.score.copy()
    score[1, split.fit] += 1.0
    said = unlike(SplitRows(rows, replace(rows, score=score), split))
    assert any(one.startswith("the fit part") and "in its scores of exit 1 (p = " in one for one in said)
    assert not any("exit 0" in one or "exit 2" in one or "labels" in one for one in said)


def test_parts_that_are_drawn_alike_are_hardly_ever_named(rows):
    named = sum(bool(unlike(split_labelled(rows, seed))) for seed in range(100))
    assert LEVEL == 0.01
    assert named <= 4  # P(more than 4 of 100 at 1%) = 0.3%


@pytest.mark.parametrize("classes", [1, 900])
def test_one_class_and_hundreds_of_rare_ones_are_no_difference(classes):
    rows = made_rows(600, exits=2)
    truth = np.random.default_rng(0).integers(0, classes, 600)
    assert unlike(split_labelled(replace(rows, truth=truth), 0)) == []


def test_few_rows_are_no_difference():
    for count in (0, 1, 3, 20):
        assert unlike(split_labelled(made_rows(count), 0)) == []
