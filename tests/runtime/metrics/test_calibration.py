import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import metrics, scores
from offramp.runtime.errors import InputError
from offramp.runtime.metrics.bins import equal_width

BY_CLASS = (metrics.cw_ece, metrics.cw_mcs)
TOP_ONE = (metrics.ece, metrics.mcs, metrics.ace, metrics.mce, metrics.accuracy, metrics.smooth_ece)
ALL = (*TOP_ONE, *BY_CLASS, metrics.ws_ece, metrics.ws_mcs, metrics.classwise_ece, metrics.nll, metrics.brier)


def draw(seed, rows, classes, dtype=np.float64):
    """Probabilities with a few at the ends of the range, and labels drawn from tempered ones."""
    random = np.random.default_rng(seed)
    z = random.normal(0, 3, (rows, classes))
    y = np.array([random.choice(classes, p=p) for p in scores.softmax(z / 2)]) if rows else np.zeros(0, int)
    p = scores.softmax(z)
    sharp = random.random(rows) < 0.1
    p[sharp] = np.eye(classes)[p[sharp].argmax(1)]
    p[random.random(rows) < 0.05] = 1 / classes
    return p.astype(dtype), y


def slow_bin(value, bins):
    """Which ((b − 1)/M, b/M] a value falls in, by looking at every edge."""
    edges = [(b + 1) / bins for b in range(bins)]
    return next(b for b, e in enumerate(edges) if value <= e or value == float(np.float32(e)) or b == bins - 1)


def slow_residuals(confidence, correct, bins):
    sums = [0.0] * bins
    for c, t in zip(confidence, correct, strict=True):
        sums[slow_bin(float(c), bins)] += float(c) - float(t)
    return sums


small = {
    "seed": st.integers(0, 10**6),
    "rows": st.integers(1, 60),
    "classes": st.integers(1, 6),
    "bins": st.integers(1, 20),
}


@settings(max_examples=60, deadline=None)
@given(**small)
def test_binned_metrics_are_those_of_a_loop_over_rows(seed, rows, classes, bins):
    p, y = draw(seed, rows, classes)
    c, t = p.max(1), p.argmax(1) == y
    sums = slow_residuals(c, t, bins)
    assert metrics.ece(p, y, bins) == pytest.approx(sum(map(abs, sums)) / rows, abs=1e-12)
    assert metrics.mcs(p, y, bins) == pytest.approx(c.mean() - t.mean(), abs=1e-12)
    assert metrics.accuracy(p, y) == t.mean()
    per_class = [slow_residuals(p[:, k], y == k, bins) for k in range(classes)]
    expected = sum(abs(v) for one in per_class for v in one) / rows / classes
    assert metrics.classwise_ece(p, y, bins) == pytest.approx(expected, abs=1e-12)
    order = np.argsort(c, kind="stable")
    pieces = np.array_split(order, bins)
    assert metrics.ace(p, y, bins) == pytest.approx(sum(abs((c - t)[i].sum()) for i in pieces) / rows, abs=1e-12)
    gaps = []
    for b in range(bins):
        inside = [i for i in range(rows) if slow_bin(c[i], bins) == b]
        if len(inside) >= 2:
            gaps.append(abs((c - t)[inside].mean()))
    assert metrics.mce(p, y, bins, min_count=2) == pytest.approx(max(gaps, default=np.nan), abs=1e-12, nan_ok=True)


@settings(max_examples=40, deadline=None)
@given(**small, by=st.sampled_from(["true", "predicted"]))
def test_class_by_class_metrics_are_the_metrics_of_each_class(seed, rows, classes, bins, by):
    p, y = draw(seed, rows, classes)
    k = y if by == "true" else p.argmax(1)
    e = np.array([metrics.ece(p[k == i], y[k == i], bins) for i in range(classes)])
    m = np.array([metrics.mcs(p[k == i], y[k == i], bins) for i in range(classes)])
    n = np.bincount(k, minlength=classes)
    np.testing.assert_allclose(metrics.cw_ece(p, y, bins, by=by), e, atol=1e-12)
    np.testing.assert_allclose(metrics.cw_mcs(p, y, bins, by=by), m, atol=1e-12)
    assert metrics.ws_ece(p, y, bins, by=by) == pytest.approx(np.nansum(n * e) / rows, abs=1e-12)
    found = metrics.miscalibration(p, y, bins, by=by)
    over, under, present = m > 0, m < 0, n > 0
    positive, negative = (n * m)[over].sum() / rows, (n * m)[under].sum() / rows
    total = (over.sum() * positive + under.sum() * negative) / present.sum()
    assert found.positive == pytest.approx(positive, abs=1e-12)
    assert found.negative == pytest.approx(negative, abs=1e-12)
    assert metrics.ws_mcs(p, y, bins, by=by) == pytest.approx(total, abs=1e-12)
    assert found.over_share == over.sum() / present.sum()
    assert np.isnan(found.over_confidence) == (not over.any())
    assert metrics.ws_mcs_pos(p, y, bins, by=by) == found.positive
    assert metrics.ws_mcs_neg(p, y, bins, by=by) == found.negative
    for ours, theirs in (
        (metrics.oc_mcs(p, y, bins, by=by), found.over_confidence),
        (metrics.uc_mcs(p, y, bins, by=by), found.under_confidence),
    ):
        assert ours == pytest.approx(theirs, nan_ok=True)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 60), classes=st.integers(1, 6))
def test_losses_are_those_of_their_formulas(seed, rows, classes):
    p, y = draw(seed, rows, classes)
    own = p[np.arange(rows), y]
    with np.errstate(divide="ignore"):
        assert metrics.nll(p, y) == pytest.approx(-np.log(own).mean())
    assert metrics.brier(p, y) == pytest.approx(((p - np.eye(classes)[y]) ** 2).sum(1).mean())


def test_an_impossible_truth_costs_infinity_and_logits_keep_what_a_softmax_loses():
    z = np.array([[0.0, 800.0], [0.0, 1.0]])
    assert metrics.nll(scores.softmax(z), [0, 1]) == np.inf
    assert metrics.nll(z, [0, 1], from_logits=True) == pytest.approx((800 + np.log1p(np.exp(-1))) / 2)
    assert metrics.nll([[1.0, 0.0]], [1]) == np.inf


@pytest.mark.parametrize("bins", [1, 3, 7, 10, 15, 49, 100])
def test_an_edge_belongs_to_the_bin_below_it_and_the_ends_to_the_first_and_last(bins):
    edges = np.arange(bins + 1) / bins
    counts = metrics.reliability(edges, np.zeros(bins + 1, int), bins).count
    assert counts.tolist() == [2] + [1] * (bins - 1)
    just_above = np.nextafter(edges[:-1], 2)
    assert metrics.reliability(just_above, np.zeros(bins, int), bins).count.tolist() == [1] * bins


def test_confidence_one_shares_the_last_bin():
    assert metrics.ece([0.95, 1.0], [1, 0], 10) == pytest.approx(0.475)


def test_more_adaptive_bins_than_rows_give_each_row_its_own():
    c, t = [0.1, 0.4, 0.5, 0.8, 0.9], [0, 1, 0, 1, 1]
    assert metrics.ace(c, t, 10) == pytest.approx(np.abs(np.subtract(c, t)).mean())


def test_tied_confidences_still_fill_every_adaptive_bin():
    c = np.full(8, 0.5)
    assert metrics.ace(c, [1, 1, 0, 0, 1, 1, 0, 0], 4) == pytest.approx(0.5)


@pytest.mark.parametrize("metric", ALL)
def test_without_rows_a_metric_is_undefined(metric):
    assert np.isnan(metric(np.empty((0, 3)), np.empty(0, int))).all()


@pytest.mark.parametrize("metric", ALL)
def test_one_row_and_one_class_are_fine(metric):
    assert not np.isinf(metric([[0.2, 0.8]], [1])).any()
    value = metric([[1.0]] * 6, [0] * 6)
    assert np.all(np.isclose(value, 1.0 if metric is metrics.accuracy else 0.0, atol=1e-9))


@pytest.mark.parametrize("metric", ALL)
def test_integers_of_any_width_and_whole_floats_are_labels(metric):
    p, y = draw(3, 40, 4)
    expected = metric(p, y)
    for dtype in (np.int8, np.uint8, np.uint64, np.int32, np.float32, np.float64):
        np.testing.assert_array_equal(metric(p, y.astype(dtype)), expected)


@pytest.mark.parametrize("metric", ALL)
def test_unlabelled_rows_are_left_out(metric):
    p, y = draw(4, 40, 4)
    hidden = y.copy()
    hidden[::3] = -1
    np.testing.assert_allclose(metric(p, hidden), metric(p[hidden >= 0], y[hidden >= 0]), rtol=1e-12)
    assert np.isnan(metric(p, np.full(40, -1))).all()


@pytest.mark.parametrize("metric", [m for m in ALL if m not in (metrics.ace, metrics.mce)])
def test_a_weight_of_two_is_the_row_twice(metric):
    p, y = draw(5, 60, 4)
    w = np.random.default_rng(0).integers(0, 3, 60)
    # relplot adds 1e-4 to the density of the rows as they are counted.
    exactness = 1e-5 if metric is metrics.smooth_ece else 1e-9
    repeated = metric(np.repeat(p, w, 0), np.repeat(y, w))
    np.testing.assert_allclose(metric(p, y, weights=w), repeated, rtol=exactness, atol=1e-12)


@pytest.mark.parametrize("metric", ALL)
def test_mistakes_are_named_with_the_fix(metric):
    p, y = draw(6, 12, 4)
    with pytest.raises(InputError, match=r"one-hot.*argmax\(axis=1\)"):
        metric(p, np.eye(4)[y])
    with pytest.raises(InputError, match="row 2"):
        metric(p, np.where(np.arange(12) == 2, 4, y))
    with pytest.raises(InputError, match="row 7"):
        metric(p, np.where(np.arange(12) == 7, 0.5, y))
    with pytest.raises(InputError, match="expected 12 rows"):
        metric(p, y[:5])
    broken = p.copy()
    broken[[3, 9], 1] = np.nan
    with pytest.raises(InputError, match="NaN in rows 3, 9"):
        metric(broken, y)


@pytest.mark.parametrize("metric", [metrics.ece, metrics.cw_mcs, metrics.nll])
def test_logits_are_refused_where_probabilities_belong(metric):
    with pytest.raises(InputError, match=r"softmax\(logits\)"):
        metric(np.full((3, 4), 7.0), [0, 1, 2])


@pytest.mark.parametrize("metric", [metrics.ece, metrics.brier, metrics.classwise_ece])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_outside_0_to_1_are_refused_with_their_rows(metric, dtype):
    rng = np.random.default_rng(0)
    p, y = rng.dirichlet(np.full(4, 0.2), 50).astype(dtype), np.arange(50) % 4
    over = np.flatnonzero(p.max(axis=1) > 0.5 + 1e-5)
    for wrong, first in ((p - 1, 0), (p * 2, over[0])):
        with pytest.raises(InputError, match=rf"expected numbers in \[0, 1\], not so in rows {first}, "):
            metric(wrong, y)
    # A float32 softmax may miss by its rounding.
    nearly = metric((p * (1 + 2e-7) - 1e-7).astype(dtype), y)
    assert nearly == pytest.approx(metric(p, y), abs=1e-5)


@pytest.mark.parametrize("metric", [metrics.brier, metrics.classwise_ece])
def test_one_value_outside_in_a_class_that_is_neither_true_nor_top_is_found(metric):
    p = np.array([[0.7, 0.3, 0.0], [0.7, 0.4, -0.1]])
    with pytest.raises(InputError, match="not so in row 1;"):
        metric(p, [0, 0])


def test_wrong_options_are_named():
    for call, word in (
        (lambda: metrics.ece([0.5], [1], 0), "bins"),
        (lambda: metrics.cw_ece([[0.5, 0.5]], [1], by="nobody"), "by"),
        (lambda: metrics.smooth_ece([0.5], [1], "other"), "convention"),
        (lambda: metrics.smooth_ece([0.5], [1], width=0.0), "width"),
        (lambda: metrics.ece([0.5], [1], weights=[-1.0]), "weights"),
        (lambda: metrics.ece([0.5], [1], weights=[0.0]), "weights"),
    ):
        with pytest.raises(InputError, match=word):
            call()


def test_float32_probabilities_lose_nothing_but_their_own_rounding():
    p, y = draw(7, 3000, 20, np.float32)
    wide = p.astype(np.float64)
    for metric in ALL:
        np.testing.assert_allclose(metric(p, y), metric(wide, y), rtol=1e-9, atol=1e-12)


def test_big_arrays_are_walked_in_blocks_with_the_same_result():
    random = np.random.default_rng(8)
    p = random.dirichlet(np.full(50, 0.05), 100_000).astype(np.float32)
    y = random.integers(0, 50, 100_000)
    few = slice(0, 100_000, 20)
    assert metrics.classwise_ece(p, y) == pytest.approx(np.mean([metrics.ece(p[:, k], y == k) for k in range(50)]))
    assert metrics.brier(p[few], y[few]) == pytest.approx(
        ((p[few].astype(float) - np.eye(50)[y[few]]) ** 2).sum(1).mean()
    )


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 40), width=st.floats(0.02, 0.5))
def test_exact_smooth_error_is_the_integral_of_the_smoothed_residual(seed, rows, width):
    random = np.random.default_rng(seed)
    c, t = random.random(rows), random.integers(0, 2, rows)
    u = (np.arange(4000) + 0.5) / 4000
    # Reflection at 0 and 1 as mirror images, as many as matter.
    images = np.concatenate([2 * k + sign * c for k in range(-3, 4) for sign in (1, -1)])
    kernel = np.exp(-((u[:, None] - images) ** 2) / (2 * width**2)) / (np.sqrt(2 * np.pi) * width)
    smoothed = kernel @ np.tile(t - c, 14) / rows
    exact = metrics.smooth_ece(c, t, "exact", width=width)
    assert exact == pytest.approx(np.abs(smoothed).mean(), abs=1e-4)


def test_the_exact_width_is_its_own_error():
    random = np.random.default_rng(9)
    c = random.beta(5, 1, 5000)
    t = random.random(5000) < c**1.5
    value = metrics.smooth_ece(c, t, "exact")
    assert metrics.smooth_ece(c, t, "exact", width=value) == pytest.approx(value, abs=1e-4)
    assert metrics.smooth_ece(c, t) == pytest.approx(value, abs=5e-3)


def test_smooth_reliability_follows_the_accuracy():
    random = np.random.default_rng(10)
    c = random.random(50_000)
    curve = metrics.smooth_reliability(c, random.random(50_000) < c**2, width=0.02)
    inside = (curve.confidence > 0.1) & (curve.confidence < 0.9)
    np.testing.assert_allclose(curve.accuracy[inside], curve.confidence[inside] ** 2, atol=0.05)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("bins", [5, 10, 15])
def test_short_floats_on_a_bin_edge_stay_on_their_side(dtype, bins):
    edges = np.repeat(np.arange(1, bins + 1) / bins, 4)
    right = np.tile([True, False, True, True], bins)
    below = np.repeat(np.arange(bins), 4)
    np.testing.assert_array_equal(equal_width(edges, bins), below)
    np.testing.assert_array_equal(equal_width(edges.astype(dtype).astype(float), bins), below)
    close = pytest.approx(metrics.ece(edges, right, bins), abs=1e-3)
    assert metrics.ece(edges.astype(dtype), right, bins) == close
    p = np.column_stack([edges, 1 - edges])
    assert metrics.classwise_ece(p.astype(dtype), 1 - right, bins) == pytest.approx(
        metrics.classwise_ece(p.astype(dtype).astype(float), 1 - right, bins), abs=1e-12
    )


def test_one_short_float_on_an_edge_does_not_join_the_bin_above():
    # 0.6 and 0.61 with opposite outcomes: in one bin their errors would cancel.
    confidence, right = np.repeat([0.6, 0.61], 20), np.repeat([True, False], 20)
    wide = metrics.ece(confidence, right, 10)
    assert wide > 0.5
    assert metrics.ece(confidence.astype(np.float32), right, 10) == pytest.approx(wide, abs=1e-6)
