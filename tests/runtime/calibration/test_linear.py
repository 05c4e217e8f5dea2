"""A scale for each class."""

import numpy as np
import pytest
from offramp.runtime import calibration, scores

BOTH = ["vector", "classwise_temperature"]


def draw(rows=1500, classes=4):
    random = np.random.default_rng(0)
    z = random.normal(0, 2, (rows, classes))
    y = (random.random((rows, 1)) > scores.softmax(z).cumsum(axis=1)[:, :-1]).sum(axis=1)
    return z * np.linspace(0.5, 2, classes), y


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("ridge", [1e-6, 0.1])
@pytest.mark.parametrize("scale", [0.1, 10.0, 1e3])
def test_logits_of_another_scale_get_the_equivalent_map(name, ridge, scale):
    z, y = draw()
    plain = calibration.get(name, ridge=ridge).fit(z, y)
    other = calibration.get(name, ridge=ridge).fit(z * scale, y)
    np.testing.assert_allclose(other.scale_ * scale, plain.scale_, rtol=1e-3)
    np.testing.assert_allclose(other.apply(z * scale), plain.apply(z), atol=1e-4)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_separable_rows_of_any_scale_stay_finite(name, scale):
    z, _ = draw(300)
    one = calibration.get(name).fit(z * scale, z.argmax(1))
    p = one.apply(z * scale)
    assert np.isfinite(one.scale_).all()
    assert np.isfinite(p).all()
    assert (p.argmax(1) == z.argmax(1)).mean() > 0.99
