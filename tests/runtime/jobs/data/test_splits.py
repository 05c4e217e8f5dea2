"""Four parts of the labelled rows: disjoint, all of them, every class shared out, the same again by a seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.data.splits import SHARES, split_rows

LABELS = st.integers(1, 8).flatmap(
    lambda classes: arrays(np.int64, st.integers(0, 150), elements=st.integers(-1, classes - 1))
)
SEEDS = st.integers(0, 2**32)


def parts(split):
    return {part: getattr(split, part) for part in SHARES}


@given(labels=LABELS, seed=SEEDS)
@settings(max_examples=150, deadline=None)
def test_every_labelled_row_is_in_one_part_and_no_other_row_in_any(labels, seed):
    split = split_rows(labels, seed)
    assert sorted(np.concatenate(list(parts(split).values())).tolist()) == np.flatnonzero(labels >= 0).tolist()
    for rows in parts(split).values():
        assert (np.diff(rows) > 0).all(), "sorted"
    assert split.propose.tolist() == sorted([*split.fit, *split.select])
    assert split.sizes() == {part: len(rows) for part, rows in parts(split).items()}


@given(labels=LABELS, seed=SEEDS)
@settings(max_examples=150, deadline=None)
def test_parts_have_their_share_to_within_a_row_of_all_rows_and_to_within_two_of_a_class(labels, seed):
    known = labels[labels >= 0]
    for part, rows in parts(split_rows(labels, seed)).items():
        assert abs(len(rows) - SHARES[part] * len(known)) <= 1
        share = len(rows) / max(len(known), 1)
        for k in np.unique(known):
            # A part's rows stand evenly along the line of classes, off by half a row at each end of a class; so do
            # the three other parts', which moves the end by 3/2.
            assert abs((labels[rows] == k).sum() - share * (known == k).sum()) <= 1 + 2 * share + 1e-9


def test_a_large_class_is_shared_out_nearly_exactly_and_a_rare_one_reaches_several_parts():
    labels = np.repeat([0, 1, 2], [900, 96, 4])
    for seed in range(20):
        split = split_rows(labels, seed)
        large = {part: round((labels[rows] == 0).sum() / 900, 2) for part, rows in parts(split).items()}
        assert large == pytest.approx(SHARES, abs=0.006)
        assert sum((labels[rows] == 2).any() for rows in parts(split).values()) >= 3


@given(labels=LABELS, seed=SEEDS)
@settings(max_examples=50, deadline=None)
def test_the_same_labels_and_seed_give_the_same_parts(labels, seed):
    one, two = split_rows(labels, seed), split_rows(labels.tolist(), seed)
    for part, rows in parts(one).items():
        assert rows.tolist() == getattr(two, part).tolist()


def test_another_seed_draws_other_rows():
    labels = np.arange(200) % 5
    drawn = {tuple(split_rows(labels, seed).certify) for seed in range(10)}
    assert len(drawn) == 10


def test_every_row_is_as_likely_to_certify():
    labels = np.arange(40) % 3
    counts = sum(np.bincount(split_rows(labels, seed).certify, minlength=40) for seed in range(1000))
    # 350 expected, a standard deviation of 15.
    assert counts.min() > 350 - 5 * 15
    assert counts.max() < 350 + 5 * 15


@pytest.mark.parametrize(("labels", "seed", "named"), [([0, 1], -1, "seed"), ([0.5], 0, "labels"), ([-2], 0, "labels")])
def test_what_cannot_be_split_is_named(labels, seed, named):
    with pytest.raises(InputError, match=named):
        split_rows(labels, seed)
