"""What a simulation is off where it was measured is taken away between the loads that were."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from offramp.server.simulating.residual import NONE, residual
from offramp.server.simulating.samples import Level, Series

RATES = (100.0, 200.0, 300.0, 400.0, 500.0)


def level(rate, latencies):
    none = Series([0.0], [0.0])
    return Level(rate, 1.0, none, none, (none,), none, none, np.asarray(latencies))


def drawn(seed, scale=0.01, rows=200_000):  # so many that the slowest, too, are known
    return np.random.default_rng(seed).exponential(scale, rows)


def quantiles(latencies):
    return np.quantile(latencies, [0.1, 0.5, 0.9, 0.99])


def test_a_simulation_that_is_half_everywhere_is_doubled_at_loads_between():
    found = residual([level(rate, 2 * drawn(0)) for rate in RATES], lambda _: drawn(0))
    assert quantiles(found.corrected(drawn(0), 333.0)) == pytest.approx(quantiles(2 * drawn(0)), rel=0.05)


def test_what_grows_with_the_load_is_followed_between_and_kept_beyond():
    def factor(rate):
        return np.exp(rate / 500 - (rate / 500) ** 2 / 3)

    found = residual([level(rate, factor(rate) * drawn(1)) for rate in RATES], lambda _: drawn(1))
    for rate, like in [(250.0, 250.0), (40.0, 100.0), (900.0, 500.0)]:
        expected = quantiles(factor(like) * drawn(1))
        assert quantiles(found.corrected(drawn(1), rate)) == pytest.approx(expected, rel=0.05)


def test_a_tail_that_is_off_is_mended_without_the_middle():
    slow = np.where(drawn(2) > np.quantile(drawn(2), 0.95), 3.0, 1.0) * drawn(2)
    found = residual([level(rate, slow) for rate in RATES], lambda _: drawn(2))
    p10, p50, p90, p99 = quantiles(found.corrected(drawn(2), 300.0)) / quantiles(drawn(2))
    assert [p10, p50, p90] == pytest.approx([1.0] * 3, rel=0.01)
    assert p99 == pytest.approx(3.0, rel=0.1)


def test_what_few_slow_requests_say_counts_little():
    few = [level(rate, 2 * drawn(0, rows=1000)) for rate in RATES]
    p10, p50, p90, p99 = quantiles(residual(few, lambda _: drawn(0, rows=1000)).corrected(drawn(0), 300.0)) / quantiles(
        drawn(0)
    )
    assert 1.75 < p10 < 2
    assert p10 > p50 > p90 > p99
    assert p99 < 1.15


@given(st.integers(0, 10_000), st.integers(0, 300), st.floats(1.0, 1000.0))
def test_the_slower_of_two_requests_stays_the_slower_one(seed, rows, rate):
    found = residual(
        [level(r, drawn(seed + k, 0.02, 2000)) for k, r in enumerate(RATES)],
        lambda one: drawn(int(one.rate), rows=2000),
    )
    simulated = drawn(seed + 9, rows=rows)
    corrected = found.corrected(simulated, rate)
    assert corrected.shape == simulated.shape
    assert (corrected > 0).all()
    assert (np.diff(corrected[np.argsort(simulated)]) >= 0).all()


def test_levels_without_requests_of_an_open_loop_say_nothing():
    assert residual([level(100.0, []), level(200.0, drawn(0, rows=9))], lambda _: drawn(0)) is NONE
    assert residual([level(100.0, drawn(0))], lambda _: np.zeros(0)) is NONE
    assert NONE.corrected(drawn(3), 50.0).tolist() == drawn(3).tolist()


def test_one_level_is_enough():
    found = residual([level(100.0, [0.01] * 60_000), level(900.0, [])], lambda _: np.full(60_000, 0.005))
    assert found.corrected(np.array([0.005]), 500.0) == pytest.approx([0.01], rel=0.01)
