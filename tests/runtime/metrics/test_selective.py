import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import metrics
from offramp.runtime.errors import InputError
from sklearn.metrics import average_precision_score, roc_auc_score

ALL = (metrics.aurc, metrics.augrc, metrics.e_aurc, metrics.auroc_f, metrics.ap_f, metrics.ap_f_err)


@st.composite
def scored(draw, least=1):
    """Scores with many ties, and errors."""
    n = draw(st.integers(least, 40))
    levels = draw(st.integers(1, 12))
    score = draw(st.lists(st.integers(0, levels), min_size=n, max_size=n))
    error = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return np.array(score) / 7.0, np.array(error)


def slow_aurc(score, error):
    """Mean over ranks, by expectation over the orders inside each tie."""
    total, before, wrong = 0.0, 0, 0
    for value in sorted(set(score), reverse=True):
        group = error[score == value]
        for i in range(1, len(group) + 1):
            total += (wrong + group.sum() * i / len(group)) / (before + i)
        before, wrong = before + len(group), wrong + group.sum()
    return total / len(score)


@given(scored())
def test_aurc_is_the_mean_selective_risk_over_ranks(data):
    score, error = data
    assert metrics.aurc(score, error) == pytest.approx(slow_aurc(score, error))
    untied = np.argsort(np.argsort(score, kind="stable"), kind="stable")
    order = np.argsort(-untied)
    risks = np.cumsum(error[order]) / np.arange(1, len(order) + 1)
    assert metrics.aurc(untied, error) == pytest.approx(risks.mean())


@given(scored())
def test_the_curve_has_one_point_a_distinct_score(data):
    score, error = data
    curve = metrics.risk_coverage(score, error)
    assert curve.threshold.tolist() == sorted(set(score), reverse=True)
    for threshold, coverage, risk in zip(curve.threshold, curve.coverage, curve.risk, strict=True):
        kept = score >= threshold
        assert coverage == pytest.approx(kept.mean())
        assert risk == pytest.approx(error[kept].mean())
    assert curve.coverage[-1] == 1.0


@given(scored())
def test_augrc_obeys_its_identity_with_auroc(data):
    score, error = data
    accuracy, auroc = 1 - error.mean(), metrics.auroc_f(score, error)
    spread = 0.0 if np.isnan(auroc) else (1 - auroc) * accuracy * (1 - accuracy)
    assert metrics.augrc(score, error) == pytest.approx(spread + (1 - accuracy) ** 2 / 2, abs=1e-12)


@given(scored(), st.randoms())
def test_the_order_of_rows_changes_nothing(data, random):
    score, error = data
    shuffled = list(range(len(score)))
    random.shuffle(shuffled)
    for metric in ALL:
        assert metric(score[shuffled], error[shuffled]) == pytest.approx(metric(score, error), nan_ok=True)
    fd = [metrics.aurc(s, e, "fd-shifts") for s, e in ((score, error), (score[shuffled], error[shuffled]))]
    assert fd[0] == pytest.approx(fd[1])


@given(scored())
def test_auroc_and_average_precision_agree_with_scikit_learn(data):
    score, error = data
    if error.all() or not error.any():
        for metric in (metrics.auroc_f, metrics.ap_f, metrics.ap_f_err):
            assert np.isnan(metric(score, error))
        return
    assert metrics.auroc_f(score, error) == pytest.approx(roc_auc_score(~error, score))
    assert metrics.ap_f(score, error) == pytest.approx(average_precision_score(~error, score))
    assert metrics.ap_f_err(score, error) == pytest.approx(average_precision_score(error, -score))


@given(scored())
def test_equal_weights_are_no_weights_and_zero_weights_no_rows(data):
    score, error = data
    for metric in ALL:
        whole = metric(score, error)
        # The area by ranks takes three equal rows for three rows.
        same = 1.0 if metric in (metrics.aurc, metrics.e_aurc) else 3.0
        assert metric(score, error, weights=np.full(len(score), same)) == pytest.approx(whole, nan_ok=True)
        padded = metric([*score, 99.0], [*error, True], weights=[1.0] * len(score) + [0.0])
        assert padded == pytest.approx(whole, nan_ok=True)


@given(scored())
def test_whole_weights_are_repeated_rows(data):
    score, error = data
    w = np.arange(len(score)) % 3 + 1
    for metric in ALL:
        repeated = metric(np.repeat(score, w), np.repeat(error, w))
        assert metric(score, error, weights=w) == pytest.approx(repeated, nan_ok=True)


def test_a_weight_between_two_whole_ones_has_an_area_between_theirs():
    score, error = np.array([3.0, 2.0, 1.0]), np.array([False, True, False])
    areas = [metrics.aurc(score, error, weights=[w, 1.0, 1.0]) for w in (1.0, 1.25, 1.5, 2.0)]
    assert (np.diff(areas) < 0).all()


def test_a_perfect_ranking_has_no_excess_in_the_limit():
    n, wrong = 20_000, 4_000
    error = np.arange(n) >= n - wrong
    assert metrics.e_aurc(-np.arange(n), error) == pytest.approx(0.0, abs=1e-4)
    assert metrics.aurc([3, 2, 1], [1, 1, 1]) == 1.0
    assert metrics.e_aurc([3, 2, 1], [1, 1, 1]) == 0.0


def test_fd_shifts_convention_ends_with_the_first_risk_at_zero_coverage():
    assert metrics.aurc([2.0, 2.0, 1.0], [1, 0, 0], "fd-shifts") == pytest.approx(0.5 * 2 / 3 + (0.5 + 1 / 3) / 2 / 3)
    with pytest.raises(InputError, match="convention"):
        metrics.aurc([1.0], [0], "other")


def test_infinite_scores_rank_as_they_should():
    assert metrics.auroc_f([np.inf, 0.0, -np.inf], [0, 0, 1]) == 1.0
    assert metrics.risk_coverage([np.inf, np.inf, 0.0], [0, 1, 0]).coverage.tolist() == pytest.approx([2 / 3, 1.0])


def test_risk_at_coverage_takes_whole_ties():
    score, error = [3, 2, 2, 1], [0, 1, 0, 1]
    assert metrics.risk_at_coverage(score, error, 0.25) == 0.0
    assert metrics.risk_at_coverage(score, error, 0.5) == pytest.approx(1 / 3)
    assert metrics.risk_at_coverage(score, error, 1.0) == 0.5


@pytest.mark.parametrize("metric", ALL)
def test_no_rows_are_undefined_and_bad_ones_are_named(metric):
    assert np.isnan(metric([], []))
    with pytest.raises(InputError, match="score: NaN in row 1"):
        metric([0.0, np.nan], [0, 1])
    with pytest.raises(InputError, match="error: expected 0 or 1, not so in row 0"):
        metric([0.0, 1.0], [2, 1])


def test_new_classes_count_as_failures_and_misclassified_known_ones_are_dropped():
    predicted, labels = [0, 1, 2, 2], [0, 0, -1, 2]
    ours = metrics.failures(predicted, labels)
    assert ours.kept.tolist() == [True, False, True, True]
    assert ours.error.tolist() == [False, True, False]
    original = metrics.failures(predicted, labels, protocol="original")
    assert original.kept.all()
    assert original.error.tolist() == [False, True, True, False]
    in_scope = metrics.failures([0, 1], [0, 0])
    assert in_scope.error.tolist() == [False, True]


@settings(max_examples=20)
@given(scored(least=2))
def test_auroc_counts_pairs(data):
    score, error = data
    right, wrong = score[~error], score[error]
    pairs = [(a > b) + 0.5 * (a == b) for a in right for b in wrong]
    expected = np.mean(pairs) if pairs else np.nan
    assert metrics.auroc(score, ~error) == pytest.approx(expected, nan_ok=True)
