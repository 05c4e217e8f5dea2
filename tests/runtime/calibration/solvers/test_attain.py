import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import calibration, scores


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 8), st.floats(0.01, 100))
def test_any_confidence_above_chance_is_attained_without_moving_the_argmax(seed, classes, scale):
    random = np.random.default_rng(seed)
    z = random.normal(0, scale, (20, classes))
    target = random.uniform(1 / classes + 1e-5, 1 - 1e-5, 20)
    p = calibration.at_confidence(z, scores.logit(target))
    np.testing.assert_allclose(p.max(axis=1), target, rtol=1e-9)
    np.testing.assert_array_equal(p.argmax(axis=1), z.argmax(axis=1))
    # The answer is a temperature: log-probabilities are the logits times one number, up to a shift.
    rows = np.arange(20)
    gaps = z - z.max(axis=1, keepdims=True)
    logs = np.log(np.maximum(p, 1e-300)) - np.log(target)[:, None]
    second = np.argsort(z, axis=1)[:, -2]
    beta = logs[rows, second] / gaps[rows, second]
    seen = p > 1e-290
    np.testing.assert_allclose(logs[seen], (gaps * beta[:, None])[seen], rtol=1e-6, atol=1e-7)


def test_targets_beyond_the_ends_are_clipped():
    z = np.array([[2.0, 1.0, 0.0]] * 2)
    p = calibration.at_confidence(z, np.array([-50.0, 50.0]))
    np.testing.assert_allclose(p.max(axis=1), [1 / 3 + 1e-6, 1 - 1e-6], rtol=1e-9)
    assert p.argmax(axis=1).tolist() == [0, 0]


def test_tied_classes_get_as_much_as_they_can():
    z = np.array([[3.0, 3.0, 0.0], [1.0, 1.0, 1.0], [np.inf, np.inf, 0.0]])
    p = calibration.at_confidence(z, scores.logit(np.full(3, 0.9)))
    np.testing.assert_allclose(p[0], [0.5, 0.5, 0.0], atol=1e-5)
    np.testing.assert_allclose(p[1], 1 / 3)
    np.testing.assert_allclose(p[2], [0.5, 0.5, 0.0])
    reached = calibration.at_confidence(z[:1], scores.logit(np.array([0.4])))
    np.testing.assert_allclose(reached[0], [0.4, 0.4, 0.2])


def test_classes_at_minus_infinity_stay_impossible():
    z = np.array([[1.0, 0.0, -np.inf], [1.0, -np.inf, -np.inf]])
    p = calibration.at_confidence(z, scores.logit(np.array([0.8, 0.8])))
    np.testing.assert_allclose(p, [[0.8, 0.2, 0.0], [1.0, 0.0, 0.0]])
    # Two classes are left, so less than a half can't be had.
    np.testing.assert_allclose(calibration.at_confidence(z[:1], np.array([-1.0]))[0, :2], 0.5, atol=1e-3)


def test_logits_of_very_unequal_layers_converge():
    z = np.zeros((1, 1000))
    z[0, 0], z[0, 1], z[0, 2:] = 0.0, -1e-3, -1e3
    for target in (0.0015, 0.3, 0.499, 0.51, 0.9, 0.999):
        assert np.isclose(calibration.at_confidence(z, scores.logit(np.array([target]))).max(), target)


def test_one_class_is_certain_and_float32_stays_float32():
    assert calibration.at_confidence(np.zeros((2, 1)), np.zeros(2)).tolist() == [[1.0], [1.0]]
    assert calibration.at_confidence(np.zeros((2, 3), np.float32), np.zeros(2)).dtype == np.float32
