import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from offramp.runtime import metrics
from offramp.runtime.errors import InputError
from sklearn.metrics import f1_score, roc_auc_score


@st.composite
def cascades(draw):
    seed, exits, rows = draw(st.integers(0, 10**6)), draw(st.integers(1, 4)), draw(st.integers(1, 30))
    random = np.random.default_rng(seed)
    return random.integers(-3, 4, (exits, rows)).astype(float), random.random((exits, rows)) < 0.6


def should_leave(correct, j, i):
    """An exit should take a row it gets right, or that nobody deeper gets right."""
    return bool(correct[j, i]) or not correct[j + 1 :, i].any()


@given(cascades())
def test_eefp_is_the_auroc_against_who_should_leave(data):
    scores, correct = data
    found = metrics.eefp(scores, correct)
    for j in range(len(scores)):
        target = [should_leave(correct, j, i) for i in range(scores.shape[1])]
        if all(target) or not any(target):
            assert np.isnan(found[j])
        else:
            assert found[j] == pytest.approx(roc_auc_score(target, scores[j]))
    assert np.isnan(found[-1])


@given(cascades(), st.integers(-3, 3))
def test_eef1_is_the_f1_on_the_rows_that_arrive(data, bar):
    scores, correct = data
    exits, rows = scores.shape
    found = metrics.eef1(scores, correct, [bar] * (exits - 1))
    arrived = list(range(rows))
    for j in range(exits - 1):
        leaves = [bool(scores[j, i] >= bar) for i in arrived]
        target = [should_leave(correct, j, i) for i in arrived]
        if any(leaves) or any(target):
            assert found[j] == pytest.approx(f1_score(target, leaves, zero_division=0.0))
        else:
            assert np.isnan(found[j])
        arrived = [i for i, leaves_now in zip(arrived, leaves, strict=True) if not leaves_now]
    assert found[-1] == 1.0
    assert metrics.eef1_mean(scores, correct, [bar] * (exits - 1)) == pytest.approx(np.nanmean(found))


@given(cascades())
def test_the_oracle_takes_the_first_right_exit(data):
    _, correct = data
    exits, rows = correct.shape
    cost = np.arange(1.0, exits + 1)
    best = metrics.oracle(correct, cost)
    chosen = [next((j for j in range(exits) if correct[j, i]), 0) for i in range(rows)]
    assert best.exits.tolist() == chosen
    assert best.accuracy == pytest.approx(correct.any(0).mean())
    assert best.cost == pytest.approx(np.mean([cost[j] for j in chosen]))
    gap = metrics.gap_to_oracle(correct, cost, np.full(rows, exits - 1))
    assert gap.accuracy == pytest.approx(best.accuracy - correct[-1].mean())
    assert gap.cost_ratio == pytest.approx(cost[-1] / best.cost)
    thinks_too_long = [correct[:-1, i].any() and not correct[-1, i] for i in range(rows)]
    assert metrics.overthinking(correct) == pytest.approx(np.mean(thinks_too_long))


@given(cascades())
def test_the_curve_prices_each_set_of_thresholds(data):
    scores, correct = data
    exits, rows = scores.shape
    milliseconds = np.cumsum(np.random.default_rng(0).random((exits, rows)), 0)
    bars = [[b] * (exits - 1) for b in (-4, 0, 4)]
    curve = metrics.cost_accuracy(scores, correct, milliseconds, np.array(bars).reshape(3, -1))
    for k, b in enumerate((-4, 0, 4)):
        at = [next((j for j in range(exits - 1) if scores[j, i] >= b), exits - 1) for i in range(rows)]
        assert curve.cost[k] == pytest.approx(milliseconds[at, range(rows)].mean())
        assert curve.accuracy[k] == pytest.approx(correct[at, range(rows)].mean())


def test_the_default_curve_runs_from_the_first_exit_to_the_last():
    random = np.random.default_rng(1)
    scores = random.normal(size=(4, 500))
    curve = metrics.cost_accuracy(scores, scores > 0, [1.0, 2.0, 3.0, 4.0])
    assert curve.cost[0] == 1.0
    assert curve.cost[-1] == 4.0
    assert (np.diff(curve.cost) >= 0).all()


def test_agreement_is_symmetric_with_ones_on_the_diagonal():
    labels = np.array([[0, 1, 2], [0, 1, 1]])
    np.testing.assert_allclose(metrics.agreement(labels), [[1, 2 / 3], [2 / 3, 1]])


def test_a_loss_matrix_prices_errors_and_abstentions():
    loss = np.array([[0.0, 1.0], [5.0, 0.0]])
    assert metrics.expected_loss([0, 0, 1, 1], [0, 1, 1, -1], loss) == pytest.approx(5 / 3)
    priced = np.column_stack([loss, [0.5, 0.5]])
    assert metrics.expected_loss([0, 0], [0, 1], priced, abstain=[False, True]) == 0.25
    with pytest.raises(InputError, match="loss"):
        metrics.expected_loss([0], [1], loss, abstain=[True])


def test_without_rows_everything_is_undefined():
    none = np.empty((3, 0))
    assert np.isnan(metrics.eefp(none, none.astype(bool))).all()
    assert np.isnan(metrics.eef1(none, none.astype(bool), [0.0, 0.0])).all()
    assert np.isnan(metrics.overthinking(none.astype(bool)))
    assert np.isnan(metrics.oracle(none.astype(bool), [1, 2, 3]).accuracy)
    assert np.isnan(metrics.agreement(none)).all()


def test_mistakes_are_named():
    scores, correct = np.zeros((2, 3)), np.zeros((2, 3), bool)
    for call, word in (
        (lambda: metrics.eefp(scores[0], correct[0]), "correct"),
        (lambda: metrics.eefp(scores[:, :2], correct), "scores"),
        (lambda: metrics.eefp(np.full((2, 3), np.nan), correct), "NaN in rows 0, 1, 2"),
        (lambda: metrics.eef1(scores, correct, [0.0] * 5), "thresholds"),
        (lambda: metrics.oracle(correct, [1.0]), "cost"),
        (lambda: metrics.eefp(scores, np.full((2, 3), 2)), "0 or 1"),
    ):
        with pytest.raises(InputError, match=word):
            call()


def test_eefp_with_weights_is_that_of_repeated_rows():
    random = np.random.default_rng(0)
    score, correct, times = random.normal(size=(3, 60)), random.random((3, 60)) < 0.6, random.integers(0, 4, 60)
    repeated = metrics.eefp(np.repeat(score, times, axis=1), np.repeat(correct, times, axis=1))
    assert metrics.eefp(score, correct, weights=times) == pytest.approx(repeated, nan_ok=True)
