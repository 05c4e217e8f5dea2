"""The whole path on a real text model: module -> bundle -> cascade -> calibration -> HTTP -> Prometheus."""

import json
import math
import shutil
import urllib.request

import numpy as np
import pytest
import torch
from offramp.runtime import Cascade, OperatingPoint
from offramp.runtime.jobs import Budget, calibrate, record

pytestmark = pytest.mark.slow
TOLERANCE = 5e-4


def torch_logits(model, data, rows):
    """(6, rows, 150), computed as its owner would: in batches, without gradients."""
    parts = []
    with torch.no_grad():
        for start in range(0, rows, 250):
            part = {k: torch.from_numpy(data[k][start : start + 250]) for k in ("input_ids", "attention_mask")}
            parts.append(np.stack([z.numpy() for z in model(**part)]))
    return np.concatenate(parts, axis=1)[:, :rows]


def inputs(data, rows=slice(None)):
    return {k: data[k][rows] for k in ("input_ids", "attention_mask")}


@pytest.fixture(scope="module")
def cascade(minilm_bundle):
    with Cascade.load(minilm_bundle) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def records(cascade, clinc_test):
    return cascade.record(inputs(clinc_test))


def test_every_exit_equals_torch_on_all_test_rows(minilm, records, clinc_test):
    expected = torch_logits(minilm.build(), clinc_test, len(clinc_test["labels"]))
    assert np.abs(np.stack(records.logits) - expected).max() <= TOLERANCE


def check_against_oracle(cascade, records, data, rows, batch, point):
    at = cascade.at(point)
    answers = [at.predict(inputs(data, slice(i, min(i + batch, rows)))) for i in range(0, rows, batch)]
    exits, labels, abstain, flops = (
        np.concatenate([getattr(a, name) for a in answers]) for name in ("exit", "label", "abstain", "flops")
    )
    compared = 0
    for i in range(rows):
        near = any(abs(float(records.score[j, i]) - t) < 1e-3 for j, t in enumerate(point.thresholds[:-1]))
        if near or abs(float(records.score[exits[i], i]) - point.abstain_below) < 1e-3:
            continue
        compared += 1
        j = next(j for j, t in enumerate(point.thresholds) if float(records.score[j, i]) >= t)
        assert (exits[i], labels[i], flops[i]) == (j, records.label[j, i], records.flops[j, i]), i
        assert abstain[i] == (not float(records.score[j, i]) >= point.abstain_below)
    assert compared > 0.9 * rows


def random_point(records, rng):
    bars = [float(np.quantile(records.score[j], rng.uniform(0.05, 1))) for j in range(5)]
    return OperatingPoint((*bars, -math.inf), abstain_below=float(rng.uniform(0, 5)))


@pytest.mark.parametrize(("batch", "rows", "vectors"), [(1, 200, 5), (7, 400, 5), (64, 640, 5), (640, 640, 5)])
def test_predict_equals_the_oracle_row_by_row(cascade, records, clinc_test, batch, rows, vectors):
    rng = np.random.default_rng(batch)
    for _ in range(vectors):
        check_against_oracle(cascade, records, clinc_test, rows, batch, random_point(records, rng))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 7, 64, 4500])
def test_predict_equals_the_oracle_on_all_rows_at_twenty_points(cascade, records, clinc_test, batch):
    rng = np.random.default_rng(batch)
    for _ in range(20):
        check_against_oracle(cascade, records, clinc_test, 4500, batch, random_point(records, rng))


def test_what_is_carried_is_small_and_has_a_batch(minilm_bundle):
    tensors = json.loads((minilm_bundle / "manifest.json").read_text())["tensors"]
    assert tensors
    for name, tensor in tensors.items():
        assert tensor["shape"].count("seq") <= 1, name
        assert tensor["shape"].count("batch") == 1, name


def test_a_row_padded_further_has_the_same_answer(cascade, clinc_test):
    short, long = inputs(clinc_test, slice(0, 20)), {}
    for given in cascade.manifest.inputs:
        long[given.name] = np.pad(short[given.name], ((0, 0), (0, 13)), constant_values=int(given.pad or 0))
    one, other = cascade.record(short), cascade.record(long)
    assert np.abs(np.stack(one.logits) - np.stack(other.logits)).max() <= TOLERANCE
    assert (one.flops < other.flops).all(), "FLOPs are those of the request's own length"


@pytest.fixture(scope="module")
def calibrated(minilm_bundle, shared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrated")
    bundle = shutil.copytree(minilm_bundle, folder / "bundle")
    with Cascade.load(bundle) as cascade:
        record(cascade, shared("data/clinc150/val.npz"), folder / "records")
    calibrate(bundle, folder / "records", targets=[Budget(0.4, "balanced"), Budget(0.25, "fast")])
    return bundle


def test_calibrated_points_keep_their_word_on_the_test_set(calibrated, clinc_test):
    rows = slice(0, 1500)
    labels = clinc_test["labels"][rows]
    with Cascade.load(calibrated) as cascade:
        results = {name: cascade.at(name).predict(inputs(clinc_test, rows)) for name in ("full", "balanced", "fast")}
    accuracy = {name: float((r.label == labels).mean()) for name, r in results.items()}
    spent = {name: r.flops.mean() / results["full"].flops.mean() for name, r in results.items()}
    assert accuracy["full"] == pytest.approx(0.966, abs=0.006)
    assert spent["balanced"] <= 0.42
    assert spent["fast"] <= 0.27
    assert accuracy["full"] - accuracy["balanced"] <= 0.005
    assert accuracy["full"] - accuracy["fast"] <= 0.01
    for r in results.values():
        assert (r.label != labels)[~r.abstain].mean() <= 0.05


def test_over_http_rows_leave_as_in_process_and_prometheus_counts_them(calibrated, clinc_test, serve):
    rows = slice(0, 60)
    lengths = clinc_test["attention_mask"][rows].sum(axis=1)
    instances = [
        {k: clinc_test[k][i, :n].tolist() for k in ("input_ids", "attention_mask")} for i, n in enumerate(lengths)
    ]
    with Cascade.load(calibrated, operating_point="balanced") as cascade:
        expected = [cascade.predict({k: [v] for k, v in instance.items()}) for instance in instances]
        names = cascade.classes
    address = serve(calibrated, "balanced")
    body = json.dumps({"instances": instances}).encode()
    request = urllib.request.Request(f"{address}/v1/predict", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        answers = json.load(response)["predictions"]
    assert len(answers) == 60
    for answer, want in zip(answers, expected, strict=True):
        if abs(float(want.score[0]) - 3) < 1e-3:
            continue
        assert answer["exit"] == want.exit[0]
        assert answer["label"] == want.label[0]
        assert answer["class"] == names[int(want.label[0])]
        assert answer["abstain"] == want.abstain[0]
        assert answer["flops"] == want.flops[0]
        assert answer["confidence"] == pytest.approx(want.confidence[0], abs=1e-4)
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as response:
        text = response.read().decode()
    count = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[:1] != "#"}
    total = sum(v for k, v in count.items() if k.startswith("offramp_exits_total"))
    assert total == 60
    spent = sum(v for k, v in count.items() if k.startswith("offramp_flops_total"))
    assert spent == sum(int(w.flops[0]) for w in expected)
