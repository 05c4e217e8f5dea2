"""The score inside the graph ranks as float64 does, is never infinite, and agrees with offramp.runtime.scores."""

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from offramp.export.writing.gate_nodes import gate_inputs, gate_nodes
from offramp.runtime import scores
from onnx import helper


def graph(classes: int, dtype: int, plain: bool) -> onnxruntime.InferenceSession:
    nodes, constants = gate_nodes("z", dtype, classes, "label", "score", plain=plain)
    body = helper.make_graph(
        nodes,
        "gate",
        [helper.make_tensor_value_info("z", dtype, ["batch", classes]), *([] if plain else gate_inputs(classes))],
        [
            helper.make_tensor_value_info("label", onnx.TensorProto.INT64, ["batch"]),
            helper.make_tensor_value_info("score", onnx.TensorProto.FLOAT, ["batch"]),
        ],
        constants,
    )
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def run(z, scale=None, bias=None, inverse=None):
    z = np.asarray(z)
    classes = z.shape[1]
    dtype = {"float32": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16, "float64": onnx.TensorProto.DOUBLE}
    feed = {
        "z": z,
        "gate.scale": np.ones(classes, np.float32) if scale is None else scale,
        "gate.bias": np.zeros(classes, np.float32) if bias is None else bias,
        "gate.inv_temperature": np.ones(classes, np.float32) if inverse is None else inverse,
    }
    label, score = graph(classes, dtype[str(z.dtype)], plain=False).run(["label", "score"], feed)
    if scale is bias is inverse is None:  # the gate without calibration inputs gives the same to the bit
        same = graph(classes, dtype[str(z.dtype)], plain=True).run(["label", "score"], {"z": z})
        np.testing.assert_array_equal(same[1], score)
        np.testing.assert_array_equal(same[0][~np.isnan(score)], label[~np.isnan(score)])
    return label, score


def oracle(row, inverse=1.0):
    """Log-odds of the top class in Python floats (float64)."""
    from math import exp, log

    label = max(range(len(row)), key=lambda k: (row[k], -k))
    differences = [(row[k] - row[label]) * inverse for k in range(len(row)) if k != label]
    top = max(differences)
    return label, -(top + log(sum(exp(d - top) for d in differences)))


def test_saturated_logits_keep_the_order_of_float64():
    rng = np.random.default_rng(0)
    z = (rng.standard_normal((4000, 20)) * 30).astype(np.float32)
    shifted = z - z.max(axis=1, keepdims=True)
    softmax = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    assert (softmax.max(axis=1) == 1).mean() > 0.3, "the case must be one where float32 softmax rounds to 1"
    label, score = run(z)
    exact = np.array([oracle([float(v) for v in row])[1] for row in z])
    assert np.isfinite(score).all()
    assert (label == z.argmax(axis=1)).all()
    np.testing.assert_allclose(score, exact, rtol=2e-6, atol=4e-6)
    order = np.argsort(exact, kind="stable")
    apart = np.diff(exact[order]) > 4e-6 * np.maximum(1, np.abs(exact[order][1:]))
    assert (np.diff(score[order])[apart] > 0).all()


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=7),
        elements=st.one_of(
            st.floats(-1e4, 1e4, width=32), st.sampled_from([0.0, 3e38, -3e38, 88.5, -200.0]), st.integers(-2, 2)
        ),
    )
)
def test_the_graph_agrees_with_numpy_on_finite_logits_however_extreme(z):
    label, score = run(z)
    assert np.isfinite(score).all()
    assert (label == scores.top_label(z)).all()
    np.testing.assert_allclose(score, scores.log_odds(z), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "row",
    [
        [np.inf, 1, 2],
        [np.inf, np.inf, 2],
        [-np.inf, -np.inf, -np.inf],
        [np.inf, -np.inf, -np.inf],
        [1, -np.inf, -np.inf],
        [5],
        [np.inf],
        [-np.inf],
    ],
)
def test_infinite_logits_and_a_sole_class_have_a_finite_score_as_in_numpy(row):
    z = np.array([row], np.float32)
    label, score = run(z)
    assert np.isfinite(score).all()
    assert label[0] == scores.top_label(z)[0]
    np.testing.assert_allclose(score, scores.log_odds(z), rtol=1e-6)


@pytest.mark.parametrize("row", [[np.nan, 1, 2], [1, np.nan, 2], [1, 2, np.nan], [np.nan] * 3, [np.nan]])
def test_a_nan_logit_gives_a_nan_score(row):
    _, score = run(np.array([row, [1.0] * len(row)], np.float32))
    assert np.isnan(score[0])
    assert not np.isnan(score[1])


def test_ties_go_to_the_lowest_index():
    label, score = run(np.array([[2, 7, 7, 7], [1, 1, 1, 1]], np.float32))
    assert label.tolist() == [1, 0]
    np.testing.assert_allclose(score, [-np.log(2 + np.exp(-5)), -np.log(3)], rtol=1e-6)


def test_scale_bias_and_temperature_of_the_top_class_apply():
    rng = np.random.default_rng(1)
    z = rng.standard_normal((50, 6)).astype(np.float32) * 4
    scale, bias = rng.uniform(0.5, 2, 6).astype(np.float32), rng.standard_normal(6).astype(np.float32)
    inverse = rng.uniform(0.2, 3, 6).astype(np.float32)
    label, score = run(z, scale, bias, inverse)
    for row, got_label, got in zip(z.astype(np.float64) * scale + bias, label, score, strict=True):
        top, exact = oracle(row.tolist(), inverse=float(inverse[int(np.argmax(row))]))
        assert got_label == top
        assert got == pytest.approx(exact, rel=1e-5, abs=1e-5)


def test_no_rows_give_no_answers():
    label, score = run(np.zeros((0, 3), np.float32))
    assert (len(label), len(score)) == (0, 0)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types_are_scored_in_float32(dtype):
    z = np.array([[1, 3, 2], [40, 0, 1]], dtype)
    _, score = run(z)
    assert score.dtype == np.float32
    np.testing.assert_allclose(score, scores.log_odds(z.astype(np.float32)), rtol=1e-6)
