import numpy as np
import pytest
from offramp.runtime import calibration, metrics, scores
from offramp.runtime.calibration.kernel import Smoother, scott


def draw(seed, rows=2000, classes=4):
    random = np.random.default_rng(seed)
    z = random.normal(0, 2, (rows, classes))
    y = np.where(random.random(rows) < scores.msr(z) ** 1.5, z.argmax(1), z.argmin(1))
    return z, y, random.random((6, rows))


def slow_estimate(points, target, bandwidth, at):
    """One row's Nadaraya–Watson sum in plain Python."""
    logs = [-sum(((a - p) / h) ** 2 / 2 for a, p, h in zip(at, point, bandwidth, strict=True)) for point in points]
    weights = [np.exp(v - max(logs)) for v in logs]
    return sum(w * t for w, t in zip(weights, target, strict=True)) / sum(weights)


def test_bandwidths_are_scotts_with_the_sample_deviation():
    points = np.random.default_rng(0).random((500, 2)) * [1, 7]
    np.testing.assert_allclose(scott(points), points.std(0, ddof=1) * 500 ** (-1 / 6))
    np.testing.assert_allclose(scott(points[:, :1]), points[:, :1].std(0, ddof=1) * 500 ** (-1 / 5))
    # A feature that never varies is dropped, and doesn't count as a dimension.
    flat = np.column_stack([points[:, 0], np.full(500, 0.1)])
    np.testing.assert_allclose(scott(flat), [points[:, 0].std(ddof=1) * 500 ** (-1 / 5), 0.0])


@pytest.mark.parametrize("name", ["nw_confidence", "nw_confidence_entropy", "ar_condcal"])
def test_the_estimate_is_the_weighted_mean_of_its_definition(name):
    z, y, routing = draw(1, 300)
    one = calibration.get(name).fit(z, y, aux={"routing": routing})
    c = scores.sigmoid(scores.log_odds(z))
    r = routing.std(axis=0)
    features = {
        "nw_confidence": c[:, None],
        "nw_confidence_entropy": np.column_stack([c, -scores.entropy(z)]),
        "ar_condcal": np.column_stack([c, (r - r.min()) / (r.max() - r.min())]),
    }[name]
    bandwidth = features.std(0, ddof=1) * 300 ** (-1 / (features.shape[1] + 4))
    found = one.target({"logits": z[:20], "routing": routing[:, :20]})
    slow = [slow_estimate(features, z.argmax(1) == y, bandwidth, at) for at in features[:20]]
    np.testing.assert_allclose(found, slow, rtol=1e-9)


@pytest.mark.parametrize("shape", ["even", "bunched at one", "a curve", "two clouds"])
def test_the_serving_form_is_within_a_thousandth_of_exact_everywhere(shape):
    random = np.random.default_rng(2)
    n = 10_000
    c, r = random.random(n), random.beta(2, 5, n)
    if shape == "bunched at one":
        c = random.beta(8, 1, n) ** 0.5
    elif shape == "a curve":
        r = c**2 + random.normal(0, 1e-3, n)
    elif shape == "two clouds":
        c = np.where(random.random(n) < 0.5, 0.2, 0.9) + random.normal(0, 0.01, n)
    points = np.column_stack([c, r])
    smoother = Smoother(points, (random.random(n) < c).astype(float), np.ones(n), scott(points))
    span = points.max(0) - points.min(0)
    asked = np.concatenate(
        [
            points[:500],
            points[500:1000] + 0.05 * random.normal(size=(500, 2)),
            random.random((500, 2)) * span * 1.4 - 0.2,
        ]
    )
    np.testing.assert_allclose(smoother(asked), smoother.exact(asked), atol=1e-3)


def test_near_certainty_rows_keep_log_odds_of_their_own():
    random = np.random.default_rng(8)
    points = random.random((2000, 1))
    smoother = Smoother(points, (points[:, 0] > 0.3).astype(float), np.ones(2000), np.array([0.02]))
    asked = np.linspace(0.35, 0.64, 200)[:, None]
    exact, served = smoother.exact_log_odds(asked), smoother.log_odds(asked)
    assert (smoother.exact(asked)[-50:] == 1.0).all()
    assert (np.diff(exact) > 0).all()
    assert (np.diff(served) > 0).all()
    np.testing.assert_allclose(served, exact, rtol=1e-2)


def test_one_feature_is_interpolated_as_well():
    random = np.random.default_rng(3)
    points = random.beta(0.5, 0.5, 10_000)[:, None]
    smoother = Smoother(points, (random.random(10_000) < 0.5).astype(float), np.ones(10_000), scott(points))
    asked = random.random((2000, 1)) * 1.2 - 0.1
    np.testing.assert_allclose(smoother(asked), smoother.exact(asked), atol=1e-3)


def test_far_from_all_rows_the_nearest_decides_and_nothing_underflows():
    smoother = Smoother(np.array([[0.0], [1.0]]), np.array([0.0, 1.0]), np.ones(2), np.array([1e-3]))
    assert smoother.exact(np.array([[-50.0], [50.0], [0.4], [0.6]])).tolist() == [0.0, 1.0, 0.0, 1.0]
    np.testing.assert_allclose(smoother(np.array([[-50.0], [50.0], [0.4], [0.6]])), [0, 1, 0, 1], atol=1e-3)


def test_leave_one_out_is_a_fit_without_that_row():
    random = np.random.default_rng(4)
    points, target = random.random((30, 2)), random.integers(0, 2, 30).astype(float)
    found = Smoother(points, target, np.ones(30), np.array([0.1, 0.2])).leave_one_out()
    for i in range(30):
        rest = np.arange(30) != i
        expected = slow_estimate(points[rest], target[rest], [0.1, 0.2], points[i])
        assert found[i] == pytest.approx(expected)


def test_routing_that_never_varies_leaves_the_confidence_alone():
    z, y, _ = draw(5, 500)
    same = {"routing": np.full((3, 500), 0.5)}
    routed, plain = calibration.get("ar_condcal").fit(z, y, aux=same), calibration.get("nw_confidence").fit(z, y)
    np.testing.assert_allclose(routed.target({"logits": z, **same}), plain.target({"logits": z}))


def test_routing_that_tells_who_is_right_is_used():
    random = np.random.default_rng(6)
    z = random.normal(0, 1, (4000, 3))
    wild = random.random(4000) < 0.5
    routing = np.where(wild, [[0.1], [0.9]], [[0.5], [0.5]]) + random.normal(0, 0.01, (2, 4000))
    y = np.where(wild, z.argmax(1), z.argmin(1))
    aux = {"routing": routing}
    one = calibration.get("ar_condcal").fit(z, y, aux=aux)
    confidence = one.confidence({"logits": z, **aux})
    assert confidence[wild].min() > 0.9
    assert confidence[~wild].max() < 0.1
    assert metrics.nll(one.apply(z, aux), y) < metrics.nll(calibration.get("nw_confidence").fit(z, y).apply(z), y)


def test_weights_are_repeated_rows_once_the_bandwidth_is_the_same():
    random = np.random.default_rng(7)
    points, target, w = random.random((40, 1)), random.integers(0, 2, 40).astype(float), random.integers(1, 4, 40)
    h, at = np.array([0.1]), random.random((10, 1))
    weighted = Smoother(points, target, w.astype(float), h).exact(at)
    repeated = Smoother(np.repeat(points, w, 0), np.repeat(target, w), np.ones(w.sum()), h).exact(at)
    np.testing.assert_allclose(weighted, repeated)
