import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import calibration, metrics, scores
from offramp.runtime.calibration.solvers.curves import OddsCurves
from offramp.runtime.calibration.temperature import ece_temperature, hedged_inverse_temperature, mixture_weights
from scipy.optimize import minimize_scalar


def draw(seed, rows, classes, truth=1.0, dtype=np.float64):
    """Logits whose optimal temperature is about 1/truth."""
    random = np.random.default_rng(seed)
    z = random.normal(0, 2, (rows, classes))
    cumulated = scores.softmax(z).cumsum(axis=1)
    y = (random.random((rows, 1)) > cumulated[:, :-1]).sum(axis=1)
    return (z * truth).astype(dtype), y


def best(z, y, around):
    """The optimum by brute force in float64."""
    wide = z.astype(np.float64)
    found = minimize_scalar(
        lambda log_t: metrics.nll(wide / np.exp(log_t), y, from_logits=True),
        bounds=(np.log(around / 4), np.log(around * 4)),
        method="bounded",
        options={"xatol": 1e-12},
    )
    return np.exp(found.x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("truth", [1e-6, 1e-3, 0.1, 1.0, 3.0, 100.0, 1e6])
def test_the_optimum_is_found_at_any_scale_and_in_float32(truth, dtype):
    z, y = draw(0, 3000, 6, truth, dtype)
    found = calibration.get("temperature").fit(z, y)
    assert found.has_optimum_
    assert found.temperature_ == pytest.approx(best(z, y, truth), rel=1e-5)


def test_a_large_set_is_started_from_a_part_of_it_and_ends_at_the_optimum():
    z, y = draw(1, 40_000, 120, 2.0, np.float32)
    assert calibration.get("temperature").fit(z, y).temperature_ == pytest.approx(best(z, y, 2.0), rel=1e-5)


def test_weights_move_the_optimum_as_repeated_rows_do():
    z, y = draw(2, 500, 4)
    w = np.arange(500) % 3
    weighted = calibration.get("temperature").fit(z, y, weights=w).temperature_
    repeated = calibration.get("temperature").fit(np.repeat(z, w, 0), np.repeat(y, w)).temperature_
    assert weighted == pytest.approx(repeated, rel=1e-9)


def by_hand(z, y, w):
    """The hedged β straight from its definition, with derivatives by differences."""
    beta = 1 / calibration.get("temperature").fit(z, y, weights=w).temperature_
    step, rows = 1e-4 * beta, np.arange(len(z))

    def losses(b):
        return np.log(np.exp(b * z).sum(axis=1)) - b * z[rows, y]

    slopes = (losses(beta + step) - losses(beta - step)) / (2 * step)
    curve = w @ (losses(beta + step) - 2 * losses(beta) + losses(beta - step)) / step**2
    error = np.sqrt(w @ slopes**2) / curve / beta  # of ln β
    t = np.log(beta) / error
    return beta ** (t**2 / (0.5 + t**2))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), rows=st.integers(30, 400), truth=st.floats(0.3, 3.0))
def test_a_hedged_temperature_lies_between_none_and_the_fitted_by_the_formula(seed, rows, truth):
    z, y = draw(seed, rows, 4, truth)
    w = np.random.default_rng(seed).integers(1, 4, rows).astype(float)
    plain = calibration.get("temperature").fit(z, y, weights=w)
    hedged = calibration.get("temperature", hedged=True).fit(z, y, weights=w)
    assert abs(np.log(hedged.temperature_)) <= abs(np.log(plain.temperature_))
    assert np.log(hedged.temperature_) * np.log(plain.temperature_) >= 0
    if plain.has_optimum_:
        assert 1 / hedged.temperature_ == pytest.approx(by_hand(z, y, w), rel=1e-4)


def test_rows_repeated_leave_less_doubt_and_a_weight_counts_as_repetition():
    z, y = draw(12, 60, 4, 1.3)
    moved = [
        abs(np.log(calibration.get("temperature", hedged=True).fit(np.tile(z, (k, 1)), np.tile(y, k)).temperature_))
        for k in (1, 4, 100)
    ]
    assert moved == sorted(moved)
    assert moved[0] < 0.9 * moved[2]
    weighted = hedged_inverse_temperature(z, y, np.full(60, 4.0))[0]
    assert weighted == pytest.approx(hedged_inverse_temperature(np.tile(z, (4, 1)), np.tile(y, 4), None)[0], rel=1e-9)


def test_hedging_costs_calibrated_logits_less_nll_than_the_fitted_temperature_does():
    """Over many draws of 100 calibrated rows: the excess of both is > 0, the hedged one's is a quarter less."""
    excess = []
    for seed in range(60):
        z, y = draw(seed, 100, 4)
        new, truth = draw(1000 + seed % 5, 20_000, 4)
        plain = metrics.nll(new, truth, from_logits=True)
        for hedged in (False, True):
            one = calibration.get("temperature", hedged=hedged).fit(z, y)
            excess.append(metrics.nll(new / one.temperature_, truth, from_logits=True) - plain)
    fitted, hedged = np.reshape(excess, (-1, 2)).mean(axis=0)
    assert 0 < hedged < 0.75 * fitted


def test_a_label_that_no_temperature_makes_possible_leaves_the_hedged_one_as_it_is_without_it():
    z, y = draw(13, 300, 4, 2.0)
    z[5, (z[5].argmax() + 1) % 4], y[5] = -np.inf, (z[5].argmax() + 1) % 4
    with_it = calibration.get("temperature", hedged=True).fit(z, y).temperature_
    rest = np.arange(300) != 5
    assert with_it == pytest.approx(calibration.get("temperature", hedged=True).fit(z[rest], y[rest]).temperature_)


def test_where_no_optimum_exists_it_says_so_and_stays_usable():
    z, _ = draw(3, 200, 4)
    right = calibration.get("temperature").fit(z, z.argmax(1))
    assert (right.temperature_, right.has_optimum_) == (1.0, False)
    wrong = calibration.get("temperature").fit(z, z.argmin(1))
    assert not wrong.has_optimum_
    np.testing.assert_allclose(wrong.apply(z), 0.25, atol=0.01)


def test_one_wrong_row_among_many_right_ones_does_not_diverge():
    z, _ = draw(4, 1000, 3)
    y = z.argmax(1)
    y[0] = z[0].argsort()[1]
    found = calibration.get("temperature").fit(z, y)
    assert found.has_optimum_
    assert found.temperature_ == pytest.approx(best(z, y, found.temperature_), rel=1e-5)


def test_a_label_at_minus_infinity_is_left_out():
    z, y = draw(5, 300, 4)
    hurt = z.copy()
    hurt[7, y[7]] = -np.inf
    rest = np.arange(300) != 7
    expected = calibration.get("temperature").fit(z[rest], y[rest]).temperature_
    assert calibration.get("temperature").fit(hurt, y).temperature_ == pytest.approx(expected, rel=1e-9)


def test_temperature_changes_the_order_of_rows_as_the_paper_shows():
    """EEFP Tables 1–2: A, B, C at T = 1; B, A, C at T = 0.3; A, C, B at T = 3."""
    z = np.array(
        [
            [-0.7985, -0.9163, -2.3026, -2.9957],
            [-1.6094, -1.6094, -0.9163, -1.6094],
            [-1.204, -0.9676, -1.3471, -2.8134],
        ]
    )
    one = calibration.get("temperature").fit(*draw(6, 100, 4))
    for t, order, confidence in (
        (1.0, "ABC", [0.450, 0.400, 0.380]),
        (0.3, "BAC", [0.594, 0.771, 0.575]),
        (3.0, "ACB", [0.328, 0.296, 0.299]),
    ):
        one.temperature_ = t
        found = one.confidence({"logits": z})
        np.testing.assert_allclose(found, confidence, atol=6e-4)
        assert "".join("ABC"[i] for i in np.argsort(-found)) == order


def test_the_footnotes_two_rows_swap():
    z = np.array([[0.65, 0.34, -1.03], [-0.06, -0.11, 0.60]])
    one = calibration.get("temperature").fit(*draw(7, 100, 3))
    one.temperature_ = 1.0
    assert np.diff(one.score({"logits": z})) < 0
    one.temperature_ = 0.3
    assert np.diff(one.score({"logits": z})) > 0


@pytest.mark.parametrize(("low", "high", "nodes"), [(0.5, 2.0, 21), (0.05, 20.0, 41)])
def test_tabulated_log_odds_agree_with_exact_ones(low, high, nodes):
    z, _ = draw(8, 300, 50, 2.0)
    z[0, :3] = 9.0
    curves = OddsCurves(z, low, high, nodes)
    for beta in np.geomspace(low, high, 23):
        exact = scores.log_odds(z, None, beta)
        np.testing.assert_allclose(curves(beta), exact, atol=1e-5 * max(1.0, beta), rtol=1e-5)
    each = np.geomspace(low, high, 300)
    exact = [scores.log_odds(row[None], None, b)[0] for row, b in zip(z, each, strict=True)]
    np.testing.assert_allclose(curves(each), exact, atol=2e-4, rtol=1e-5)


def test_the_ece_temperature_is_the_best_of_its_grid():
    z, y = draw(9, 400, 5, 1.5)
    grid = np.arange(50, 201) / 100
    each = [metrics.ece(scores.softmax(z / t), y) for t in grid]
    assert each[round((ece_temperature(z, y, None) - 0.5) * 100)] == pytest.approx(min(each), abs=1e-6)


def test_mixture_weights_are_the_best_on_the_simplex():
    random = np.random.default_rng(10)
    parts = random.random((500, 3))
    w = random.random(500)
    mix = mixture_weights(parts, w)
    value = w @ np.log(parts @ mix)
    assert mix.sum() == pytest.approx(1.0)
    for other in random.dirichlet(np.ones(3), 2000):
        assert w @ np.log(parts @ other) <= value + 1e-6


def test_an_ensemble_is_the_mixture_it_says():
    z, y = draw(11, 500, 4, 3.0)
    one = calibration.get("ensemble_temperature").fit(z, y)
    warm, plain, flat = one.weights_
    expected = warm * scores.softmax(z / one.temperature_) + plain * scores.softmax(z) + flat / 4
    np.testing.assert_allclose(one.apply(z), expected)
    np.testing.assert_allclose(one.confidence({"logits": z}), expected.max(1))
    assert metrics.nll(one.apply(z), y) <= metrics.nll(scores.softmax(z / one.temperature_), y) + 1e-9


def test_logit_norm_sees_only_the_direction():
    z, y = draw(12, 500, 4)
    one = calibration.get("logit_norm").fit(z, y)
    np.testing.assert_allclose(one.apply(z * 7), one.apply(z))
    assert one.apply(np.zeros((1, 4))).tolist() == [[0.25] * 4]
    grid = [
        metrics.ece(scores.softmax(t * z / np.linalg.norm(z, axis=1)[:, None]), y) for t in np.geomspace(0.1, 1000, 61)
    ]
    assert metrics.ece(one.apply(z), y) <= min(grid) + 1e-6


def test_soft_binning_finds_the_temperature_of_calibrated_data():
    z, y = draw(13, 8000, 5, 2.0)
    assert calibration.get("sb_ece_temperature").fit(z, y).temperature_ == pytest.approx(2.0, rel=0.1)


def test_parametric_temperature_helps_where_one_temperature_can_not():
    """Rows of two kinds, one over-confident and one not, told apart by their top logits."""
    z, y = draw(14, 4000, 5)
    loud = np.arange(4000) % 2 == 0
    z[loud] *= 4
    one, common = (calibration.get(n).fit(z, y) for n in ("parametric_temperature", "temperature"))
    assert metrics.brier(one.apply(z), y) < metrics.brier(common.apply(z), y)
    again = calibration.get("parametric_temperature").fit(z, y)
    np.testing.assert_array_equal(one.parameters_, again.parameters_)


def test_per_class_scales_undo_a_distortion_of_each_class():
    z, y = draw(15, 6000, 4)
    scale, bias = np.array([0.5, 1.0, 2.0, 4.0]), np.array([0.0, 1.0, -1.0, 0.5])
    vector = calibration.get("vector").fit((z - bias) / scale, y)
    np.testing.assert_allclose(vector.scale_, scale, rtol=0.15)
    np.testing.assert_allclose(vector.bias_ - vector.bias_[0], bias - bias[0], atol=0.2)
    per_class = calibration.get("classwise_temperature").fit(z / scale, y)
    np.testing.assert_allclose(per_class.scale_, scale, rtol=0.15)


@pytest.mark.parametrize(("rows", "classes"), [(60, 3), (2000, 10), (60_000, 20)])
@pytest.mark.parametrize("hedged", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 3, 15_000])
def test_equal_numbers_fit_equal_temperatures_whatever_holds_them(rows, classes, hedged, scale):
    random = np.random.default_rng(rows)
    z = (random.standard_normal((rows, classes)) * scale).clip(-65_000, 65_000).astype(np.float16)
    z[::7, 0] = -np.inf
    labels = (z.astype(np.float64) / scale + random.gumbel(size=z.shape)).argmax(1)
    fitted = [
        calibration.Temperature(hedged).fit(z.astype(kind), labels) for kind in (np.float16, np.float32, np.float64)
    ]
    assert len({one.temperature_ for one in fitted}) == 1
