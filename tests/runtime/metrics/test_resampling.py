import numpy as np
import pytest
from offramp.runtime import metrics, scores
from offramp.runtime.errors import InputError


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(0)
    z = random.normal(0, 2, (400, 5))
    y = np.where(random.random(400) < 0.7, z.argmax(1), random.integers(0, 5, 400))
    return scores.softmax(z), y, scores.log_odds(z).round(1), z.argmax(1) != y


def plainly(metric):
    """The same metric without its vectorised bootstrap."""
    return lambda *arrays, **options: metric(*arrays, **options)


@pytest.mark.parametrize("metric", [metrics.ece, metrics.mcs, metrics.nll, metrics.brier])
def test_vectorised_draws_of_calibration_metrics_are_those_of_a_loop(metric, data):
    p, y, _, _ = data
    assert hasattr(metric, "resampled")
    fast, slow = (metrics.bootstrap(m, p, y, replicates=50, seed=3) for m in (metric, plainly(metric)))
    np.testing.assert_allclose(fast.replicates, slow.replicates, rtol=1e-10)
    assert (fast.low, fast.high) == (pytest.approx(slow.low), pytest.approx(slow.high))


@pytest.mark.parametrize("metric", [metrics.aurc, metrics.auroc_f])
def test_vectorised_draws_of_ranking_metrics_are_those_of_a_loop(metric, data):
    _, _, s, e = data
    assert hasattr(metric, "resampled")
    fast, slow = (metrics.bootstrap(m, s, e, replicates=50, seed=3) for m in (metric, plainly(metric)))
    np.testing.assert_allclose(fast.replicates, slow.replicates, rtol=1e-10)


def test_what_can_not_be_vectorised_is_looped_with_the_same_answer(data):
    _, _, s, e = data
    both = [
        metrics.bootstrap(m, s, e, replicates=20, convention="fd-shifts") for m in (metrics.aurc, plainly(metrics.aurc))
    ]
    np.testing.assert_array_equal(both[0].replicates, both[1].replicates)


def test_the_same_seed_gives_the_same_interval_and_another_another(data):
    p, y, _, _ = data
    a, b, c = (metrics.bootstrap(metrics.ece, p, y, seed=seed, replicates=200) for seed in (1, 1, 2))
    assert (a.low, a.high) == (b.low, b.high) != (c.low, c.high)
    assert a.low <= a.value + 0.02
    assert a.high >= a.value - 0.02


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    random = np.random.default_rng(4)
    hits = 0
    for k in range(300):
        t = random.random(150) < 0.7
        found = metrics.bootstrap(metrics.accuracy, np.full(150, 0.7), t, replicates=200, seed=k, confidence=0.9)
        hits += found.low <= found.value - (t.mean() - 0.7) <= found.high
    assert 0.84 < hits / 300 < 0.95


def test_early_exit_metrics_are_resampled_along_their_last_axis(data):
    random = np.random.default_rng(5)
    s = random.normal(size=(3, 200))
    right = s + random.normal(size=(3, 200)) > 0
    found = metrics.bootstrap(metrics.eefp, s, right, replicates=30)
    assert found.replicates.shape == (30, 3)
    assert found.low[0] < found.value[0] < found.high[0]
    assert np.isnan([found.low[2], found.high[2]]).all()


def test_a_paired_comparison_sees_what_two_separate_intervals_do_not(data):
    p, y, _, _ = data
    sharper = scores.softmax(np.log(p) * 1.1)
    found = metrics.compare(metrics.nll, [p], [sharper], y, replicates=500)
    apart = [metrics.bootstrap(metrics.nll, q, y, replicates=500) for q in (p, sharper)]
    assert found.difference == pytest.approx(metrics.nll(p, y) - metrics.nll(sharper, y))
    assert found.high - found.low < min(one.high - one.low for one in apart)
    same = metrics.compare(metrics.nll, [p], [p], y, replicates=100)
    assert (same.difference, same.p_value) == (0.0, 1.0)


def test_metrics_of_several_values_are_compared_value_by_value():
    random = np.random.default_rng(6)
    s = random.normal(size=(2, 3, 300))
    right = s[0] + random.normal(size=(3, 300)) > 0
    found = metrics.compare(metrics.eefp, [s[0]], [s[1]], right, replicates=100)
    assert found.difference.shape == found.p_value.shape == (3,)
    assert found.low[0] > 0
    assert found.p_value[0] < 0.05
    assert np.isnan(found.p_value[2])


def test_a_clear_winner_has_a_small_p_value(data):
    p, y, _, _ = data
    ruined = np.full_like(p, 0.2)
    found = metrics.compare(metrics.brier, [p], [ruined], y, replicates=999)
    assert found.p_value == pytest.approx(2 / 1000)
    assert found.high < 0


def test_a_table_by_subgroup_starts_with_everybody(data):
    p, y, _, _ = data
    groups = np.where(np.arange(400) % 3 == 0, "a", "b")
    table = metrics.by_subgroup(metrics.accuracy, groups, p, y, replicates=100)
    assert [line.group for line in table] == [None, "a", "b"]
    assert [line.rows for line in table] == [400, 134, 266]
    assert table[1].value == metrics.accuracy(p[groups == "a"], y[groups == "a"])


def test_no_rows_have_no_interval():
    found = metrics.bootstrap(metrics.ece, np.empty((0, 3)), np.empty(0, int), replicates=10)
    assert np.isnan([found.value, found.low, found.high]).all()


def test_unlabelled_rows_take_part_in_the_draw_and_then_drop_out(data):
    p, y, _, _ = data
    hidden = np.where(np.arange(400) % 4 == 0, -1, y)
    fast, slow = (metrics.bootstrap(m, p, hidden, replicates=20, seed=1) for m in (metrics.ece, plainly(metrics.ece)))
    np.testing.assert_allclose(fast.replicates, slow.replicates)


def test_mistakes_are_named(data):
    p, y, _, _ = data
    for call, word in (
        (lambda: metrics.bootstrap(metrics.ece, p, y, replicates=0), "replicates"),
        (lambda: metrics.bootstrap(metrics.ece, p, y, confidence=1.0), "confidence"),
        (lambda: metrics.bootstrap(lambda *a: 0.0, p, y[:5]), "same number of rows"),
        (lambda: metrics.by_subgroup(metrics.ece, np.zeros(3), p, y), "groups"),
    ):
        with pytest.raises(InputError, match=word):
            call()


@pytest.mark.parametrize("seed", [-1, 0.5, None])
def test_a_seed_that_is_none_is_refused(data, seed):
    p, y, _, _ = data
    with pytest.raises(InputError, match="seed: expected a whole number of at least 0"):
        metrics.bootstrap(metrics.ece, p, y, seed=seed)
    with pytest.raises(InputError, match="seed: expected a whole number of at least 0"):
        metrics.compare(metrics.ece, [p], [p], y, seed=seed)
