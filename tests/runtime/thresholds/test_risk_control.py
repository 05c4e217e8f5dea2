import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import thresholds
from offramp.runtime.errors import InputError
from scipy.stats import binom

BOUNDS = {
    "binomial": (thresholds.binomial_p_value, thresholds.binomial_bound),
    "hb": (thresholds.hoeffding_bentkus_p_value, thresholds.hoeffding_bentkus_bound),
    "wsr": (thresholds.betting_p_value, thresholds.betting_bound),
}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 400), st.floats(0, 1), st.sampled_from(list(BOUNDS)), st.integers(0, 1000))
def test_bound_and_p_value_say_the_same(n, share, kind, seed):
    p_value, bound = BOUNDS[kind]
    losses = (np.random.default_rng(seed).random(n) < share).astype(float)
    upper = bound(losses, 0.1)
    assert upper >= losses.mean() or kind == "wsr"
    if upper < 1:
        assert p_value(losses, min(upper + 1e-6, 1 - 1e-9)) <= 0.1 + 1e-6
        if upper > 1e-6:
            assert p_value(losses, upper - 1e-6) > 0.1 - 1e-3


@pytest.mark.parametrize("kind", list(BOUNDS))
@pytest.mark.parametrize("mean", [0.02, 0.2])
def test_p_values_at_the_null_are_small_no_more_often_than_their_level(kind, mean):
    random = np.random.default_rng(0)
    p = np.array([BOUNDS[kind][0]((random.random(200) < mean).astype(float), mean) for _ in range(2000)])
    for level in (0.05, 0.2):
        assert (p <= level).mean() <= level + 3 * np.sqrt(level * (1 - level) / 2000)


def test_the_binomial_p_value_is_the_binomial_tail():
    assert thresholds.binomial_p_value(np.array([1.0, 0, 0, 0]), 0.3) == pytest.approx(binom.cdf(1, 4, 0.3))


def test_whole_counts_survive_float_sums():
    losses = np.full(10, 0.1 + 0.2)  # 3.0000000000000004 in all
    assert thresholds.hoeffding_bentkus_p_value(losses, 0.5) == pytest.approx(
        min(np.e * binom.cdf(3, 10, 0.5), np.exp(-10 * (0.3 * np.log(0.6) + 0.7 * np.log(1.4)))), rel=1e-6
    )


def test_betting_uses_a_small_variance_that_counting_can_not():
    random = np.random.default_rng(1)
    steady = np.clip(random.normal(0.1, 0.01, 500), 0, 1)
    assert thresholds.betting_bound(steady, 0.05) < 0.12
    assert thresholds.hoeffding_bentkus_bound(steady, 0.05) > 0.12


def sample(n=2000, seed=0):
    random = np.random.default_rng(seed)
    u = random.random(n)
    return np.stack([u, np.zeros(n)]), np.stack([random.random(n) < u, np.ones(n, bool)])


def test_the_last_rejected_is_answered_and_not_the_first_accepted():
    scores, correct = sample()
    bars = [0.95, 0.9, 0.8, 0.5, 0.1]
    found = thresholds.risk_control(scores, correct, [1.0, 2.0], [(b, -np.inf) for b in bars], 0.05, 0.1)
    p = [binom.cdf((~correct[0] & (scores[0] >= bar)).sum(), 2000, 0.05) for bar in bars]
    last = next(i for i, v in enumerate(p) if v > 0.1) - 1
    assert found.index == last
    assert found.thresholds == (bars[last], -np.inf)
    assert found.p_value == pytest.approx(p[last])
    assert found.tested == last + 2
    assert found.cost == pytest.approx(1 - (scores[0] >= bars[last]).mean() / 2)
    assert found.bound <= 0.05


def test_infeasible_is_an_answer_that_claims_no_saving():
    scores, correct = sample()
    always_wrong = correct & [[False], [True]]
    found = thresholds.risk_control(scores, always_wrong, [1.0, 2.0], [(0.1, -np.inf)], 0.01, 0.05)
    assert (found.feasible, found.thresholds, found.cost, found.tested) == (False, (np.inf, -np.inf), 1.0, 1)
    none = thresholds.risk_control(np.empty((2, 0)), np.empty((2, 0)), [1.0, 2.0], [(0.1, -np.inf)])
    assert (none.feasible, none.tested) == (False, 0)
    assert not thresholds.risk_control(scores, correct, [1.0, 2.0], []).feasible


def test_signed_losses_credit_rows_that_leaving_early_saves():
    random = np.random.default_rng(2)
    n = 4000
    scores = np.stack([random.random(n), np.zeros(n)])
    early, late = random.random(n) < 0.9, random.random(n) < 0.9
    rule = {"epsilon": 0.05, "delta": 0.05, "bound": "wsr"}
    inputs = (scores, np.stack([early, late]), [1.0, 2.0], [(0.0, -np.inf)])
    assert thresholds.risk_control(*inputs, **rule, loss="signed").feasible
    assert not thresholds.risk_control(*inputs, **rule, loss="lost").feasible


def test_mistakes_are_named():
    scores, correct = sample(10)
    for options, word in (
        ({"method": "guess"}, "method"),
        ({"bound": "guess"}, "bound"),
        ({"loss": "guess"}, "loss"),
        ({"loss": "signed"}, "betting only"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 1.0}, "delta"),
    ):
        with pytest.raises(InputError, match=word):
            thresholds.risk_control(scores, correct, [1.0, 2.0], [(0.5, -np.inf)], **options)
    with pytest.raises(InputError, match="sequence"):
        thresholds.risk_control(scores, correct, [1.0, 2.0], [(0.5,)])


UPPER = (thresholds.binomial_bound, thresholds.hoeffding_bentkus_bound, thresholds.betting_bound)
P_VALUES = (thresholds.binomial_p_value, thresholds.hoeffding_bentkus_p_value, thresholds.betting_p_value)


@pytest.mark.parametrize("bound", [*UPPER, *P_VALUES])
@pytest.mark.parametrize("loss", [np.nan, 3.0, -0.5])
def test_losses_outside_0_to_1_are_refused(bound, loss):
    with pytest.raises(InputError, match=r"losses: .*rows? 0|losses: NaN in rows 0"):
        bound([loss] * 10, 0.05)


@pytest.mark.parametrize("bound", [thresholds.binomial_bound, thresholds.binomial_p_value])
def test_counting_takes_0_and_1_only(bound):
    with pytest.raises(InputError, match="losses: expected 0 or 1"):
        bound(np.full(10, 0.5), 0.05)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bound", [*UPPER, *P_VALUES])
def test_no_rows_promise_nothing(bound):
    assert bound([], 0.05) == 1.0


@pytest.mark.parametrize("bound", [*UPPER, *P_VALUES])
def test_levels_outside_0_to_1_are_named(bound):
    with pytest.raises(InputError, match=r"epsilon|delta"):
        bound([0.0, 1.0], 1.5)


@pytest.mark.parametrize(("lost", "gained"), [(0.02, 0.0), (0.05, 0.03), (0.3, 0.28)])
def test_a_plug_in_bet_is_won_at_the_null_no_more_often_than_its_level(lost, gained):
    random = np.random.default_rng(0)

    def losses(n):
        return random.choice([1.0, -1.0, 0.0], n, p=[lost, gained, 1 - lost - gained])

    known = losses(300)
    p = np.array([thresholds.plug_in_p_value(losses(200), lost - gained, known) for _ in range(1000)])
    assert (p <= 0.05).mean() <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 1000)


def test_a_plug_in_bet_is_wealth_row_by_row_with_stakes_from_the_past_alone():
    losses, known = np.array([0.0, 1.0, -1.0, 0.0, 0.0]), np.array([0.0] * 30 + [1.0, -1.0, -1.0])
    wealth, most, grid = 1.0, 1.0, np.linspace(0, 0.99 / 0.9, 200_001)
    for i, loss in enumerate(losses):
        past = [*known, *losses[:i], 1.0]
        growth = sum(np.log1p(grid * (0.1 - value)) * past.count(value) for value in (1.0, 0.0, -1.0))
        wealth *= 1 + grid[growth.argmax()] * (0.1 - loss)
        most = max(most, wealth)
    assert thresholds.plug_in_p_value(losses, 0.1, known) == pytest.approx(1 / most, rel=1e-4)


def test_a_plug_in_bound_is_where_the_bet_is_just_won():
    losses = np.array([0.0] * 300 + [1.0] * 2 + [-1.0] * 9)[np.random.default_rng(0).permutation(311)]
    bound = thresholds.plug_in_bound(losses, 0.05, 0.05, losses)
    assert thresholds.plug_in_p_value(losses, 0.05, losses) <= 0.05
    assert losses.mean() < bound <= 0.05
    assert thresholds.plug_in_bound([], 0.05, 0.05) == thresholds.plug_in_p_value([], 0.05) == 1.0
    with pytest.raises(InputError, match="expected -1, 0 or 1"):
        thresholds.plug_in_p_value([0.5], 0.1)
