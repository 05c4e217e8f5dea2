import mpmath
import numpy as np
import pytest
from offramp.runtime import calibration, metrics, scores
from offramp.runtime.calibration.rank_preserving import power_log_odds

BOTH = ["rank_preserving_power", "rank_preserving_isotonic"]


def draw(seed, rows=2000, classes=5, sharpness=2.0):
    random = np.random.default_rng(seed)
    z = random.normal(0, 2, (rows, classes))
    cumulated = scores.softmax(z).cumsum(axis=1)
    return z * sharpness, (random.random((rows, 1)) > cumulated[:, :-1]).sum(axis=1)


def exact_power(s, alpha, classes):
    """Log-odds of f̂_α in 60 digits."""
    with mpmath.workdps(60):
        c, share = 1 / (1 + mpmath.exp(-mpmath.mpf(s))), mpmath.mpf(1) / classes
        bent = share + (1 - share) * ((c - share) / (1 - share)) ** alpha
        mixed = mpmath.mpf("0.05") * c + mpmath.mpf("0.95") * bent
        return float(mpmath.log(mixed / (1 - mixed)))


@pytest.mark.parametrize("alpha", [0.01, 0.5, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_the_power_is_exact_from_chance_to_certainty(alpha, classes):
    s = np.concatenate([-np.log(classes - 1) + np.geomspace(1e-6, 5, 30), [20, 39.9, 40.1, 50.0]])
    s = s[s > -np.log(classes - 1) + 1e-9]
    expected = [exact_power(float(v), alpha, classes) for v in s]
    np.testing.assert_allclose(power_log_odds(s, alpha, classes), expected, rtol=1e-9, atol=1e-9)


def test_the_power_pins_both_ends_and_is_nothing_at_one():
    s = np.linspace(-np.log(9), 60, 500)
    np.testing.assert_allclose(power_log_odds(s, 1.0, 10), s, rtol=1e-9, atol=1e-9)
    assert scores.sigmoid(power_log_odds(-np.log(9.0), 7.0, 10)) == pytest.approx(0.1)
    assert scores.sigmoid(power_log_odds(scores.LARGEST, 7.0, 10)) == 1.0


def million(kind, dtype=np.float32):
    random = np.random.default_rng(1)
    if kind == "normal":
        s = random.normal(4, 6, 1_000_000)
    elif kind == "certain":
        s = random.uniform(30, 100, 1_000_000)
    elif kind == "chance":
        s = -np.log(9) + random.gamma(0.3, 1.0, 1_000_000)
    else:
        s = random.choice([-1.0, 0.0, 3.0, 50.0, 1e4, 1e30, scores.LARGEST], 1_000_000)
    return s.astype(dtype)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, np.float32) for kind in ("normal", "certain", "chance", "a few, tied")),
        *((kind, np.float64) for kind in ("normal", "certain", "a few, tied")),
    ],
)
@pytest.mark.parametrize("outcome", ["over-confident", "under-confident", "all right", "all wrong"])
def test_the_order_of_a_million_scores_stays(name, kind, outcome, dtype):
    z, y = draw(2, classes=10, sharpness=3.0 if outcome == "over-confident" else 0.3)
    if outcome.startswith("all"):
        y = z.argmax(1) if outcome == "all right" else z.argmin(1)
    one = calibration.get(name).fit(z, y)
    s = million(kind, dtype)
    moved = one.score({"score": s})
    np.testing.assert_array_equal(np.argsort(s, kind="stable"), np.argsort(moved, kind="stable"))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_the_next_float32_is_more_confident_and_so_is_a_float64_a_billionth_away(name, sharpness):
    z, y = draw(7, classes=10, sharpness=sharpness)
    one = calibration.get(name).fit(z, y)
    random = np.random.default_rng(7)
    parts = [random.normal(4, 6, 50_000), random.uniform(7.9, 41, 50_000), np.geomspace(40, 1e37, 50_000)]
    s = np.concatenate(parts)
    s = s[s > 1e-3 - np.log(9)]
    short = s.astype(np.float32)
    short = short[np.abs(short) > 0.02]
    following = np.nextafter(short, np.float32(np.inf))
    assert (one.score({"score": following}) > one.score({"score": short})).all()
    apart = s + 1e-9 * np.maximum(1.0, np.abs(s))
    assert (one.score({"score": apart}) > one.score({"score": s})).all()


def test_near_zero_no_float32_is_less_confident_than_the_one_before():
    z, y = draw(8, classes=10, sharpness=3.0)
    tiny = np.geomspace(1e-44, 1e-6, 5000).astype(np.float32)
    s = np.sort(np.unique(np.concatenate([-tiny, tiny, [np.float32(0)]])))
    for name in BOTH:
        assert (np.diff(calibration.get(name).fit(z, y).score({"score": s})) >= -1e-14).all()


@pytest.mark.parametrize("alpha", [0.01, 0.1, 10.0, 100.0])
def test_the_papers_own_alphas_keep_a_million_scores_apart(alpha):
    s = million("normal")
    np.testing.assert_array_equal(np.argsort(s, kind="stable"), np.argsort(power_log_odds(s, alpha, 10), kind="stable"))


def test_alpha_minimises_the_binary_nll():
    z, y = draw(3)
    one = calibration.get("rank_preserving_power").fit(z, y)
    s, t = scores.log_odds(z), z.argmax(1) == y

    def loss(alpha):
        return -np.log(np.where(t, *(scores.sigmoid(sign * power_log_odds(s, alpha, 5)) for sign in (1, -1)))).mean()

    grid = np.geomspace(0.01, 100, 4001)
    assert loss(one.alpha_) <= min(map(loss, grid)) + 1e-9


def test_alpha_ends_at_its_bracket_when_nothing_bounds_it():
    z, _ = draw(4)
    assert calibration.get("rank_preserving_power").fit(z, z.argmax(1)).alpha_ == pytest.approx(0.01, rel=1e-3)
    assert calibration.get("rank_preserving_power").fit(z, z.argmin(1)).alpha_ == pytest.approx(100.0, rel=1e-3)


def test_the_isotonic_one_is_the_mixture_it_says():
    z, y = draw(5)
    one = calibration.get("rank_preserving_isotonic").fit(z, y)
    s = np.linspace(-1, 15, 200)
    level = np.interp(s, one.points_, one.levels_)
    assert level.min() >= 1 / 2002
    assert level.max() <= 2001 / 2002
    mixed = 0.05 * scores.sigmoid(s) + 0.95 * level
    np.testing.assert_allclose(one.confidence({"score": s}), mixed, atol=2e-5)
    near = s < 8
    np.testing.assert_allclose(one.confidence({"score": s[near]}), mixed[near], atol=1e-12)
    # Beyond s = 8 a slope of at most 1e-4 joins in, for the order's sake.
    top = one.confidence({"score": np.array([20.0, scores.LARGEST])})
    assert 1 - top[1] > 0.9 * (1 - top[0])


@pytest.mark.parametrize("name", BOTH)
def test_exits_and_ranking_metrics_do_not_notice(name):
    z, y = draw(6)
    one = calibration.get(name).fit(z, y)
    s, e = scores.log_odds(z), z.argmax(1) != y
    assert metrics.aurc(one.score({"score": s}), e) == metrics.aurc(s, e)
    assert metrics.auroc_f(one.score({"score": s}), e) == metrics.auroc_f(s, e)
