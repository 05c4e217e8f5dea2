import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import calibration, metrics, scores
from offramp.runtime.calibration.binning import mass_edges
from offramp.runtime.calibration.monotone import Beta, MonotoneLine
from offramp.runtime.calibration.protocol import Given
from offramp.runtime.errors import InputError
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression


def draw(seed, rows=2000, power=1.5):
    random = np.random.default_rng(seed)
    z = random.normal(0, 2, (rows, 4))
    y = np.where(random.random(rows) < scores.msr(z) ** power, z.argmax(1), z.argmin(1))
    return z, y, scores.log_odds(z), z.argmax(1) == y


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=30))
def test_isotonic_regression_agrees_with_scikit_learn_ties_and_weights_included(rows):
    x, y, w = (np.array(column, float) for column in zip(*rows, strict=True))
    expected = IsotonicRegression(out_of_bounds="clip").fit(x, y, w)
    line = calibration.isotonic_regression(x, y, w)
    at = np.linspace(-1, 9, 41)
    np.testing.assert_allclose(line(at), expected.predict(at), atol=1e-9)


def test_an_empty_isotonic_fit_is_refused():
    with pytest.raises(InputError, match="same length"):
        calibration.isotonic_regression([], [])


def test_beside_a_level_of_one_the_line_keeps_its_log_odds():
    line = MonotoneLine(np.array([0.0, 1.0]), np.array([0.5, 1.0]))
    near = 1 - np.geomspace(1e-2, 1e-15, 40)
    expected = np.log(0.5 + near / 2) - np.log((1 - near) / 2)
    np.testing.assert_allclose(line.log_odds(near), expected, rtol=1e-9)
    assert line.log_odds([1.0, 2.0]).tolist() == [scores.LARGEST] * 2
    assert MonotoneLine(np.array([3.0]), np.array([0.25])).log_odds([1.0])[0] == scores.logit(0.25)


def test_platt_is_logistic_regression_on_his_targets():
    z, y, s, t = draw(0)
    one = calibration.get("platt").fit(z, y)
    up, down = (t.sum() + 1) / (t.sum() + 2), 1 / ((~t).sum() + 2)
    target = np.where(t, up, down)
    # Fractional targets as two weighted rows each.
    rows = np.concatenate([s, s])[:, None]
    weight = np.concatenate([target, 1 - target])
    outcome = np.repeat([1, 0], len(s))
    expected = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(rows, outcome, weight)
    assert one.slope_ == pytest.approx(expected.coef_[0, 0], rel=1e-4)
    assert one.intercept_ == pytest.approx(expected.intercept_[0], abs=1e-4)


def test_platt_gives_any_score_a_probability():
    random = np.random.default_rng(1)
    score = random.normal(1e6, 300.0, 5000)
    correct = random.random(5000) < scores.sigmoid((score - 1e6) / 100)
    one = calibration.Platt().fit_score(score, correct)
    assert metrics.ece(one.confidence({"score": score}), correct) < 0.03
    assert calibration.from_dict(one.to_dict()).slope_ == one.slope_


def test_beta_is_the_constrained_logistic_fit():
    z, y, s, t = draw(2)
    one = calibration.get("beta").fit(z, y)
    c = scores.sigmoid(s)
    features = np.column_stack([np.log(c), -np.log1p(-c)])
    expected = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(features, t)
    if (expected.coef_[0] >= 0).all():
        np.testing.assert_allclose(one.coefficients_[:2], expected.coef_[0], rtol=1e-2)
    assert (one.coefficients_[:2] >= 0).all()


class OnScores(Beta):
    """Fitted on scores themselves, negative ones too."""

    def fit_scores(self, score, correct):
        self.classes_ = 2
        self._fit_pairs(Given({"score": score}), correct, np.ones(len(score)))
        return self


def test_beta_prefers_no_scale_where_the_rows_do_not_decide():
    random = np.random.default_rng(9)
    s = random.uniform(40, 80, 4000)  # ln c is nothing here: only b is seen
    correct = random.random(4000) < scores.sigmoid(s / 40)
    fits = [OnScores().fit_scores(s * scale, correct) for scale in (1.0, 8.0)]
    asked = np.array([45.0, 75.0])
    np.testing.assert_allclose(fits[1].score({"score": asked * 8}), fits[0].score({"score": asked}), rtol=1e-4)
    for one, scale in zip(fits, (1.0, 8.0), strict=True):
        a, b, _ = one.coefficients_
        assert 0 <= a * scale < 0.1, "the unseen side has the slope of the seen one, not 1"
        assert 0 <= b * scale < 0.1


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_beta_stays_finite_on_separable_rows_of_any_scale(scale):
    s = np.linspace(-3, 3, 200) * scale
    one = OnScores().fit_scores(s, s > 0)
    odds = one.score({"score": s})
    assert np.abs(odds).max() < 1e4
    assert ((odds > 0) == (s > 0)).all()


def test_beta_sets_a_negative_slope_to_zero():
    z, _, s, _ = draw(3)
    wrong_way = np.where(np.random.default_rng(0).random(2000) < scores.sigmoid(-s), z.argmax(1), z.argmin(1))
    assert calibration.get("beta").fit(z, wrong_way).coefficients_[:2].min() == 0.0


def test_a_histogram_answers_the_share_that_was_right():
    z, y, s, t = draw(4)
    one = calibration.get("histogram_binning", bins=10).fit(z, y)
    c = scores.sigmoid(s)
    found = one.confidence({"score": s})
    place = np.ceil(c * 10).astype(int)
    for b in np.unique(place):
        np.testing.assert_allclose(found[place == b], t[place == b].mean())
    # No top class of four is as unsure as 15%: that bin is empty and answers its middle.
    assert one.confidence({"score": scores.logit([0.15])})[0] == pytest.approx(0.15)


def test_equal_mass_edges_never_split_a_tie():
    ordered = np.sort(np.repeat([1.0, 2.0, 3.0, 4.0], [50, 1, 1, 48]))
    edges = mass_edges(ordered, 10)
    assert not set(edges) & {2.5} or len(edges) <= 3
    for edge in edges:
        assert edge not in ordered
    near = np.sort(np.array([1.0, np.nextafter(1.0, 2), 5.0, 6.0]))
    for edge in mass_edges(near, 4):
        assert (near <= edge).any()
        assert (near > edge).any()


def test_bbq_averages_binnings_by_how_well_they_explain():
    z, y, s, _ = draw(5, 3000, 3.0)
    one = calibration.get("bbq").fit(z, y)
    _, _, new_s, new_t = draw(6, 3000, 3.0)
    assert metrics.ece(one.confidence({"score": new_s}), new_t) < 0.04
    assert (np.diff(one.edges_) > 0).all()
    assert ((one.levels_ > 0) & (one.levels_ < 1)).all()
    # A coin says nothing about any bin: one bin explains it best, and the average is nearly flat.
    coin = np.random.default_rng(0).random(3000) < 0.5
    flat = calibration.get("bbq").fit(z, np.where(coin, z.argmax(1), z.argmin(1)))
    assert np.ptp(flat.confidence({"score": s})) < 0.15


def test_rcmmc_confidence_does_not_fall_with_the_margin():
    z, y, _, _ = draw(7, 4000)
    one = calibration.get("rcmmc").fit(z, y)
    confidence = one.confidence({"logits": z})
    margin, entropy = scores.margin(z), -scores.entropy(z)
    row = np.searchsorted(one.margin_edges_, margin)
    column = np.searchsorted(one.entropy_edges_, entropy)
    for j in range(5):
        means = [confidence[(row == i) & (column == j)].mean() for i in range(5) if ((row == i) & (column == j)).any()]
        assert (np.diff(means) > -0.02).all()
