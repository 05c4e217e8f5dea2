import numpy as np
import pytest
from offramp.runtime import metrics


def drawn(random, n=150):
    positive = random.random(n) < 0.7
    common = random.normal(size=n) + 1.5 * positive
    return common + random.normal(0, 0.6, n), common + random.normal(0, 0.6, n), positive


def test_the_difference_is_that_of_the_two():
    random = np.random.default_rng(0)
    first, second, positive = drawn(random)
    first = first.round(1)
    w = random.random(150)
    found = metrics.paired_auroc(first, second, positive, weights=w)
    plain = metrics.auroc_f(first, ~positive, weights=w) - metrics.auroc_f(second, ~positive, weights=w)
    assert found.difference == pytest.approx(plain)


def test_the_error_is_the_spread_of_differences_with_and_without_weights():
    random = np.random.default_rng(0)
    for kept in (1.0, 0.4):
        found = []
        for _ in range(400):
            first, second, positive = drawn(random, 300)
            chance = np.where(second > 1, kept, 1.0)
            rows = random.random(300) < chance
            found.append(
                metrics.paired_auroc(first[rows], second[rows], positive[rows], weights=1 / chance[rows]),
            )
        spread = np.std([one.difference for one in found])
        assert np.mean([one.error for one in found]) == pytest.approx(spread, rel=0.1)


def test_what_is_not_known_is_not_made_up():
    score = np.arange(4.0)
    assert np.isnan(metrics.paired_auroc(score, score, np.ones(4)).difference)
    assert metrics.paired_auroc(score, -score, [1, 1, 1, 0]).error == np.inf
    assert metrics.paired_auroc(score, score, [1, 1, 0, 0]).error == 0


def test_several_rankings_of_the_same_rows_are_averaged_by_their_negatives_and_are_no_more_rows():
    random = np.random.default_rng(0)
    first, second, positive = drawn(random, 400)
    once = metrics.paired_auroc(first, second, positive)
    twice = metrics.paired_auroc([first, first], [second, second], [positive, positive])
    assert (twice.difference, twice.error) == pytest.approx((once.difference, once.error))
    other = positive | (random.random(400) < 0.5)
    mixed = metrics.paired_auroc([first, first], [second, second], [positive, other])
    alone = metrics.paired_auroc(first, second, other)
    sizes = (~positive).sum(), (~other).sum()
    assert mixed.difference == pytest.approx(np.average([once.difference, alone.difference], weights=sizes))
    only = metrics.paired_auroc([first, first], [second, second], [positive, np.ones(400)])
    assert only.difference == pytest.approx(once.difference)
