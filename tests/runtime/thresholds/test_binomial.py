import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime.thresholds.binomial import binomial_cdf, binomial_upper
from scipy.special import bdtr, betaincinv


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200_000), st.floats(0, 1), st.floats(1e-6, 1 - 1e-6))
def test_the_distribution_is_scipys(n, share, p):
    k = int(share * n)
    assert binomial_cdf(k, n, p) == pytest.approx(bdtr(k, n, p), rel=1e-9, abs=1e-280)


def test_small_counts_are_plain_sums_and_shapes_broadcast():
    found = binomial_cdf(np.arange(4)[:, None], 3, np.array([0.25, 0.5]))
    assert found == pytest.approx(np.cumsum([[27, 8], [27, 24], [9, 24], [1, 8]], axis=0) / 64)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 50_000), st.floats(0, 1), st.sampled_from([1e-4, 0.05, 0.5, 0.9]))
def test_the_upper_bound_is_clopper_and_pearsons(n, share, level):
    k = int(share * n)
    assert binomial_upper(k, n, level) == pytest.approx(betaincinv(k + 1, n - k, 1 - level) if k < n else 1.0, rel=1e-9)
