import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import thresholds
from offramp.runtime.errors import InputError
from offramp.runtime.thresholds.sgr import rank_grid
from scipy.stats import beta, binom


def slow_bound(k, m, level):
    return 1.0 if k == m else beta.ppf(1 - level, k + 1, m - k)


@st.composite
def scored(draw):
    n = draw(st.integers(1, 150))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    score = random.normal(size=n).round(draw(st.integers(0, 3)))
    return score, random.random(n) < draw(st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]))


def test_the_bound_is_clopper_pearson_also_at_the_ends():
    for k, m in ((0, 10), (3, 10), (10, 10), (0, 0)):
        assert thresholds.risk_bound(k, m, 0.05) == pytest.approx(slow_bound(k, m, 0.05))


@settings(max_examples=80, deadline=None)
@given(
    scored(), st.sampled_from([0.05, 0.2]), st.sampled_from([0.05, 0.2]), st.sampled_from(["fixed_sequence", "binary"])
)
def test_only_a_whole_set_that_passed_is_returned(data, risk, delta, method):
    score, error = data
    found = thresholds.sgr(score, error, risk, delta, method)
    if not found.feasible:
        assert found.threshold == np.inf
        assert found.coverage == 0.0
        assert np.isnan([found.risk, found.bound]).all()
        return
    kept = score >= found.threshold
    assert found.coverage == pytest.approx(kept.mean())
    assert found.risk == pytest.approx(error[kept].mean())
    assert found.bound == pytest.approx(slow_bound(error[kept].sum(), kept.sum(), found.level))
    assert found.bound <= risk


@settings(max_examples=60, deadline=None)
@given(scored(), st.sampled_from([0.05, 0.3]))
def test_binary_is_the_published_search(data, risk):
    score, error = data
    n = len(score)
    steps = max(1, int(np.ceil(np.log2(n))))
    ordered = np.sort(score)[::-1]
    low, high, passed = 0, n - 1, []
    for _ in range(steps):
        middle = (low + high) // 2
        kept = score >= ordered[middle]
        if slow_bound(error[kept].sum(), kept.sum(), 0.1 / steps) <= risk:
            low = middle
            passed.append(kept.mean())
        else:
            high = middle
    found = thresholds.sgr(score, error, risk, 0.1, "binary")
    assert found.coverage == pytest.approx(max(passed, default=0.0))


@settings(max_examples=60, deadline=None)
@given(scored(), st.sampled_from([0.05, 0.3]))
def test_fixed_sequence_stops_at_the_first_failure(data, risk):
    score, error = data
    best = 0.0
    ordered = np.sort(score)[::-1]
    for rank in rank_grid(len(score), risk, 0.1):
        kept = score >= ordered[rank - 1]
        if slow_bound(error[kept].sum(), kept.sum(), 0.1) > risk:
            break
        best = kept.mean()
    assert thresholds.sgr(score, error, risk, 0.1).coverage == pytest.approx(best)


@pytest.mark.parametrize(("total", "risk", "delta"), [(300, 0.05, 0.05), (3000, 0.01, 0.1), (50, 0.5, 0.05)])
def test_ranks_are_where_one_more_error_becomes_affordable(total, risk, delta):
    ranks = rank_grid(total, risk, delta)
    assert ranks[-1] == total
    affordable = [k for k in range(min(100, len(ranks))) if binom.cdf(k, total, risk) <= delta]
    for k, m in zip(affordable, ranks, strict=False):
        assert binom.cdf(k, m, risk) <= delta < binom.cdf(k, m - 1, risk)


def test_ranks_stay_few_for_many_rows():
    assert 200 < len(rank_grid(10**7, 0.05, 0.05)) < 420
    assert len(rank_grid(20, 0.05, 0.05)) == 0


@pytest.mark.parametrize("method", ["fixed_sequence", "binary"])
def test_all_right_is_answered_and_all_wrong_or_too_few_are_not(method):
    score = np.arange(300.0)
    assert thresholds.sgr(score, np.zeros(300), method=method).coverage == pytest.approx(1.0, abs=0.01)
    assert not thresholds.sgr(score, np.ones(300), method=method).feasible
    assert not thresholds.sgr(score[:20], np.zeros(20), method=method).feasible
    assert not thresholds.sgr([], [], method=method).feasible
    assert not thresholds.sgr([1.0], [0], method=method).feasible


def test_mistakes_are_named():
    for call, word in (
        (lambda: thresholds.sgr([1.0], [0], risk=0.0), "risk"),
        (lambda: thresholds.sgr([1.0], [0], delta=1.0), "delta"),
        (lambda: thresholds.sgr([1.0], [0], method="best"), "method"),
        (lambda: thresholds.sgr([np.nan], [0]), "score"),
        (lambda: thresholds.sgr([1.0], [0.5]), "error"),
    ):
        with pytest.raises(InputError, match=word):
            call()


@given(scored(), st.floats(0.01, 1.0))
def test_fixed_coverage_is_the_smallest_whole_set_that_is_large_enough(data, coverage):
    score, _ = data
    found = thresholds.fixed_coverage(score, coverage)
    kept = score >= found.threshold
    assert found.coverage == pytest.approx(kept.mean())
    assert kept.mean() >= coverage - 1e-9
    if coverage < 1:
        assert (score > found.threshold).mean() < coverage


def test_fixed_coverage_of_nothing_and_of_everything():
    assert thresholds.fixed_coverage([1.0, 2.0], 1.0).threshold == -np.inf
    assert np.isnan(thresholds.fixed_coverage([], 0.5).coverage)


@pytest.mark.parametrize(
    ("errors", "rows", "level", "named"),
    [(-1, 10, 0.05, "errors"), (11, 10, 0.05, "errors"), (np.nan, 10, 0.05, "errors"), (1, 10, 1.5, "level")],
)
def test_a_bound_of_counts_that_are_none_is_refused(errors, rows, level, named):
    with pytest.raises(InputError, match=named):
        thresholds.risk_bound(errors, rows, level)


def test_an_error_among_the_surest_rows_ends_nothing_where_other_rows_say_where_to_begin():
    random = np.random.default_rng(0)
    score, error = np.arange(800.0), random.random(800) < 0.02
    error[-1] = True  # the surest row of all
    others = np.arange(1200.0), random.random(1200) < 0.02
    assert not thresholds.sgr(score, error, 0.05).feasible
    found = thresholds.sgr(score, error, 0.05, proposing=others)
    assert found.coverage == 1.0
    assert -np.inf < found.threshold <= score.min(), "a NaN still reaches nothing"


@settings(max_examples=40, deadline=None)
@given(scored(), scored(), st.sampled_from([0.05, 0.3]))
def test_only_sets_that_passed_are_returned_wherever_it_begins(data, other, risk):
    score, error = data
    found = thresholds.sgr(score, error, risk, 0.1, proposing=other)
    if found.feasible:
        kept = score >= found.threshold
        assert slow_bound(error[kept].sum(), kept.sum(), 0.1) <= risk
        assert found.coverage == pytest.approx(kept.mean())


@settings(max_examples=30, deadline=None)
@given(scored(), st.sampled_from([0.05, 0.3]))
def test_a_rule_among_several_is_answered_only_where_all_pass(data, risk):
    score, error = data
    worse = error | (np.arange(len(error)) % 7 == 0)
    alone = thresholds.sgr(score, error, risk, 0.1)
    both = thresholds.sgr_of_any([score, score], [error, worse], 0, risk, 0.1)
    assert both.coverage <= alone.coverage
    assert thresholds.sgr_of_any([score], [error], 0, risk, 0.1).coverage == alone.coverage
    if both.feasible:
        kept = score >= both.threshold
        assert slow_bound(worse[kept].sum(), kept.sum(), 0.1) <= risk


def broken_share(chance, certifying, draws, levels=0):
    """How often sgr begun by other rows answers a set whose true risk is above 5%, by a population known."""
    random = np.random.default_rng(certifying)
    u = (np.arange(20_000) + 0.5) / 20_000
    grid = (np.ceil(u * levels) / levels if levels else u)[::-1]
    risk = np.cumsum(chance(u)[::-1]) / np.arange(1, 20_001)
    broken = 0
    for _ in range(draws):
        rows = []
        for n in (2 * certifying, certifying):
            v = random.random(n)
            rows.append((np.ceil(v * levels) / levels if levels else v, random.random(n) < chance(v)))
        found = thresholds.sgr(*rows[1], 0.05, 0.05, proposing=rows[0])
        kept = int((grid >= found.threshold).sum()) if found.feasible else 0
        broken += bool(kept and risk[kept - 1] > 0.05)
    return broken / draws


KNOWN = {
    "noise": (lambda u: 0.01 + 0.16 * (1 - u) ** 2, 0),
    "ties": (lambda u: 0.3 * (1 - u) ** 2, 10),
    "inverted": (lambda u: 0.1 * u, 0),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_start_from_other_rows_keeps_the_promise(name):
    chance, levels = KNOWN[name]
    assert broken_share(chance, 300, 150, levels) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 150)


@pytest.mark.slow
@pytest.mark.parametrize("certifying", [200, 825])
@pytest.mark.parametrize("name", KNOWN)
def test_a_start_from_other_rows_keeps_the_promise_over_many_draws(name, certifying):
    chance, levels = KNOWN[name]
    assert broken_share(chance, certifying, 1000, levels) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 1000)


def test_what_makes_no_sense_of_other_rows_is_named():
    with pytest.raises(InputError, match="proposing"):
        thresholds.sgr([1.0], [0], method="binary", proposing=([1.0], [0]))
    with pytest.raises(InputError, match="chosen"):
        thresholds.sgr_of_any([[1.0]], [[0]], 1)
    with pytest.raises(InputError, match="one shape"):
        thresholds.sgr_of_any([[1.0]], [[0, 1]], 0)
