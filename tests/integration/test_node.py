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
def folder(tmp_path):
    """With the example and its library."""
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "node_modules").symlink_to(MODULES)
    return tmp_path


@pytest.fixture
def ask(folder):
    """What the example prints for a bundle and rows."""

    def ask(bundle, inputs, point):
        rows = {name: {"dims": array.shape, "data": array.ravel().tolist()} for name, array in inputs.items()}
        (folder / "rows.json").write_text(json.dumps(rows))
        command = ["node", "cascade.mjs", str(bundle), "rows.json", point]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
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


ROWS = {"x": {"dims": [1, 8, 8], "data": [0] * 64}}


@pytest.mark.parametrize(
    ("arguments", "rows", "said"),
    [
        ([], ROWS, "usage: node cascade.mjs bundle rows.json"),
        (["BUNDLE"], ROWS, "usage: node cascade.mjs bundle rows.json"),
        (["nowhere", "rows.json"], ROWS, "nowhere/manifest.json: can't be read (ENOENT)."),
        (["BUNDLE", "none.json"], ROWS, "none.json: can't be read (ENOENT)."),
        (["BUNDLE", "rows.json", "quick"], ROWS, 'operating point is "quick", expected one of full, balanced, fast.'),
        (["BUNDLE", "cascade.mjs"], ROWS, "cascade.mjs: not JSON ("),
        (["BUNDLE", "rows.json"], None, "rows.json: expected an object, found null."),
        (["BUNDLE", "rows.json"], {"y": ROWS["x"]}, 'rows.json: "x" is missing or has another form'),
        (["BUNDLE", "rows.json"], [[0] * 64], 'rows.json: "x" is missing or has another form'),
        (["BUNDLE", "rows.json"], {"x": {"dims": [1, 64], "data": [0] * 64}}, 'expected {"x": {"dims": ["batch",8,8]'),
        (["BUNDLE", "rows.json"], {"x": {"dims": [1, 8, 8], "data": ["0"] * 64}}, 'rows.json: "x" is missing or has'),
        (
            ["BUNDLE", "rows.json"],
            {"x": {"dims": [2, 8, 8], "data": [0] * 64}},
            'rows.json: "x" is no uint8 of its dims',
        ),
    ],
)
def test_what_does_not_fit_is_one_line_and_exit_code_2(folder, arguments, rows, said):
    (folder / "rows.json").write_text(json.dumps(rows))
    command = ["node", "cascade.mjs", *(str(sample.BUNDLE) if one == "BUNDLE" else one for one in arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert said in done.stderr


def test_without_the_library_it_says_how_to_install_it(tmp_path):
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    command = ["node", "cascade.mjs", str(sample.BUNDLE), "rows.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "onnxruntime-node isn't there: npm install onnxruntime-node.\n")


def test_a_bundle_without_a_calibration_has_full(ask, tmp_path):
    bundle = shutil.copytree(sample.BUNDLE, tmp_path / "b")
    (bundle / "calibration.json").unlink()
    images = sample.heldout()[0][:9]
    with Cascade.load(bundle) as cascade:
        check(ask(bundle, {"x": images}, "full"), cascade, {"x": images})


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
