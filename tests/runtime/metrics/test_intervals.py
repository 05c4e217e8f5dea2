"""Intervals that stay honest where little is seen; how often they cover is in test_interval_coverage.py."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from offramp.runtime import InputError, metrics
from scipy.stats import beta, binom

counted = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(counted)
def test_a_shares_ends_are_where_its_count_is_just_a_tail(found):
    hits, total = found
    low, high = metrics.share_interval(hits, total)
    assert 0 <= low <= hits / total <= high <= 1
    assert low == 0 or binom.sf(hits - 1, total, low) == pytest.approx(0.025)
    assert high == 1 or binom.cdf(hits, total, high) == pytest.approx(0.025)


@given(st.integers(1, 200), st.data())
def test_the_paired_difference_is_mirrored_and_its_ends_are_just_significant(total, data):
    lost = data.draw(st.integers(0, total))
    won = data.draw(st.integers(0, total - lost))
    low, high = metrics.paired_difference_interval(lost, won, total)
    assert -1 <= low <= (lost - won) / total <= high <= 1
    assert metrics.paired_difference_interval(won, lost, total) == pytest.approx((-high, -low), abs=1e-12)
    if high < 1 - 1e-9:
        # Tango's statistic there, with the rarer share found by a search instead of the closed form.
        shares = np.linspace(0, (1 - high) / 2, 20001)[1:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            likelihood = (
                lost * np.log(shares + high)
                + won * np.log(shares)
                + (total - lost - won) * np.log1p(-2 * shares - high)
            )
        best = shares[np.nanargmax(likelihood)]
        score = (total * high - lost + won) / math.sqrt(total * (2 * best + high * (1 - high)))
        assert score == pytest.approx(1.96, abs=0.03)


def test_paired_differences_come_in_arrays_too():
    both = metrics.paired_difference_interval([3, 0], [1, 0], [100, 0])
    assert both.shape == (2, 2)
    assert tuple(both[:, 0]) == pytest.approx(metrics.paired_difference_interval(3, 1, 100))
    assert np.isnan(both[:, 1]).all()


@pytest.mark.parametrize("hits", [0, 1, 7, 50])
def test_the_mean_of_zeros_and_ones_has_clopper_and_pearsons_interval(hits):
    found = metrics.bounded_mean_interval(np.repeat([1, 0], [hits, 50 - hits]), 0, 1, draws=200_000)
    assert found == pytest.approx(metrics.share_interval(hits, 50), abs=1.5e-3)
    assert found == metrics.bounded_mean_interval(np.repeat([0, 1], [50 - hits, hits]), 0, 1, draws=200_000)


def test_the_interval_of_many_values_nears_the_normal_one():
    x = np.random.default_rng(0).random(5000)
    half = 1.96 * x.std() / math.sqrt(5000)
    assert metrics.bounded_mean_interval(x, 0, 1) == pytest.approx((x.mean() - half, x.mean() + half), abs=5e-4)


def test_a_mean_whose_bounds_meet_is_known_and_values_beyond_them_are_refused():
    assert metrics.bounded_mean_interval([0.3, 0.3], 0.3, 0.3) == (0.3, 0.3)
    with pytest.raises(InputError, match=r"expected numbers in \[0, 1\]"):
        metrics.bounded_mean_interval([2.0], 0, 1)
    with pytest.raises(InputError, match="at most total"):
        metrics.paired_difference_interval(6, 6, 10)
    with pytest.raises(InputError, match="expected 0 to 10"):
        metrics.share_interval(11, 10)


def test_an_ece_that_is_noise_has_0_in_its_interval_and_a_real_one_has_not():
    random = np.random.default_rng(3)
    confidence = random.random(2000)
    low, high = metrics.ece_interval(confidence, random.random(2000) < confidence)
    assert low == 0
    assert high < 0.08
    low, high = metrics.ece_interval(confidence, random.random(2000) < confidence**2)
    assert 0.08 < low < 1 / 6 < high < 0.25


def test_rows_that_are_all_right_leave_room_for_errors_that_were_not_seen():
    low, high = metrics.ece_interval(np.full(300, 1 - 1e-9), np.ones(300, bool))
    assert low == 0
    assert high == pytest.approx(3.84 / 300, rel=0.01)


@pytest.mark.parametrize("scale", [0, 5, 1000])
def test_ranking_intervals_hold_the_value_and_do_not_collapse(scale):
    random = np.random.default_rng(4)
    score = random.normal(size=800)
    if scale:
        score = np.round(score * scale) / scale
    error = random.random(800) > 1 / (1 + np.exp(-1.5 - score))
    found = metrics.ranking_intervals(score, error)
    for name in ("auroc_f", "aurc", "augrc"):
        low, high = getattr(found, name)
        assert 0 <= low < getattr(metrics, name)(score, error) < high <= 1
    assert found.auroc_f == metrics.auroc_interval(score, ~error)
    bootstrap = metrics.bootstrap(metrics.auroc_f, score, error)
    assert found.auroc_f == pytest.approx((bootstrap.low, bootstrap.high), abs=0.015)


def test_order_and_scale_of_the_scores_change_no_ranking_interval():
    random = np.random.default_rng(5)
    score, error = random.integers(0, 40, 300).astype(float), random.random(300) < 0.2
    order = random.permutation(300)
    assert metrics.ranking_intervals(score, error) == metrics.ranking_intervals(np.exp(score[order]), error[order])


def test_a_perfect_ranking_of_one_error_proves_little():
    score = np.arange(300.0)
    error = score == 0
    low, high = metrics.auroc_interval(score, ~error)
    assert high == 1
    assert low == pytest.approx(0.025, abs=0.015)


def test_all_right_and_all_wrong_have_no_auroc_and_the_areas_of_a_share():
    score = np.arange(200.0)
    right, wrong = (metrics.ranking_intervals(score, np.full(200, e)) for e in (False, True))
    assert np.isnan([*right.auroc_f, *wrong.auroc_f]).all()
    assert right.aurc[0] == right.augrc[0] == 0
    unseen = beta.ppf(0.975, 1, 200)
    assert right.aurc[1] == pytest.approx(unseen * (1 - math.log(unseen)), rel=0.1)
    assert right.augrc[1] == pytest.approx(unseen - unseen**2 / 2, rel=0.1)
    assert wrong.aurc[1] == pytest.approx(1)
    assert wrong.augrc[1] == pytest.approx(0.5)
    assert wrong.augrc[0] < 0.5


def test_groups_of_neighbours_change_little(monkeypatch):
    random = np.random.default_rng(6)
    score = random.normal(size=2000)
    error = random.random(2000) > 1 / (1 + np.exp(-1.5 - 2 * score))
    grouped = metrics.ranking_intervals(score, error, draws=1000)
    monkeypatch.setattr("offramp.runtime.metrics.ranking.GROUPS", 2000)
    alone = metrics.ranking_intervals(score, error, draws=1000)
    for name, room in (("auroc_f", 0.004), ("aurc", 0.002), ("augrc", 0.001)):
        assert getattr(grouped, name) == pytest.approx(getattr(alone, name), abs=room)


def test_without_rows_nothing_is_known():
    none = np.zeros(0)
    found = metrics.ranking_intervals(none, none)
    assert np.isnan([found.auroc_f, found.aurc, found.augrc]).all()
    assert np.isnan([metrics.share_interval(0, 0), metrics.paired_difference_interval(0, 0, 0)]).all()
    assert np.isnan([metrics.bounded_mean_interval(none, 0, 1), metrics.ece_interval(none, none)]).all()
