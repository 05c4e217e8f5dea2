import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as np_arrays
from offramp.runtime import scores
from offramp.runtime.errors import InputError

ORDINARY = st.floats(-30, 30, width=32)
logit_rows = np_arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(2, 7)), elements=ORDINARY)


def slow_log_odds(row, label=None, t=1.0):
    """One row in Python floats, straight from the definition."""
    row = [float(v) for v in row]
    if any(np.isnan(row)):
        return float("nan")
    label = max(range(len(row)), key=lambda k: (row[k], -k)) if label is None else label
    gaps = [0.0 if row[k] == row[label] else t * (row[k] - row[label]) for k in range(len(row)) if k != label]
    if not gaps or max(gaps) == -np.inf:
        return scores.LARGEST
    top = max(gaps)
    if top == np.inf:
        return -scores.LARGEST
    return -(top + np.log(sum(np.exp(g - top) for g in gaps)))


@given(logit_rows)
def test_log_odds_are_those_of_the_definition(z):
    expected = [slow_log_odds(row) for row in z]
    np.testing.assert_allclose(scores.log_odds(z), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(scores.log_odds(z.astype(float)), expected, rtol=1e-13, atol=1e-13)


@given(logit_rows, st.data())
def test_log_odds_of_any_class_at_any_inverse_temperature(z, data):
    label = data.draw(np_arrays(np.int64, len(z), elements=st.integers(0, z.shape[1] - 1)))
    t = data.draw(np_arrays(np.float64, z.shape[1], elements=st.floats(0.1, 5)))
    expected = [slow_log_odds(row, k, t[k]) for row, k in zip(z, label, strict=True)]
    np.testing.assert_allclose(scores.log_odds(z.astype(float), label, t), expected, rtol=1e-12, atol=1e-12)


def test_float32_keeps_the_order_of_float64_where_softmax_merges_rows():
    z = np.random.default_rng(0).normal(0, 8, (20_000, 10)).astype(np.float32)
    exact = scores.log_odds(z.astype(np.float64))
    single = scores.log_odds(z)
    assert single.dtype == np.float32
    order = np.argsort(exact, kind="stable")
    assert (np.diff(single[order]) >= 0).all()
    confidence = np.exp(z - z.max(1, keepdims=True))
    confidence = confidence.max(1) / confidence.sum(1)
    assert len(np.unique(confidence)) < 0.95 * len(z) < len(np.unique(single))


@pytest.mark.parametrize(
    ("row", "label", "score"),
    [
        ([3.0], 0, scores.LARGEST),
        ([-np.inf], 0, scores.LARGEST),
        ([1.0, 1.0], 0, 0.0),
        ([np.inf, np.inf, 0.0], 0, 0.0),
        ([0.0, np.inf, np.inf, np.inf], 1, -np.log(2)),
        ([-np.inf] * 4, 0, -np.log(3)),
        ([0.0, -np.inf, -np.inf], 0, scores.LARGEST),
        ([np.inf, 0.0], 0, scores.LARGEST),
        ([0.0, -2000.0], 0, 2000.0),
        ([0.0, -2000.0, -2000.0], 0, 2000.0 - np.log(2)),
        ([-3.4e38, 3.4e38], 1, scores.LARGEST),
        ([np.nan, 5.0, 7.0], 2, np.nan),
        ([np.nan], 0, np.nan),
        ([np.nan, -np.inf], 0, np.nan),
        ([np.inf, np.nan], 0, np.nan),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ends_of_the_range_are_defined(row, label, score, dtype):
    z = np.array([row], dtype)
    assert scores.top_label(z)[0] == label
    np.testing.assert_allclose(scores.log_odds(z)[0], score, rtol=1e-6)
    assert not np.isinf(scores.log_odds(z)[0])


def test_a_class_far_below_the_top_scores_far_below_zero_but_never_minus_infinity():
    z = np.array([[0.0, -5000.0], [0.0, -np.inf], [np.inf, 0.0]])
    np.testing.assert_allclose(scores.log_odds(z, [1, 1, 1]), [-5000.0, -scores.LARGEST, -scores.LARGEST])


def test_no_rows_give_no_scores_and_no_classes_are_refused():
    assert scores.log_odds(np.empty((0, 4))).shape == (0,)
    assert scores.softmax(np.empty((0, 4))).shape == (0, 4)
    for name in ("msr", "entropy", "margin", "energy", "max_logit"):
        assert scores.get(name)({"logits": np.empty((0, 4))}).shape == (0,)
    with pytest.raises(InputError, match="at least one class"):
        scores.log_odds(np.empty((3, 0)))


@given(logit_rows)
def test_softmax_sums_to_one_and_agrees_with_log_softmax(z):
    p = scores.softmax(z.astype(float))
    np.testing.assert_allclose(p.sum(1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(np.log(p), scores.log_softmax(z.astype(float)), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(scores.sigmoid(scores.log_odds(z.astype(float))), p.max(1), rtol=1e-12)


def test_softmax_at_the_ends():
    z = np.array([[np.inf, np.inf, 0], [-np.inf] * 3, [0, -np.inf, -np.inf], [np.nan, 0, 0]])
    expected = [[0.5, 0.5, 0], [1 / 3] * 3, [1, 0, 0], [np.nan] * 3]
    np.testing.assert_allclose(scores.softmax(z), expected)


def test_sigmoid_and_logit_undo_each_other_and_saturate():
    s = np.linspace(-600, 30, 1001)
    np.testing.assert_allclose(scores.logit(scores.sigmoid(s)), s, rtol=1e-3)
    assert scores.sigmoid([np.inf, -np.inf, 0.0]).tolist() == [1.0, 0.0, 0.5]
    assert scores.logit([0.0, 1.0]).tolist() == [-scores.LARGEST, scores.LARGEST]
    with pytest.raises(InputError, match=r"\[0, 1\]"):
        scores.logit([1.5])


@settings(max_examples=50)
@given(logit_rows)
def test_every_score_of_logits_is_that_of_its_formula(z):
    z = z.astype(float)
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    two = np.sort(p, axis=1)[:, -2:]
    tops = np.sort(z, axis=1)[:, -2:]
    np.testing.assert_allclose(scores.msr(z), p.max(1), rtol=1e-12)
    np.testing.assert_allclose(scores.entropy(z), (p * np.log(p)).sum(1), rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(scores.max_logit(z), z.max(1))
    np.testing.assert_allclose(scores.margin(z), two[:, 1] - two[:, 0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(scores.margin(z, form="logit"), tops[:, 1] - tops[:, 0])
    np.testing.assert_allclose(scores.energy(z), np.log(np.exp(z).sum(1)), rtol=1e-9, atol=1e-12)


def test_entropy_keeps_the_order_of_confident_rows():
    z = np.zeros((60, 3))
    z[:, 0] = np.arange(20, 80)
    assert (np.diff(scores.entropy(z)) > 0).all()


def test_entropy_counts_impossible_classes_as_nothing():
    assert scores.entropy(np.array([[0.0, -np.inf, -np.inf]]))[0] == 0.0
    np.testing.assert_allclose(scores.entropy(np.array([[0.0, 0.0, -np.inf]])), -np.log(2))


def test_reservation_is_the_last_probability_or_that_of_a_separate_logit():
    z = np.random.default_rng(1).normal(size=(5, 4))
    p = scores.softmax(z)
    np.testing.assert_allclose(scores.reservation(z), -p[:, -1])
    np.testing.assert_allclose(scores.reservation(z[:, :-1], z[:, -1]), -p[:, -1])


def test_dropout_scores_are_those_of_the_mean_and_of_its_parts():
    z = np.random.default_rng(2).normal(0, 2, (7, 5, 4))
    p = np.stack([scores.softmax(one) for one in z])
    mean = p.mean(0)
    of_mean = -(mean * np.log(mean)).sum(1)
    mean_of = -(p * np.log(p)).sum(2).mean(0)
    np.testing.assert_allclose(scores.mcd_msr(z), mean.max(1))
    np.testing.assert_allclose(scores.mcd_entropy(z), -of_mean)
    np.testing.assert_allclose(scores.mcd_expected_entropy(z), -mean_of)
    np.testing.assert_allclose(scores.mcd_mutual_information(z), mean_of - of_mean)
    with pytest.raises(InputError, match="passes, rows, classes"):
        scores.mcd_msr(z[0])


def test_mahalanobis_is_the_distance_to_the_nearest_mean():
    rng = np.random.default_rng(3)
    y = rng.integers(0, 3, 400)
    f = rng.normal(size=(400, 4)) @ rng.normal(size=(4, 4)) + 3 * rng.normal(size=(3, 4))[y]
    fitted = scores.Mahalanobis().fit(f, y)
    means = np.stack([f[y == k].mean(0) for k in range(3)])
    inverse = np.linalg.inv(sum(np.outer(r, r) for r in f - means[y]) / len(f))
    slow = [max(-(row - m) @ inverse @ (row - m) for m in means) for row in f[:20]]
    np.testing.assert_allclose(fitted(f[:20]), slow)
    again = scores.Mahalanobis.from_dict(json.loads(json.dumps(fitted.to_dict())))
    assert (again(f) == fitted(f)).all()


def test_mahalanobis_survives_a_feature_that_never_varies_and_an_absent_class():
    rng = np.random.default_rng(4)
    f = np.hstack([rng.normal(size=(50, 2)), np.ones((50, 1))])
    fitted = scores.Mahalanobis().fit(f, np.where(np.arange(50) % 2, 5, -1))
    assert np.isfinite(fitted(f)).all()


def test_a_score_is_found_by_name_and_names_what_it_misses():
    assert set(scores.names()) >= {
        *(
            "msr",
            "logodds",
            "entropy",
            "max_logit",
            "margin",
            "energy",
            "mahalanobis",
            "external",
            "reservation",
        ),
        *("mcd_msr", "mcd_entropy", "mcd_expected_entropy", "mcd_mutual_information"),
    }
    z = np.zeros((2, 3))
    assert scores.get("external")({"external": [[0.5], [np.inf]]}).tolist() == [0.5, scores.LARGEST]
    with pytest.raises(InputError, match='"reservation": needs reservation'):
        scores.get("reservation")({"logits": z})
    with pytest.raises(InputError, match="expected one of msr"):
        scores.get("nonsense")
    with pytest.raises(InputError, match=r"fit scores\.Mahalanobis"):
        scores.get("mahalanobis")({"features": z})
    scores.register("first", lambda logits: logits[:, 0])
    assert scores.get("first")({"logits": z}).shape == (2,)


@pytest.mark.parametrize("t", [0.0, -1.0, np.inf, [1.0, 2.0]])
def test_impossible_inverse_temperatures_are_refused(t):
    with pytest.raises(InputError, match="inv_temperature"):
        scores.log_odds(np.zeros((2, 3)), None, t)


def test_big_arrays_walked_by_several_threads_agree_with_small_ones():
    z = np.random.default_rng(5).normal(size=(60_000, 100)).astype(np.float32)
    np.testing.assert_array_equal(scores.log_odds(z)[-500:], scores.log_odds(z[-500:]))
    np.testing.assert_array_equal(scores.top_label(z), z.argmax(1))
