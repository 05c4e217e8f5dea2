import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime.errors import InputError
from offramp.runtime.online import bound
from offramp.runtime.online.betting import STAKES
from served_rows import made_up, served

RISKS = {
    "constant": lambda n: np.full(n, 0.08),
    "rising": lambda n: np.linspace(0.02, 0.2, n),
    "falling": lambda n: np.linspace(0.3, 0.01, n),
    "jumping": lambda n: np.where(np.arange(n) % (n // 4) < n // 8, 0.01, 0.15),
}


def ever_violated(errors, risk, delta):
    """The shares of streams in which a bound is ever below the running average risk: that very average is refuted."""
    n = np.arange(1, errors.shape[1] + 1)
    mean = np.cumsum(risk) / n
    found = []
    for one in errors:
        wrong = np.cumsum(one)
        betting = bound.betting_evidence((n - wrong)[:, None], wrong[:, None], mean)
        bernstein = bound.bernstein_evidence(one.astype(float), mean)
        found.append([(evidence >= -np.log(delta)).any() for evidence in (betting, bernstein)])
    return np.mean(found, axis=0)


def streams(kind, number, rows, seed=0):
    risk = RISKS[kind](rows)
    return np.random.default_rng(seed).random((number, rows)) < risk, risk


@pytest.mark.parametrize("kind", RISKS)
def test_the_bound_is_seldom_ever_violated(kind):
    errors, risk = streams(kind, 200, 500)
    assert (ever_violated(errors, risk, 0.1) <= 0.1 + 3 * np.sqrt(0.09 / 200)).all()


def test_a_bound_is_below_a_mean_just_where_that_is_refuted():
    errors, risk = streams("rising", 1, 400)
    mean = np.cumsum(risk) / np.arange(1, 401)
    evidence = bound.bernstein_evidence(errors[0].astype(float), mean)
    assert np.array_equal(bound.bernstein_bound(errors[0], 0.5) <= mean, evidence >= np.log(2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", RISKS)
def test_the_bound_is_seldom_ever_violated_in_long_streams(kind):
    errors, risk = streams(kind, 1000, 10_000)
    found = ever_violated(errors, risk, 0.05)
    assert (found <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 1000)).all()


def test_a_constant_risk_is_bounded_more_tightly_and_never_loosened():
    errors, _ = streams("constant", 60, 300)
    found = np.array([bound.constant_risk_bound(one, 0.1) for one in errors])
    assert (np.diff(found, axis=1) <= 0).all()
    assert (found[:, -1] < 0.08).mean() <= 0.1 + 3 * np.sqrt(0.09 / 60)
    assert np.median(found[:, -1]) < 0.2


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400), st.integers(0, 60), st.sampled_from([0.01, 0.1]))
def test_the_bound_is_where_the_bet_is_just_won(right, wrong, delta):
    found = float(bound.betting_bound(right, wrong, delta))
    assert found > wrong / max(1, right + wrong) or found == 1
    wealth = np.mean((1 + STAKES * found / (1 - found)) ** right * (1 - STAKES) ** wrong) if found < 1 else np.inf
    assert wealth >= (1 - 1e-6) / delta
    same = bound.betting_bound([right / 2, right / 2], [wrong, 0], delta, weights=[1.0, 1.0], heaviest=1.0)
    assert same == pytest.approx(found)


def test_many_rows_bring_the_bound_near_and_betting_nearer_than_bernstein():
    errors, _ = streams("constant", 1, 5000)
    right = 5000 - errors.sum()
    betting, bernstein = bound.betting_bound(right, errors.sum()), bound.bernstein_bound(errors[0])[-1]
    assert 0.08 < betting < 0.1
    assert betting <= bernstein < 0.11
    assert bound.betting_bound(0, 0) == 1


def test_rows_that_were_asked_more_seldom_weigh_more():
    """Abstention apart, the rows of one kind are asked a tenth as often, and are wrong more often."""
    random = np.random.default_rng(0)
    kind = random.random(30_000) < 0.5
    wrong = random.random(30_000) < np.where(kind, 0.2, 0.02)
    seen = random.random(30_000) < np.where(kind, 0.1, 1.0)
    counts = [[(seen & (kind == k) & (wrong == e)).sum() for k in (False, True)] for e in (False, True)]
    found = float(bound.betting_bound(*counts, 0.05, weights=[1.0, 10.0]))
    assert 0.11 < found < 0.16
    assert bound.betting_bound(sum(counts[0]), sum(counts[1])) < 0.06


def test_a_tally_is_all_that_is_needed_of_a_window():
    logits, label = made_up(3000)
    window = served(logits, label, (2.0, 2.0, -np.inf), asked=np.where(np.arange(3000) % 3, 0.5, 1.0), labelled=0.7)
    weights, right, wrong = bound.tally(window)
    assert weights.tolist() == [1.0, 2.0]
    assert right.sum() + wrong.sum() == window.answered.sum()
    assert wrong.sum() == (~window.correct & window.answered).sum()
    halves = [bound.tally(window.take(np.arange(a, a + 1500))) for a in (0, 1500)]
    assert (halves[0][1] + halves[1][1] == right).all()


def test_mistakes_are_named():
    with pytest.raises(InputError, match="errors"):
        bound.bernstein_bound([0.5, 1.5])
    with pytest.raises(InputError, match="right, wrong"):
        bound.betting_bound(-1, 0)
    with pytest.raises(InputError, match="delta"):
        bound.betting_bound(1, 0, 1.0)
