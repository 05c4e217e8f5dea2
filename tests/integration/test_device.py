"""Real models through the device path, on CPU: fused attention and masks, and a batch on axis 1."""

import math

import numpy as np
import pytest

pytest.importorskip("torch", reason="the device path runs on torch's memory")

from offramp.runtime import Cascade, OperatingPoint


@pytest.fixture(autouse=True)
def numpys_kernels(monkeypatch):
    """Triton's interpreter has its own tests, on smaller models."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def halfway(score: np.ndarray, share: float) -> float:
    ordered = np.sort(score)
    k = round((1 - share) * len(ordered))
    return float(ordered[k - 1] + ordered[k]) / 2


def compare(bundle, inputs, batch_rows: int) -> None:
    with Cascade.load(bundle) as cpu:
        records = cpu.record(inputs)
        bars = [halfway(score, 0.4) for score in records.score[:-1]]
        for thresholds in ((*bars, -math.inf), (*[1e9] * len(bars), -math.inf), (*[math.inf] * len(bars), -math.inf)):
            point = OperatingPoint(thresholds)
            want = cpu.at(point).predict(inputs)
            with Cascade.load(bundle, "torch:cpu", point, batch_rows=batch_rows) as device:
                got = device.predict(inputs)
            assert got.label.tolist() == want.label.tolist()
            assert got.exit.tolist() == want.exit.tolist()
            assert got.flops.tolist() == want.flops.tolist()
            np.testing.assert_allclose(got.score, want.score, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_minilm_answers_on_a_device_as_on_the_cpu(minilm_bundle, clinc_test):
    rows = slice(0, 150)
    compare(minilm_bundle, {name: clinc_test[name][rows] for name in ("input_ids", "attention_mask")}, 64)


def test_attention_residuals_answer_on_a_device_as_on_the_cpu(ar_vit_bundle, shared):
    with np.load(shared("data/cifar10/test.npz")) as archive:
        key = next(name for name in archive.files if archive[name].ndim == 4)
        pixels = archive[key][:90].transpose(0, 3, 1, 2).astype(np.float32) / 255
    with Cascade.load(ar_vit_bundle) as cpu:
        name = cpu.manifest.inputs[0].name
    compare(ar_vit_bundle, {name: pixels}, 32)
