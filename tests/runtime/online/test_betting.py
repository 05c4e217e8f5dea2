import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime.errors import InputError
from offramp.runtime.online import betting


def ever_won_while_true(gains, means, level):
    """Whether wealth ever reaches 1/level at a time at which the mean gain so far is nothing or less."""
    wealth = betting.mixed(betting.running_log_wealth(gains))
    return bool(((wealth >= -np.log(level)) & (np.cumsum(means) <= 1e-9)).any())


def drifting(n):
    """Chances of a gain of +1 (else −1) above ½ for half of the time, in turn."""
    return 0.5 + 0.25 * np.sin(np.linspace(-np.pi, np.pi, n)), np.full(n, 0.5)


@pytest.mark.parametrize("which", [0, 1])
def test_evidence_is_seldom_won_at_any_time_at_which_there_is_none(which):
    random = np.random.default_rng(which)
    chance = drifting(400)[which]
    won = [
        ever_won_while_true(np.where(random.random(400) < chance, 1.0, -1.0), 2 * chance - 1, 0.1) for _ in range(400)
    ]
    assert np.mean(won) <= 0.1 + 3 * np.sqrt(0.1 * 0.9 / 400)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1, 3), max_size=30))
def test_the_e_value_is_the_mean_of_plain_products_and_forgets_the_order(gains):
    plain = np.mean([np.prod([1 + stake * g for g in gains]) for stake in betting.STAKES])
    assert np.exp(betting.log_e_value(gains)) == pytest.approx(plain, rel=1e-9)
    assert betting.log_e_value(gains[::-1]) == pytest.approx(betting.log_e_value(gains), abs=1e-9)
    if gains:
        assert betting.mixed(betting.running_log_wealth(gains))[-1] == pytest.approx(np.log(plain), abs=1e-9)


def test_what_is_there_is_found():
    random = np.random.default_rng(0)
    assert betting.log_e_value(random.normal(0.1, 0.3, 1000).clip(-1)) > 20


def test_levels_of_all_turns_together_are_alpha():
    assert sum(betting.spent(0.05, turn) for turn in range(1, 100_000)) == pytest.approx(0.05, rel=1e-4)


def test_mistakes_are_named():
    with pytest.raises(InputError, match="gains"):
        betting.log_e_value([-1.5])
    with pytest.raises(InputError, match="turn"):
        betting.spent(0.05, 0)
