"""record: from data files to records that replay as the cascade answers."""

import json
import math

import numpy as np
import pytest
from offramp.runtime import Cascade, InputError, OperatingPoint, sample
from offramp.runtime.jobs.data.sources import open_data
from offramp.runtime.jobs.recording.record import record
from offramp.runtime.records import read_records
from offramp.runtime.simulate import simulate


@pytest.fixture(scope="module")
def cascade():
    with Cascade.load(sample.BUNDLE, threads=1) as loaded:
        yield loaded


@pytest.mark.parametrize("kind", ["npz", "npy", "parquet", "folder"])
def test_every_kind_of_data_gives_the_same_records(cascade, tmp_path, kind):
    x, y = sample.heldout()
    x, y = x[:50], y[:50]
    if kind == "npz":
        np.savez(tmp_path / "d.npz", x=x, labels=y)
        data = tmp_path / "d.npz"
    elif kind == "npy":
        np.save(tmp_path / "d.npy", x)
        data = tmp_path / "d.npy"
    elif kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.table({"x": x.tolist(), "labels": y}), tmp_path / "d.parquet")
        data = tmp_path / "d.parquet"
    else:
        data = tmp_path / "shards"
        data.mkdir()
        for k, rows in enumerate((slice(0, 20), slice(20, 20), slice(20, 50))):
            np.savez(data / f"{k}.npz", x=x[rows], labels=y[rows])
    seen = []
    record(cascade, data, tmp_path / "r", progress=lambda done, total: seen.append((done, total)))
    got, expected = read_records(tmp_path / "r"), cascade.record({"x": x})
    for j in range(3):
        np.testing.assert_allclose(got.logits[j], expected.logits[j], atol=1e-5)
        np.testing.assert_allclose(got.score[j], expected.score[j], atol=1e-4)
    assert (got.flops == expected.flops).all()
    assert seen[-1] == (50, 50)
    if kind == "npy":
        assert got.truth is None
    else:
        assert (got.truth == y).all()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"pixels": np.zeros((3, 8, 8), np.uint8)}, r"lacks the column 'x'; it has \['pixels'\]"),
        ({"x": np.zeros((3, 8, 8), np.uint8), "labels": np.zeros(2, int)}, "different numbers of rows"),
        ({"x": np.zeros((3, 8, 8), np.uint8), "labels": np.array([0, 10, 1])}, r"labels\[1\] is 10, expected 0…9"),
        ({"x": np.zeros((3, 8, 8), np.uint8), "labels": np.array([0, -2, 1])}, r"labels\[1\] is -2"),
        ({"x": np.zeros((3, 8, 8), np.uint8), "labels": np.eye(3)}, r"labels has the shape \(3, 3\)"),
        ({"x": np.zeros((3, 8, 8), np.uint8), "labels": np.array([0.5, 1, 2])}, "labels has the dtype float64"),
        (
            {"x": np.zeros((3, 8, 8), np.uint8), "labels": np.array(["a", "b", "c"])},
            r"labels\[0\] is 'a', which is none of the 10",
        ),
        ({"x": np.zeros((3, 8, 7), np.uint8)}, r"d\.npz, in rows 0 to 2: .*axis 2 is 7"),
    ],
)
def test_bad_data_is_refused_by_file_and_column_and_nothing_is_left(cascade, tmp_path, columns, message):
    np.savez(tmp_path / "d.npz", **columns)
    with pytest.raises(InputError, match=message):
        record(cascade, tmp_path / "d.npz", tmp_path / "r")
    assert [p.name for p in tmp_path.iterdir()] == ["d.npz"]


def test_pickles_and_other_files_are_refused(cascade, tmp_path):
    np.savez(tmp_path / "d.npz", x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(InputError, match=r"d\.npz: holds Python objects"):
        open_data(tmp_path / "d.npz", cascade.bundle)
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(InputError, match=r"broken\.npz"):
        open_data(tmp_path / "broken.npz", cascade.bundle)
    with pytest.raises(InputError, match="no such file"):
        open_data(tmp_path / "nothing", cascade.bundle)
    (tmp_path / "d.csv").write_text("x")
    with pytest.raises(InputError, match=r"expected a \.npz"):
        open_data(tmp_path / "d.csv", cascade.bundle)


def test_replaying_records_equals_predicting(cascade):
    x, _ = sample.heldout()
    records = cascade.record({"x": x})
    point = OperatingPoint((4.0, 3.0, -math.inf), abstain_below=2.0)
    answer, outcome = cascade.at(point).predict({"x": x}), simulate(records, point)
    sure = (np.abs(records.score - np.array([[4.0], [3.0], [2.0]])) > 1e-3).all(axis=0)
    assert (answer.exit == outcome.exit)[sure].all()
    assert (answer.label == outcome.label)[sure].all()
    assert (answer.abstain == outcome.abstain)[sure].all()


@pytest.mark.parametrize("damage", ["missing", "short", "shape", "index", "schema"])
def test_damaged_records_are_refused_by_file(cascade, tmp_path, damage):
    np.savez(tmp_path / "d.npz", x=sample.heldout()[0][:20])
    folder = record(cascade, tmp_path / "d.npz", tmp_path / "r")
    index = json.loads((folder / "records.json").read_text())
    if damage == "missing":
        (folder / "logits_1.npy").unlink()
    elif damage == "short":
        (folder / "logits_1.npy").write_bytes((folder / "logits_1.npy").read_bytes()[:200])
    elif damage == "shape":
        np.save(folder / "logits_1.npy", np.zeros((20, 9), np.float32))
    elif damage == "index":
        (folder / "records.json").write_text(json.dumps({**index, "rows": "many"}))
    else:
        (folder / "records.json").write_text(json.dumps({**index, "schema": "other/9"}))
    name = {"index": "records.json", "schema": "records.json"}.get(damage, "logits_1.npy")
    with pytest.raises(InputError, match=name):
        read_records(folder)
