import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import metrics
from offramp.runtime.errors import InputError

BINNINGS = [(m, binning) for m in (1, 3, 7, 40) for binning in ("quantile", "fixed")]


def slow_groups(reports, m, binning):
    """Rows of each bin, straight from the definitions."""
    n = len(reports)
    if binning == "fixed":
        # An edge as float32 spells it is that edge.
        edges = [(b + 1) / m for b in range(m)]
        place = [
            next(b for b, e in enumerate(edges) if v <= e or v == float(np.float32(e)) or b == m - 1) for v in reports
        ]
        return [[i for i in range(n) if place[i] == b] for b in range(m)]
    order = sorted(range(n), key=lambda i: (reports[i], i))
    return [[order[i - 1] for i in range(1, n + 1) if (j - 1) * n < i * m <= j * n] for j in range(1, m + 1)]


def slow_confce(c, t, m, binning):
    return sum(sum(c[i] - t[i] for i in group) ** 2 for group in slow_groups(c, m, binning)) / len(c) ** 2


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.integers(2, 5),
    st.integers(1, 50),
    st.sampled_from(["quantile", "fixed"]),
)
def test_errors_are_those_of_a_loop_over_bins(seed, rows, classes, bins, binning):
    random = np.random.default_rng(seed)
    p = random.dirichlet(np.ones(classes), rows).round(1 if seed % 2 else 6)
    p /= p.sum(1, keepdims=True)
    y = random.integers(0, classes, rows)
    for dtype in (np.float64, np.float32):
        q = p.astype(dtype)
        c, t = q.max(1).astype(float), (q.argmax(1) == y).astype(float)
        plain = slow_confce(c, t, bins, binning)
        assert metrics.confce(q, y, bins, binning) == pytest.approx(plain, abs=1e-12)
        assert metrics.confce_corr(q, y, bins, binning) == pytest.approx(plain + (1 - t.mean()) / rows, abs=1e-12)
        first = sum(abs(sum(c[i] - t[i] for i in group)) for group in slow_groups(c, bins, binning)) / rows
        assert metrics.confece(q, y, bins, binning) == pytest.approx(first, abs=1e-12)
        each = [slow_confce(q[:, k].astype(float), y == k, bins, binning) for k in range(classes)]
        assert metrics.lince_classwise(q, y, bins, binning) == pytest.approx(np.mean(each), abs=1e-12)
        assert metrics.lince(c, t, bins, binning) == pytest.approx(plain, abs=1e-12)


def test_default_bins_are_the_cube_root_rounded_up():
    c, t = np.linspace(0.5, 1, 1000), np.ones(1000)
    assert metrics.confce(c, t) == metrics.confce(c, t, 10)
    assert metrics.confce(c[:729], t[:729]) == metrics.confce(c[:729], t[:729], 9)
    assert metrics.confce(c[:730], t[:730]) == metrics.confce(c[:730], t[:730], 10)


def test_several_dimensions_need_groups_and_add_up():
    random = np.random.default_rng(0)
    u, phi, groups = random.random((20, 3)), random.random((20, 3)), random.integers(0, 4, 20)
    expected = sum(np.sum((u - phi)[groups == g].sum(0) ** 2) for g in range(4)) / 400
    assert metrics.lince(u, phi, groups=groups) == pytest.approx(expected)
    with pytest.raises(InputError, match="groups"):
        metrics.lince(u, phi)


def test_weights_follow_the_weighted_definition():
    random = np.random.default_rng(1)
    c, t, w = random.random(50), random.integers(0, 2, 50), random.random(50) + 0.1
    place = np.minimum((np.ceil(c * 4) - 1).astype(int), 3)
    squares = sum(((w * (c - t))[place == b].sum()) ** 2 for b in range(4))
    expected = (squares + (w**2 * (1 - t)).sum()) / w.sum() ** 2
    assert metrics.confce_corr(c, t, 4, "fixed", weights=w) == pytest.approx(expected)
    assert metrics.confce_corr(c, t, 4, "fixed", weights=np.full(50, 7.0)) == pytest.approx(
        metrics.confce_corr(c, t, 4, "fixed")
    )


def test_a_seed_breaks_ties_at_random_so_that_sorted_outcomes_do_no_harm():
    c, t = np.full(1000, 0.5), np.repeat([0, 1], 500)
    harmed = metrics.confce(c, t, 10)
    mended = np.mean([metrics.confce(c, t, 10, seed=seed) for seed in range(50)])
    assert harmed == pytest.approx(10 * 50**2 / 1000**2)
    assert mended < harmed / 20


@pytest.mark.parametrize("metric", [metrics.confce, metrics.confce_corr, metrics.confece, metrics.lince_classwise])
def test_no_rows_are_undefined_and_one_row_is_not(metric):
    assert np.isnan(metric(np.empty((0, 3)), np.empty(0, int)))
    assert metric([[0.25, 0.75]], [1]) >= 0
    with pytest.raises(InputError, match="binning"):
        metric([[0.25, 0.75]], [1], 2, "round")
    with pytest.raises(InputError, match="NaN in row 1"):
        metric([[0.25, 0.75], [np.nan, 0.5]], [1, 0], 2)


def mean_and_error(values):
    return np.mean(values), np.std(values) / np.sqrt(len(values))


@pytest.mark.parametrize(("bins", "binning"), BINNINGS)
def test_expectations_for_calibrated_reports_do_not_depend_on_the_bins(bins, binning):
    random = np.random.default_rng(2)
    n, classes, draws = 60, 4, 3000
    p = random.dirichlet(np.full(classes, 0.7), n)
    uniform = random.random((draws, n, 1))
    labels = (uniform > p.cumsum(1)[None, :, :-1]).sum(2)
    lince = mean_and_error([metrics.lince_classwise(p, y, bins, binning) for y in labels])
    brier = (1 - (p**2).sum(1)).mean()
    assert abs(lince[0] - brier / (classes * n)) < 4 * lince[1]
    c = p.max(1)
    corrected = mean_and_error([metrics.confce_corr(p, y, bins, binning) for y in labels])
    # E[1 − z + (c − z)²] with z Bernoulli(c)
    expected = (1 - c + c * (1 - c)).mean() / n
    assert abs(corrected[0] - expected) < 4 * corrected[1]


@pytest.mark.parametrize("k", [3, 5])
def test_example_c1_plain_error_prefers_a_lie_and_the_corrected_one_does_not(k):
    """Truth ½e_s + (1/k)e_j + (½ − 1/k)e_t on every row; the lie reports uniform, which selects j = 0."""
    random = np.random.default_rng(3)
    n, draws = 50, 20_000
    labels = random.choice([1, 0, 2], p=[0.5, 1 / k, 0.5 - 1 / k], size=(draws, n))
    truth = np.zeros((n, k))
    truth[:, [1, 0, 2]] = 0.5, 1 / k, 0.5 - 1 / k
    lie = np.full((n, k), 1 / k)
    if k == 3:  # ½, ⅓, ⅙: rounding must not decide which label "uniform" selects
        assert lie[0].argmax() == 0
    plain = [np.mean([metrics.confce(r, y, 1) for y in labels[:4000]]) for r in (truth, lie)]
    corrected = [np.mean([metrics.confce_corr(r, y, 1) for y in labels[:4000]]) for r in (truth, lie)]
    assert plain[0] == pytest.approx(1 / (4 * n), rel=0.1)
    assert plain[1] == pytest.approx((1 / k) * (1 - 1 / k) / n, rel=0.1)
    assert plain[1] < plain[0]
    assert corrected[0] < corrected[1]


@pytest.mark.parametrize("tied", [False, True])
def test_resamples_are_counted_in_the_bins_of_all_rows(tied):
    rng = np.random.default_rng(0)
    c, counts = rng.random(200), rng.multinomial(200, np.full(200, 1 / 200), size=5)
    c = np.round(c, 1) if tied else c
    t = np.sort(rng.random(200) < c)
    ones = metrics.confce_corr_resampled(c, t, np.ones((3, 200)), seed=7)
    assert ones == pytest.approx(200 * metrics.confce_corr(c, t, seed=7))
    shuffled = np.random.default_rng(7).permutation(200)
    order = shuffled[np.argsort(c[shuffled], kind="stable")]
    want = [
        (sum((k[b] @ (c - t)[b]) ** 2 for b in np.split(order, np.arange(1, 6) * 200 // 6)) + k @ ~t) / 200
        for k in counts
    ]
    assert metrics.confce_corr_resampled(c, t, counts, seed=7) == pytest.approx(want)


def test_resamples_of_few_rows_and_of_none():
    assert np.isnan(metrics.confce_corr_resampled([], [], np.ones((2, 0)))).all()
    one = metrics.confce_corr_resampled([0.5, 0.9], [1, 0], np.ones((1, 2)), bins=5)
    assert one == pytest.approx(2 * metrics.confce_corr([0.5, 0.9], [1, 0], bins=5))
    with pytest.raises(InputError, match=r"counts: expected shape \(resamples, 2\)"):
        metrics.confce_corr_resampled([0.5, 0.9], [1, 0], np.ones((1, 3)))


@pytest.mark.parametrize("metric", [metrics.lince_classwise, metrics.brier, metrics.nll, metrics.classwise_ece])
def test_logits_are_refused_by_all_that_read_every_class(metric):
    z = np.array([[0.5, -3.0, 0.1], [0.2, 0.3, 0.5], [0.9, -1.0, 7.0]])
    with pytest.raises(InputError, match=r"not so in rows 0, 2; pass softmax\(logits\)"):
        metric(z, [0, 0, 0])
