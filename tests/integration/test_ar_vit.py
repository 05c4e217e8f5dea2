"""The Attention-Residual path on real images: carried states, routing entropies, rows that leave early."""

import math

import numpy as np
import pytest
import torch
from offramp.runtime import Cascade, OperatingPoint

TOLERANCE = 1e-3
ROWS = 600


@pytest.fixture(scope="module")
def images(shared):
    with np.load(shared("data/cifar10/test.npz")) as archive:
        key = next(k for k in archive.files if archive[k].ndim == 4)
        return np.ascontiguousarray(archive[key][:ROWS].transpose(0, 3, 1, 2)).astype(np.float32) / 255


@pytest.fixture(scope="module")
def expected(ar_vit, images):
    with torch.no_grad():
        output = ar_vit.build()(torch.from_numpy(images))
    return {kind: np.stack([t.numpy() for t in tensors]) for kind, tensors in output.items()}


@pytest.fixture(scope="module")
def cascade(ar_vit_bundle):
    with Cascade.load(ar_vit_bundle) as loaded:
        yield loaded


def test_every_exit_and_routing_entropy_equals_torch(cascade, images, expected):
    records = cascade.record({"x": images})
    assert np.abs(np.stack(records.logits) - expected["logits"]).max() <= TOLERANCE
    assert np.abs(records.routing - expected["routing"]).max() <= TOLERANCE


def test_records_equal_those_the_owner_kept(cascade, images, shared):
    with np.load(shared("models/ar_vit_cifar10/records.npz")) as archive:
        logits = archive[next(k for k in archive.files if archive[k].ndim == 3)]
    assert np.abs(np.stack(cascade.record({"x": images}).logits) - logits[:, :ROWS]).max() <= TOLERANCE


@pytest.mark.parametrize("batch", [1, 7, 64, ROWS])
def test_rows_that_leave_early_have_the_routing_of_the_layers_they_ran(cascade, images, expected, batch):
    records = cascade.record({"x": images})
    rng = np.random.default_rng(batch)
    layers = [len(e.routing) for e in cascade.manifest.exits]
    assert layers == sorted(layers)
    for _ in range(5):
        bars = tuple(float(np.quantile(records.score[j], rng.uniform(0.2, 0.9))) for j in range(2))
        at = cascade.at(OperatingPoint((*bars, -math.inf)))
        for start in range(0, min(ROWS, 40 * batch), batch):
            rows = np.arange(start, min(start + batch, ROWS))
            answer = at.predict({"x": images[rows]}, fetch=("routing",))
            for column, (i, exit_) in enumerate(zip(rows, answer.exit, strict=True)):
                if any(abs(float(records.score[j, i]) - bars[j]) < 1e-3 for j in range(2)):
                    continue
                assert exit_ == next(j for j, t in enumerate((*bars, -math.inf)) if records.score[j, i] >= t)
                ran = layers[exit_]
                assert np.abs(answer.routing[:ran, column] - expected["routing"][:ran, i]).max() <= TOLERANCE
                assert np.isnan(answer.routing[ran:, column]).all()


@pytest.mark.slow
def test_the_full_attention_residual_form_exports_too(ar_vit, tmp_path):
    from offramp.export import export_bundle

    torch.manual_seed(0)
    model = ar_vit.ARViT(mode="full").eval()
    bundle = export_bundle(model, ar_vit.example_inputs(), tmp_path / "b", dynamic_axes=ar_vit.dynamic_axes())
    x = torch.rand(5, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
    with Cascade.load(bundle) as cascade:
        records = cascade.record({"x": x.numpy()})
    for kind in ("logits", "routing"):
        for got, want in zip(getattr(records, kind), expected[kind], strict=True):
            assert np.abs(got - want.numpy()).max() <= TOLERANCE
