"""Inputs that don't fit are refused by name; those that mean the same are taken."""

import numpy as np
import pytest
from offramp.runtime import InputError
from offramp.runtime.bundle import Input, Manifest
from offramp.runtime.inputs import check_inputs


def manifest(*inputs: Input) -> Manifest:
    return Manifest(
        schema="offramp/1", name="m", version="1", created="", producer="", classes=["a"], inputs=list(inputs),
        tensors={}, blocks=[], segments=[], exits=[], files={}, digest="",
    )  # fmt: skip


TEXT = manifest(
    Input(name="ids", dtype="int64", shape=["batch", "seq"]), Input(name="mask", dtype="int64", shape=["batch", "seq"])
)
IMAGE = manifest(Input(name="x", dtype="float32", shape=["batch", 2, 2]))
SECOND = manifest(Input(name="x", dtype="float32", shape=[3, "batch"]))
ids = np.ones((2, 5), np.int64)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (TEXT, {"ids": ids}, "inputs lacks 'mask'; the model takes \\['ids', 'mask'\\]"),
        (TEXT, {"ids": ids, "mask": ids, "extra": ids}, "inputs has 'extra', which the model doesn't take"),
        (TEXT, [ids, ids], "inputs is a list, expected a mapping"),
        (TEXT, {"ids": ids, "mask": ids[:, :4]}, "'mask' has seq = 4, but 'ids' has seq = 5"),
        (TEXT, {"ids": ids, "mask": ids[:1]}, "'mask' has batch = 1, but 'ids' has batch = 2"),
        (TEXT, {"ids": ids[0], "mask": ids}, r"'ids' has the shape \[5\], expected \['batch', 'seq'\]"),
        (TEXT, {"ids": ids.astype(np.float32), "mask": ids}, "'ids' has the dtype float32, expected int64"),
        (TEXT, {"ids": ids.astype(np.uint64), "mask": ids}, "'ids' has the dtype uint64, expected int64"),
        (TEXT, {"ids": [[1.5, 2]], "mask": [[1, 1]]}, "'ids' holds float64 values, expected int64"),
        (TEXT, {"ids": [[1, 2], [3]], "mask": ids}, "'ids' is ragged"),
        (
            TEXT,
            {"ids": [["a", "b"]], "mask": [[1, 1]]},
            r"'ids' holds the text 'a', expected numbers of int64, \['batch'",
        ),
        (TEXT, {"ids": ids.astype(str), "mask": ids}, "'ids' holds the text '1', expected numbers of int64"),
        (TEXT, {"ids": ids.astype(str).astype(object), "mask": ids}, "'ids' holds the text '1', expected numbers"),
        (TEXT, {"ids": ids.astype("S"), "mask": ids}, "'ids' holds the text b'1', expected numbers"),
        (TEXT, {"ids": [[1, "2"]], "mask": [[1, 1]]}, "'ids' holds the text '1', expected numbers"),
        (TEXT, {"ids": [[1, None]], "mask": [[1, 1]]}, "'ids' holds None, expected numbers"),
        (TEXT, {"ids": "1", "mask": ids}, "'ids' holds the text '1', expected numbers"),
        (IMAGE, {"x": np.array([[["1.5", "2"], ["3", "4"]]])}, "'x' holds the text '1.5', expected numbers of float32"),
        (TEXT, np.array(["1", "2"]), "inputs is a ndarray, expected a mapping with"),
        (TEXT, ["1", "2"], "inputs is a list, expected a mapping with"),
        (TEXT, {"ids": [[2**70, 2]], "mask": [[1, 1]]}, "'ids' holds object values"),
        (TEXT, {"ids": np.ones((2, 0), np.int64), "mask": np.ones((2, 0), np.int64)}, "'ids' has seq = 0"),
        (IMAGE, {"x": np.zeros((3, 2, 3), np.float32)}, r"\[3, 2, 3\], expected \['batch', 2, 2\]: axis 2 is 3"),
        (IMAGE, {"x": np.full((3, 2, 2), 1e39)}, "'x' has numbers beyond float32's range"),
        (IMAGE, {"x": np.zeros((3, 2, 2), complex)}, "'x' has the dtype complex128, expected float32"),
        (IMAGE, {"x": np.zeros((3, 2, 2), np.uint8)}, "'x' has the dtype uint8, expected float32"),
        (IMAGE, {"x": None}, "'x'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(model, inputs, message):
    with pytest.raises(InputError, match=message):
        check_inputs(inputs, model)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (TEXT, {"ids": ids.astype(np.int32), "mask": ids.astype(bool)}),
        (TEXT, {"ids": ids.astype(np.uint8), "mask": ids[:, ::-1]}),
        (TEXT, {"ids": [[1, 2], [3, 4]], "mask": [[True, True], [True, False]]}),
        (IMAGE, {"x": np.zeros((3, 2, 2), np.float16)}),
        (IMAGE, {"x": [[[0, 1], [2.5, 3]]]}),
        (IMAGE, {"x": np.asfortranarray(np.zeros((3, 2, 2), np.float32))}),
        (SECOND, {"x": np.zeros((3, 7), np.float32)}),
    ],
)
def test_what_means_the_same_is_taken(model, inputs):
    arrays, sizes = check_inputs(inputs, model)
    for given in model.inputs:
        assert arrays[given.name].dtype == given.dtype
        assert arrays[given.name].flags.c_contiguous
        assert arrays[given.name].shape[given.batch_axis] == sizes["batch"]
        np.testing.assert_array_equal(arrays[given.name], np.asarray(inputs[given.name]))


def test_float64_is_rounded_as_float32_and_its_own_infinities_are_told_from_what_overflows():
    x = np.random.default_rng(0).normal(size=(3, 2, 2))
    np.testing.assert_array_equal(check_inputs({"x": x}, IMAGE)[0]["x"], x.astype(np.float32))
    x[1, 0, 0] = np.inf
    with pytest.raises(InputError, match="'x' has NaN or infinity in row 1"):
        check_inputs({"x": x}, IMAGE)
    assert np.isinf(check_inputs({"x": x}, IMAGE, allow_nonfinite=True)[0]["x"]).sum() == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_floats_are_refused_with_the_row_unless_allowed(value):
    x = np.zeros((5, 2, 2), np.float32)
    x[3, 0, 1] = x[4, 0, 0] = value
    with pytest.raises(InputError, match="'x' has NaN or infinity in row 3 and 1 more"):
        check_inputs({"x": x}, IMAGE)
    check_inputs({"x": x}, IMAGE, allow_nonfinite=True)
    y = np.zeros((3, 4), np.float32)
    y[1, 2] = value
    with pytest.raises(InputError, match="in row 2:"):
        check_inputs({"x": y}, SECOND)


def test_the_callers_arrays_are_left_alone():
    x = np.zeros((3, 2, 2), np.float16)
    check_inputs({"x": x}, IMAGE)
    assert x.dtype == np.float16
