"""Since when rows have been alike."""

import numpy as np
import pytest
from offramp.runtime.online.fitting.alike import alike_since


def residuals(*parts, seed=0):
    """Rows right with the probability p, expected to be with q: (rows, p, q)."""
    random = np.random.default_rng(seed)
    return np.concatenate([(random.random(n) < p) - q for n, p, q in parts])


def test_a_fall_of_accuracy_is_found_where_it_was():
    found = [alike_since(residuals((500, 0.96, 0.96), (400, 0.75, 0.96), seed=s)) for s in range(50)]
    assert np.quantile(np.abs(np.array(found) - 500), 0.9) <= 40


def test_two_changes_are_cut_at_the_later_one():
    found = [alike_since(residuals((800, 0.9, 0.9), (800, 0.5, 0.9), (500, 0.95, 0.9), seed=s)) for s in range(20)]
    assert np.median(np.abs(np.array(found) - 1600)) <= 20


@pytest.mark.parametrize("rows", [0, 1, 59, 60, 500, 5000])
def test_rows_that_are_alike_are_all_kept_nearly_always(rows):
    cut = sum(alike_since(residuals((rows, 0.9, 0.88), seed=s)) > 0 for s in range(200))
    assert cut <= 4  # at most δ = 1% of them, which the bound is far from


def test_equal_residuals_are_alike():
    assert alike_since(np.zeros(1000)) == 0
    assert alike_since(np.full(1000, -0.3)) == 0


def test_a_change_without_noise_is_found():
    assert alike_since(np.repeat([0.0, 0.5], 200)) == 200


def test_the_latest_change_of_any_series_counts():
    calm, late = np.tile([0.2, -0.2], 500), np.repeat([0.0, 0.6], [700, 300])
    early = np.repeat([0.0, 0.6], [200, 800])
    assert alike_since(calm, calm) == 0
    assert alike_since(calm, late) == alike_since(late, calm) == 700
    assert alike_since(early, late) == 700
    assert alike_since(early, calm) == 200
