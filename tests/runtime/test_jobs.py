"""record and calibrate: from data files to operating points, with nothing used twice."""

import json
import math
import shutil

import numpy as np
import pytest
from offramp.runtime import Cascade, InputError, OperatingPoint, Records, sample
from offramp.runtime.jobs.calibrate import calibrate, choose_points, split_rows
from offramp.runtime.jobs.data import read_shard, shards
from offramp.runtime.jobs.record import record
from offramp.runtime.records import read_records
from offramp.runtime.simulate import simulate


@pytest.fixture
def bundle(tmp_path):
    return shutil.copytree(sample.BUNDLE, tmp_path / "bundle")


@pytest.fixture(scope="module")
def cascade():
    with Cascade.load(sample.BUNDLE, threads=1) as loaded:
        yield loaded


def made_up(rows=4000, exits=4, classes=5, seed=0, labels=True):
    """Records of a made-up model whose deeper exits are better."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, rows)
    logits = np.stack(
        [rng.standard_normal((rows, classes)) + 3 * (j + 1) * np.eye(classes)[y] / 2 for j in range(exits)]
    )
    from offramp.runtime import scores

    return Records(
        logits=logits.astype(np.float32),
        score=np.stack([scores.log_odds(z.astype(np.float32)) for z in logits]),
        label=logits.argmax(axis=2).astype(np.int64),
        flops=np.repeat(np.arange(1, exits + 1)[:, None] * 100, rows, axis=1),
        labels=y if labels else None,
    )


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
        assert got.labels is None
    else:
        assert (got.labels == y).all()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"pixels": np.zeros((3, 8, 8), np.uint8)}, r"lacks the column 'x'; it has \['pixels'\]"),
        ({"x": np.zeros((3, 8, 8), np.uint8), "labels": np.zeros(2, int)}, "different numbers of rows"),
        ({"x": np.zeros((3, 8, 8), np.uint8), "labels": np.array([0, 10, 1])}, r"labels\[1\] is 10, expected 0…9"),
        ({"x": np.zeros((3, 8, 8), np.uint8), "labels": np.array([0, -2, 1])}, r"labels\[1\] is -2"),
        ({"x": np.zeros((3, 8, 8), np.uint8), "labels": np.eye(3)}, r"labels has the shape \(3, 3\)"),
        ({"x": np.zeros((3, 8, 8), np.uint8), "labels": np.array([0.5, 1, 2])}, "labels has the dtype float64"),
        ({"x": np.zeros((3, 8, 8), np.uint8), "labels": np.array(["a", "b", "c"])}, "labels has the dtype <U1"),
        ({"x": np.zeros((3, 8, 7), np.uint8)}, "axis 2 is 7"),
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
        read_shard(tmp_path / "d.npz", cascade.manifest)
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(InputError, match=r"broken\.npz"):
        read_shard(tmp_path / "broken.npz", cascade.manifest)
    with pytest.raises(InputError, match="no such file"):
        shards(tmp_path / "nothing")
    (tmp_path / "d.csv").write_text("x")
    with pytest.raises(InputError, match=r"expected a \.npz"):
        shards(tmp_path / "d.csv")


def test_splits_are_disjoint_complete_and_seeded():
    rows = np.arange(100, 1100)
    one, again, other = split_rows(rows, 3), split_rows(rows, 3), split_rows(rows, 4)
    parts = [one.thresholds, one.certify, one.report]
    assert sorted(np.concatenate(parts).tolist()) == rows.tolist()
    assert [len(p) for p in parts] == [400, 300, 300]
    assert (one.certify == again.certify).all()
    assert not np.array_equal(one.certify, other.certify)


def test_points_meet_their_budgets_and_keep_their_promise_on_new_rows():
    points = choose_points(made_up(), budgets={"half": 0.5, "third": 0.4}, abstain_risk=0.1, delta=0.05)
    assert list(points) == ["full", "half", "third"]
    fresh = made_up(rows=20_000, seed=1)
    rows = np.arange(20_000)
    for name, budget in (("half", 0.5), ("third", 0.4)):
        point = points[name]
        assert point.provenance["budget_met"]
        outcome = simulate(fresh, point)
        spent = fresh.flops[outcome.exit, rows].mean() / 400
        assert spent <= budget + 0.02
        assert spent == pytest.approx(point.expected["flops_fraction"], abs=0.03)
        kept = ~outcome.abstain
        assert (outcome.label != fresh.labels)[kept].mean() <= 0.1
        assert kept.mean() == pytest.approx(point.expected["coverage"], abs=0.05)


def test_replaying_records_equals_predicting(cascade):
    x, _ = sample.heldout()
    records = cascade.record({"x": x})
    point = OperatingPoint((4.0, 3.0, -math.inf), abstain_below=2.0)
    answer, outcome = cascade.at(point).predict({"x": x}), simulate(records, point)
    sure = (np.abs(records.score - np.array([[4.0], [3.0], [2.0]])) > 1e-3).all(axis=0)
    assert (answer.exit == outcome.exit)[sure].all()
    assert (answer.label == outcome.label)[sure].all()
    assert (answer.abstain == outcome.abstain)[sure].all()


def test_an_unattainable_promise_abstains_on_everything_and_says_so():
    points = choose_points(made_up(rows=200), abstain_risk=0.001)
    for point in points.values():
        assert point.abstain_below == math.inf
        assert point.provenance["abstention"]["feasible"] is False
        assert point.expected["coverage"] == 0
        assert point.expected["risk"] is None


def test_an_unattainable_budget_says_so():
    point = choose_points(made_up(), budgets={"tiny": 0.1}, abstain_risk=None)["tiny"]
    assert point.provenance["budget_met"] is False
    assert point.abstain_below == -math.inf


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        (made_up(labels=False), {}, "no labels"),
        (made_up(rows=49), {}, "49 labelled rows, expected at least 50"),
        (made_up(), {"budgets": {"full": 0.5}}, "'full' is taken"),
        (made_up(), {"budgets": {"b": 1.5}}, "budget"),
        (made_up(), {"abstain_risk": 2.0}, "risk"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(records, options, message):
    with pytest.raises(InputError, match=message):
        choose_points(records, **options)


def test_calibrate_writes_a_new_version_that_loads(bundle, tmp_path):
    x, y = sample.heldout()
    np.savez(tmp_path / "d.npz", x=x, labels=y)
    with Cascade.load(bundle) as cascade:
        record(cascade, tmp_path / "d.npz", tmp_path / "r")
    before = json.loads((bundle / "calibration.json").read_text())
    new = calibrate(bundle, tmp_path / "r", budgets={"half": 0.5}, abstain_risk=0.1)
    assert new.version == before["version"] + 1
    with Cascade.load(bundle, operating_point="half") as cascade:
        assert cascade.operating_point.thresholds == new.points["half"].thresholds
        assert cascade.operating_point.abstain_below == new.points["half"].abstain_below
    (bundle / "calibration.json").write_text("damaged")
    assert calibrate(bundle, tmp_path / "r", budgets={"half": 0.5}).version == 1, "a damaged one can be replaced"


def test_records_of_another_bundle_are_refused(bundle, tmp_path):
    x, y = sample.heldout()
    np.savez(tmp_path / "d.npz", x=x, labels=y)
    with Cascade.load(bundle) as cascade:
        record(cascade, tmp_path / "d.npz", tmp_path / "r")
    index = json.loads((tmp_path / "r" / "records.json").read_text())
    (tmp_path / "r" / "records.json").write_text(json.dumps({**index, "manifest": "0" * 64}))
    with pytest.raises(InputError, match="recorded from another bundle"):
        calibrate(bundle, tmp_path / "r")


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
