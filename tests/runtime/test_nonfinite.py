"""NaN in, where it is let pass: the row says it knows nothing, its neighbours are as they were."""

import math

import numpy as np
import pytest
import torch
from offramp.export import export_bundle
from offramp.runtime import Cascade, InputError, OperatingPoint
from toys import Plain, make


@pytest.fixture(scope="module")
def cascade(tmp_path_factory):
    path = export_bundle(make(Plain), {"x": torch.randn(3, 8)}, tmp_path_factory.mktemp("plain") / "b")
    with Cascade.load(path, threads=1) as loaded:
        yield loaded


def test_a_nan_row_goes_to_the_last_exit_without_a_label_and_abstains(cascade):
    x = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    spoilt = x.copy()
    spoilt[2, 3] = np.nan
    at = cascade.at(OperatingPoint((0.5, 0.5, -math.inf)))
    with pytest.raises(InputError, match="row 2"):
        at.predict({"x": spoilt})
    clean, answer = at.predict({"x": x}), at.predict({"x": spoilt}, allow_nonfinite=True, fetch=("probabilities",))
    assert (answer.label[2], answer.exit[2], answer.abstain[2]) == (-1, 2, True)
    assert np.isnan(answer.confidence[2])
    assert np.isnan(answer.probabilities[2]).all()
    others = np.arange(6) != 2
    assert (answer.label[others] == clean.label[others]).all()
    assert (answer.exit[others] == clean.exit[others]).all()
    np.testing.assert_allclose(answer.confidence[others], clean.confidence[others], atol=1e-6)


def test_infinite_inputs_have_an_answer_too(cascade):
    x = np.full((1, 8), np.inf, np.float32)
    answer = cascade.predict({"x": x}, allow_nonfinite=True)
    assert answer.label[0] >= -1
    assert answer.exit[0] == 2
