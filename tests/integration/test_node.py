"""The example for Node answers as the cascade does: the graph has all of it inside."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from offramp.runtime import Cascade, OperatingPoint, sample
from offramp.runtime.calibration_file import Calibration, write_calibration
from offramp.runtime.jobs import repack

ROOT = Path(__file__).parents[2]
EXAMPLE, MODULES = ROOT / "examples" / "node" / "cascade.mjs", ROOT / ".node" / "node_modules"
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (MODULES / "onnxruntime-node").exists(),
    reason="no Node with onnxruntime-node here: `make .node/.ready`",
)


@pytest.fixture
def ask(tmp_path):
    """What the example prints for a bundle and rows."""
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "node_modules").symlink_to(MODULES)

    def ask(bundle, inputs, point):
        rows = {name: {"dims": array.shape, "data": array.ravel().tolist()} for name, array in inputs.items()}
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        command = ["node", "cascade.mjs", str(bundle), "rows.json", point]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return ask


def check(found, cascade, inputs):
    out = cascade.predict(inputs)
    assert [row["class"] for row in found] == out.class_name
    assert [row["exit"] for row in found] == out.exit.tolist()
    np.testing.assert_allclose([row["score"] for row in found], out.score, atol=1e-3)


@pytest.mark.parametrize("point", ["full", "balanced", "fast"])
def test_it_answers_as_the_cascade(ask, point):
    images = sample.heldout()[0]
    with Cascade.load(sample.BUNDLE, operating_point=point) as cascade:
        found = ask(sample.BUNDLE, {"x": images}, point)
        check(found, cascade, {"x": images})
    assert len({row["exit"] for row in found}) == (1 if point == "full" else 3)


def test_a_repacked_bundle_counts_its_own_exits(ask, tmp_path):
    images = sample.heldout()[0]
    bundle = repack(sample.BUNDLE, tmp_path / "two", [1])
    with Cascade.load(bundle) as cascade:
        bars = (float(np.quantile(cascade.record({"x": images}).score[0], 0.4)), float("-inf"))
        points = dict(cascade.operating_points) | {"own": OperatingPoint(bars, name="own")}
        write_calibration(
            bundle, cascade.manifest, Calibration(points, 1), created="2026-01-01T00:00:00Z", producer="t"
        )
    with Cascade.load(bundle, operating_point="own") as cascade:
        found = ask(bundle, {"x": images}, "own")
        check(found, cascade, {"x": images})
    assert {row["exit"] for row in found} == {0, 1}


def test_a_threshold_between_two_floats_is_rounded_up(ask, tmp_path):
    """A score of just below it must go on, though the float32 nearest to the threshold is that score."""
    images = sample.heldout()[0][:64]
    bundle = shutil.copytree(sample.BUNDLE, tmp_path / "b")
    with Cascade.load(bundle) as cascade:
        found = ask(bundle, {"x": images}, "full")
        score = cascade.record({"x": images}).score[0]
        for k, value in enumerate(np.sort(score)[:3].tolist()):
            above = OperatingPoint((value + abs(value) * 1e-9, float("inf"), float("-inf")), name="above")
            points = dict(cascade.operating_points) | {"above": above}
            made = Calibration(points, 2 + k)
            write_calibration(bundle, cascade.manifest, made, created="2026-01-01T00:00:00Z", producer="t")
            found = ask(bundle, {"x": images}, "above")
            assert sum(row["exit"] == 2 for row in found) == k + 1
