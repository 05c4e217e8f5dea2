import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import metrics, scores
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.auditing.evidence import audit


def test_entropy_is_one_when_uniform_and_zero_when_certain():
    uniform, certain = np.full((2, 4, 3), 1 / 3), np.zeros((2, 4, 3))
    certain[..., 0] = 1.0
    np.testing.assert_allclose(metrics.routing_entropy(uniform), 1.0)
    np.testing.assert_allclose(metrics.routing_entropy(certain), 0.0)
    assert np.isnan(metrics.routing_entropy(np.ones((2, 4, 1)))).all()
    alpha = np.random.default_rng(0).dirichlet(np.ones(5), (3, 6))
    expected = -(alpha * np.log(alpha)).sum(2).mean(1) / np.log(5)
    np.testing.assert_allclose(metrics.routing_entropy(alpha), expected)


def test_a_profile_leaves_out_layers_without_a_choice():
    h = np.array([[np.nan, np.nan], [0.2, 0.4], [0.6, 0.8]])
    found = metrics.profile(h)
    np.testing.assert_allclose(found.r_agg, [0.4, 0.6])
    np.testing.assert_allclose(found.r_std, [0.2, 0.2])
    np.testing.assert_allclose(found.last, [0.6, 0.8])
    np.testing.assert_allclose(found.concentration, [0.6, 0.4])
    np.testing.assert_allclose(found.weighted([0.5, 1.0]), [0.2, 0.6])
    with pytest.raises(InputError, match="NaN in row 1"):
        metrics.profile([[0.1, np.nan], [0.2, 0.3]])
    with pytest.raises(InputError, match="at least one sub-layer"):
        metrics.profile([[np.nan, np.nan]])


def test_tertiles_put_a_tie_at_a_cut_below_it():
    assert metrics.tertiles([1, 2, 3, 4, 5, 6], [2, 4]).tolist() == [0, 0, 1, 1, 2, 2]
    assert metrics.tertiles(np.ones(5)).tolist() == [0] * 5


def slow_gaps(c, t, rho, bins, least):
    low, high = np.quantile(rho, [1 / 3, 2 / 3])
    gaps, weights = [], []
    for b in range(bins):
        inside = (c <= (b + 1) / bins) & ((c > b / bins) | (b == 0))
        bottom, top = inside & (rho <= low), inside & (rho > high)
        if min(bottom.sum(), top.sum()) >= least:
            gaps.append(abs(t[top].mean() - t[bottom].mean()))
            weights.append(min(bottom.sum(), top.sum()))
    return gaps, weights


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(10, 200), st.integers(1, 10))
def test_matched_gaps_are_those_of_a_loop_over_bins(seed, rows, bins):
    random = np.random.default_rng(seed)
    c, rho = random.random(rows), random.random(rows).round(2)
    t = random.random(rows) < c
    gaps, weights = slow_gaps(c, t, rho, bins, 3)
    found = metrics.matched_gap(c, t, rho, bins, 3)
    assert found.shared_bins == len(gaps)
    if gaps:
        assert found.max == pytest.approx(max(gaps))
        assert found.weighted == pytest.approx(np.average(gaps, weights=weights))
    else:
        assert np.isnan([found.max, found.weighted]).all()


def test_worst_tertile_is_the_largest_of_three():
    random = np.random.default_rng(1)
    c, rho = random.random(300), random.random(300)
    t = random.random(300) < c
    third = metrics.tertiles(rho)
    each = [metrics.ece(c[third == k], t[third == k]) for k in range(3)]
    assert metrics.worst_tertile_ece(c, t, rho) == pytest.approx(max(each))
    assert metrics.worst_tertile_ece(c, t, np.zeros(300)) == pytest.approx(metrics.ece(c, t))
    assert np.isnan(metrics.worst_tertile_ece([], [], []))


def sample(seed, effect, rows=1500):
    random = np.random.default_rng(seed)
    c, rho = random.uniform(0.3, 0.9, rows), random.random(rows)
    return c, random.random(rows) < np.clip(c + effect * (rho - 0.5), 0, 1), rho


def test_a_permutation_p_value_is_even_without_an_effect_and_small_with_one():
    p = [metrics.matched_gap_permutation(*sample(seed, 0.0), permutations=199).weighted for seed in range(200)]
    assert np.mean(np.array(p) <= 0.1) < 0.1 + 3 * np.sqrt(0.1 * 0.9 / 200)
    assert np.mean(p) == pytest.approx(0.5, abs=0.08)
    assert metrics.matched_gap_permutation(*sample(0, 0.6), permutations=199).weighted == pytest.approx(1 / 200)


def test_permuting_is_the_same_as_moving_the_labels_about():
    c, t, rho = sample(3, 0.1, 300)
    random = np.random.default_rng(0)
    place = np.minimum((np.ceil(c * 15) - 1).astype(int), 14)
    moved = []
    for _ in range(600):
        u = t.copy()
        for b in np.unique(place):
            rows = np.flatnonzero(place == b)
            u[rows] = t[random.permutation(rows)]
        moved.append(metrics.matched_gap(c, u, rho).weighted)
    observed = metrics.matched_gap(c, t, rho).weighted
    slow = (1 + (np.array(moved) >= observed).sum()) / 601
    assert metrics.matched_gap_permutation(c, t, rho).weighted == pytest.approx(slow, abs=0.07)


def test_the_gap_that_would_be_found_is_found_in_that_share_of_samples():
    c, _, rho = sample(4, 0.0, 1500)
    right = np.random.default_rng(1).random(1500) < 0.7
    gap = metrics.detectable_gap(c, right, rho, permutations=1000)
    third = metrics.tertiles(rho)
    found = 0
    for seed in range(200):
        moved = np.random.default_rng(seed).random(1500) < 0.7 + gap * (third - 1) / 2
        found += metrics.matched_gap_permutation(c, moved, rho, permutations=400, seed=seed).weighted <= 0.05
    assert 0.7 < found / 200 < 0.9
    assert metrics.detectable_gap(c, right, rho, permutations=1000, level=0.005) > gap
    assert np.isnan(metrics.detectable_gap(c[:12], right[:12], rho[:12]))


def test_holm_adjusts_in_order_and_skips_what_was_not_tested():
    np.testing.assert_allclose(metrics.holm([0.01, 0.04, 0.03]), [0.03, 0.06, 0.06])
    np.testing.assert_allclose(metrics.holm([0.01, np.nan, 0.9]), [0.02, np.nan, 0.9])
    assert metrics.holm([0.6, 0.7]).max() == 1.0


def audited(effect):
    random = np.random.default_rng(5)
    rows = 2400
    routing = random.random((3, rows)) ** (1 + 2 * random.random(rows))
    z = random.normal(0, 1.5, (rows, 3))
    r_std = routing.std(axis=0)
    right = random.random(rows) < np.clip(scores.msr(z) + effect * (r_std - np.median(r_std)), 0.02, 0.98)
    other = np.argsort(z, axis=1)[:, 0]
    return z, np.where(right, z.argmax(1), other), routing


def test_an_audit_of_noise_says_no_and_why():
    z, y, routing = audited(0.0)
    found = audit([z], y, [routing], permutations=300, replicates=300, seeds=3)
    assert not found.yes
    assert found.verdict.startswith("No: at exit 0")
    assert set(found.exits[0].best.kernels.sweep["routed"]) == {0.25, 0.5, 1.0, 2.0, 4.0}
    assert set(found.exits[0].probe.r2) == {"linear", "ridge", "mlp", "mlp_routing", "mlp_shuffled"}


def test_an_audit_finds_routing_that_decides_who_is_right():
    random = np.random.default_rng(6)
    rows = 3000
    level = random.random(rows)
    # Both the spread and the mean of the entropies tell who is right, at any confidence.
    routing = np.stack([level * 0.2, level * 0.9, level * 0.5])
    z = random.normal(0, 1.5, (rows, 3))
    y = np.where(level > 0.5, z.argmax(1), np.argsort(z, axis=1)[:, 0])
    found = audit([z], y, [routing], permutations=300, replicates=300, seeds=3)
    assert found.yes, found.verdict
    assert found.verdict.startswith("Yes: at exit 0")


@pytest.mark.parametrize("feature", ["r_agg", "r_std", "last"])
def test_a_signal_in_one_feature_alone_is_found_and_named(feature):
    random = np.random.default_rng(7)
    rows = 3000
    middle, spread, last = random.uniform(0.35, 0.65, rows), random.uniform(0.02, 0.3, rows), random.random(rows)
    routing = np.stack([middle - spread, middle + spread, middle - spread, middle + spread])
    if feature == "last":
        # Neither the mean of the others nor their spread moves with the last one.
        routing = np.vstack([np.repeat(routing, 5, axis=0), last])
    decides = getattr(metrics.profile(routing), feature)
    z = random.normal(0, 1.5, (rows, 3))
    y = np.where(decides > np.median(decides), z.argmax(1), np.argsort(z, axis=1)[:, 0])
    found = audit([z], y, [routing], permutations=300, replicates=300, seeds=2)
    assert found.yes, found.verdict
    assert found.verdict.startswith(f"Yes: at exit 0 ({feature})")


def test_a_no_says_what_would_have_been_found():
    z, y, routing = audited(0.0)
    found = audit([z], y, [routing], permutations=300, replicates=300, seeds=2)
    assert 0 < found.exits[0].best.detectable < 1
    assert "would have been found" in found.verdict
