"""The bench job on the digits: what it is made of and what it says. Which is faster is nobody's promise here."""

import json
import math
import os
import re
import shutil

import numpy as np
import pytest
from offramp.runtime import Cascade, InputError, OperatingPoint, sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.calibration_file import Calibration, write_calibration
from offramp.runtime.cli import main
from offramp.runtime.jobs import bench, repack
from offramp.runtime.jobs.benching.bench import document
from offramp.runtime.jobs.benching.describe import bar, describe
from offramp.runtime.jobs.benching.page import page
from offramp.runtime.jobs.benching.plain import plain_sessions
from offramp.runtime.jobs.benching.rows import Picked, Pool, pick, units
from offramp.runtime.jobs.plain_json import to_json
from offramp.runtime.points import full
from pages import Page

IMAGES, LABELS = sample.heldout()
QUICK = {"seconds": 0.5, "pace": 1.0}


def data(folder, rows=497, labels=True):
    path = folder / "d.npz"
    np.savez(path, x=IMAGES[:rows], **({"labels": LABELS[:rows]} if labels else {}))
    return path


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return bench(sample.BUNDLE, data(tmp_path_factory.mktemp("d")), **QUICK)


def test_everybody_is_timed_in_every_mode(found):
    assert len({line["mode"] for line in found.times}) == 5
    for line in found.times:
        assert line["ms_low"] <= line["ms"] <= line["ms_high"]
        assert line["rows_per_second"] == pytest.approx(line["batch"] / line["ms"] * 1e3, rel=0.5)
        assert line["rounds"] >= 5
        assert (line["costs_ms"] is None) == (line["point"] in (None, "full"))
    assert [line["point"] for line in found.times if line["batch"] == 32] == [None, "full", "balanced", "fast"]
    assert {one.point for one in found.verdicts} == {"balanced", "fast"}


def test_answers_are_those_of_serving(found):
    with Cascade.load(sample.BUNDLE) as cascade:
        for line in found.points:
            out = cascade.at(line["point"]).predict({"x": IMAGES})
            assert line["accuracy"] == (out.label == LABELS).mean()
            assert line["coverage"] == (~out.abstain).mean()
            assert line["flops_fraction"] == out.flops.sum() / (497 * int(cascade.row_flops({})[-1]))
            assert line["exit_1_share"] == (out.exit == 1).mean()


def test_it_is_told_in_text_and_in_json(found):
    text = describe(found)
    for word in ("batch 1, one every 1 ms", "batch 128", "verdict: ", "segment_0_2.onnx", "█", "as fast"):
        assert word in text
    told = json.loads(to_json(document(found)))
    assert told["schema"] == "offramp-bench/1"
    assert told["verdict"] == found.verdict.sentence
    assert len(told["times"]) == 20


def test_it_is_a_page_that_fetches_nothing_and_draws_each_mode(found):
    text = page(found)
    read = Page(text)
    assert not read.unclosed
    assert [tag for tag, _ in read.tags].count("figure") == 5
    assert found.verdict.sentence in "".join(read.text)
    assert not re.search("https?:", re.sub(r"http://www\.w3\.org/[\w/]+", "", text))


def test_the_rival_answers_as_the_full_model_does():
    bundle = read_bundle(sample.BUNDLE)
    runs, said = plain_sessions(bundle, 1)
    assert "one plain ONNX Runtime session" in said
    with Cascade.load(sample.BUNDLE) as cascade:
        want = cascade.predict({"x": IMAGES}).label
    for run in runs.values():
        label, _ = run({"x": IMAGES})
        assert (label == want).all()


def test_a_bundle_without_a_graph_of_the_whole_says_so_and_answers_alike(tmp_path):
    repack(sample.BUNDLE, tmp_path / "b", [0, 1])
    bundle = read_bundle(tmp_path / "b")
    bundle.manifest.segments.clear()
    runs, said = plain_sessions(bundle, 1)
    assert "3 plain ONNX Runtime sessions" in said
    assert "look better here than they are" in said
    label, _ = runs["no spinning"]({"x": IMAGES})
    with Cascade.load(sample.BUNDLE) as cascade:
        assert (label == cascade.predict({"x": IMAGES}).label).all()


def test_fewer_rows_than_a_batch_are_repeated_and_that_is_said(tmp_path):
    found = bench(sample.BUNDLE, data(tmp_path, rows=9, labels=False), points=["fast"], **QUICK)
    assert found.notes[-1] == "there are only 9 different rows: they were repeated to fill batches of 32 and 128."
    assert found.points[0]["accuracy"] is None
    assert "note: there are only 9" in describe(found)


def test_batches_have_the_size_asked_for_and_no_row_twice(tmp_path):
    bundle = read_bundle(sample.BUNDLE)
    picked = pick(bundle, data(tmp_path), most=100)
    assert (len(picked), picked.of) == (100, 497)
    found, repeated = units(picked, bundle.manifest, 8, most=5)
    assert not repeated
    assert len(found) == 5
    rows = np.concatenate([batch["x"] for unit in found for batch in unit])
    assert len(rows) == 40
    assert len(np.unique(rows.reshape(40, -1), axis=0)) == 40
    single, _ = units(picked, bundle.manifest, 1, most=64)
    assert {len(unit) for unit in single} == {8}
    filled, repeated = units(picked, bundle.manifest, 128, most=5)
    assert repeated
    assert filled[0][0]["x"].shape == (128, 8, 8)


def test_a_point_may_be_called_like_the_plain_session(tmp_path):
    bundle = shutil.copytree(sample.BUNDLE, tmp_path / "b")
    manifest = read_bundle(bundle).manifest
    point = OperatingPoint((2.0, 2.0, -math.inf), name="plain session")
    made = Calibration({"full": full(3), "plain session": point}, 1)
    write_calibration(bundle, manifest, made, created="", producer="a test")
    found = bench(bundle, data(tmp_path), **QUICK)
    assert [line["point"] for line in found.times[:3]] == [None, "full", "plain session"]


def test_only_rows_of_one_shape_share_a_batch():
    manifest = read_bundle(sample.BUNDLE).manifest
    long, short = np.zeros((20, 8, 8), np.uint8), np.ones((9, 8, 5), np.uint8)
    picked = Picked((Pool({"x": long}, None, 20), Pool({"x": short}, None, 9)), 29, 29)
    found, repeated = units(picked, manifest, 8, most=9)
    assert not repeated
    assert sorted(unit[0]["x"].shape for unit in found) == [(8, 8, 5), (8, 8, 8), (8, 8, 8)]
    filled, repeated = units(picked, manifest, 32, most=9)
    assert repeated
    assert [unit[0]["x"].shape for unit in filled] == [(32, 8, 8)], "the shape that most rows have"
    single, _ = units(picked, manifest, 1, most=9)
    assert {batch["x"].shape[2] for unit in single for batch in unit} == {5, 8}


def test_a_bundle_that_was_never_calibrated_is_told_what_to_do(tmp_path):
    bundle = shutil.copytree(sample.BUNDLE, tmp_path / "b")
    (bundle / "calibration.json").unlink()
    found = bench(bundle, data(tmp_path), **QUICK)
    assert "leaves nowhere early" in found.verdict.sentence
    assert "calibrate it first" in describe(found)


@pytest.mark.parametrize(("load", "said"), [(0.0, False), (1000.0, True)])
def test_a_busy_machine_is_said(tmp_path, monkeypatch, load, said):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    found = bench(sample.BUNDLE, data(tmp_path), points=["full"], **QUICK)
    assert any("the machine was busy" in note for note in found.notes) == said


def test_progress_ends_at_its_total(tmp_path):
    seen = []
    bench(sample.BUNDLE, data(tmp_path), points=["full"], progress=lambda d, t: seen.append((d, t)), **QUICK)
    assert seen[-1][0] == seen[-1][1]
    assert all(done < total for done, total in seen[:-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"seconds": 0}, "seconds is 0"), ({"pace": 0}, "pace is 0"), ({"points": ["warp"]}, "operating_point is 'warp'"),
     ({"threads": 0}, "threads is 0")],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        bench(sample.BUNDLE, data(tmp_path), **options)


def test_the_command_prints_json_alone_and_names_bad_input(tmp_path, capsys):
    quick = ["--seconds", "0.5", "--pace", "1", "--operating-point", "fast"]
    assert main(["bench", str(sample.BUNDLE), str(data(tmp_path)), "--json", *quick]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 497
    assert main(["bench", str(sample.BUNDLE), str(tmp_path / "nowhere.npz")]) == 2
    assert "nowhere.npz: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(("share", "drawn"), [(0, ""), (1, "████"), (0.5, "██"), (0.03125, "▏")])
def test_a_bar_is_as_long_as_its_share(share, drawn):
    assert bar(share, 4) == drawn
