"""Weights lie once in one file, where they can be mapped; small ones stay inside the graphs."""

import numpy as np
import onnx_ir as ir
import pytest
from offramp.export.writing.weights import WEIGHTS, WeightFile
from onnx import numpy_helper

LARGE = np.arange(600, dtype=np.float32).reshape(20, 30)
WEIGHTS_OF = {
    "large": LARGE,
    "same": LARGE.copy(),
    "reshaped": LARGE.reshape(30, 20),
    "other": LARGE + 1,
    "ints": np.arange(300),
    "edge": np.arange(256, dtype=np.float32),
    "small": np.arange(255, dtype=np.float32),
    "scalar": np.float32(3).reshape(()),
    "empty": np.zeros((0, 4), np.float32),
}


@pytest.fixture
def store(tmp_path):
    return WeightFile(tmp_path, {name: ir.tensor(value, name=name) for name, value in WEIGHTS_OF.items()})


def place(proto):
    return {entry.key: entry.value for entry in proto.external_data}


@pytest.mark.parametrize("name", WEIGHTS_OF)
def test_every_weight_is_read_back_as_it_was(store, tmp_path, name):
    proto = store.initializer(name)
    assert proto.name == name
    found = numpy_helper.to_array(proto, base_dir=str(tmp_path))
    np.testing.assert_array_equal(found, WEIGHTS_OF[name])
    assert found.dtype == WEIGHTS_OF[name].dtype


def test_equal_bytes_lie_once_whatever_their_name_or_shape(store):
    places = {name: place(store.initializer(name)) for name in ("large", "same", "reshaped", "other")}
    assert places["large"] == places["same"] == places["reshaped"]
    assert places["other"]["offset"] != places["large"]["offset"]


def test_each_begins_where_vectors_can_be_read_and_large_ones_at_a_page(store, tmp_path):
    offsets = [int(place(store.initializer(name))["offset"]) for name in ("large", "other", "ints", "edge")]
    assert offsets == [0, 2432, 4864, 7296]  # 2,400 bytes, filled up to the next 64
    assert (tmp_path / WEIGHTS).stat().st_size == 7296 + 1024
    large = np.ones(2**18, np.float32)
    of = {"edge": ir.tensor(WEIGHTS_OF["edge"], name="edge"), "megabyte": ir.tensor(large, name="megabyte")}
    (tmp_path / "b").mkdir()
    assert place(WeightFile(tmp_path / "b", of).initializer("megabyte"))["offset"] == "4096"


def test_what_is_smaller_than_a_kilobyte_stays_in_the_graph(store):
    assert place(store.initializer("edge"))["location"] == WEIGHTS
    for name in ("small", "scalar", "empty"):
        assert not place(store.initializer(name))


def test_words_stay_in_the_graph_however_many_they_are(tmp_path):
    words = ir.StringTensor([b"dog"] * 500, shape=ir.Shape([500]), name="words")
    store = WeightFile(tmp_path, {"words": words})
    assert list(store.initializer("words").string_data) == [b"dog"] * 500


def test_a_weight_that_came_from_another_file_does_not_point_there(tmp_path):
    (tmp_path / "source.bin").write_bytes(np.arange(6, dtype=np.float32).tobytes())
    outside = ir.ExternalTensor(
        "source.bin", 0, 24, ir.DataType.FLOAT, name="w", shape=ir.Shape([2, 3]), base_dir=str(tmp_path)
    )
    (tmp_path / "b").mkdir()
    proto = WeightFile(tmp_path / "b", {"w": outside}).initializer("w")
    assert not place(proto)
    np.testing.assert_array_equal(numpy_helper.to_array(proto), np.arange(6).reshape(2, 3))
