"""The calibration job: what it promises holds on new rows, what it can't it says, and nothing half-done is left."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from made_records import made_up, routed, saved
from offramp.runtime import Cascade, InputError, OperatingPoint, sample
from offramp.runtime.cli import main
from offramp.runtime.jobs.bundles.time_model import TimeModel
from offramp.runtime.jobs.calibrating.calibrate import calibrate
from offramp.runtime.jobs.calibrating.choose_points import Asked, choose_points
from offramp.runtime.jobs.calibrating.history import History, read_version
from offramp.runtime.jobs.calibrating.promises import promised
from offramp.runtime.jobs.calibrating.result import CalibrationRefused
from offramp.runtime.jobs.calibrating.targets import AbstainRisk, Budget, Guarantee, MaxDrop, MaxMs
from offramp.runtime.jobs.calibrating.versions import history
from offramp.runtime.jobs.data.expected import expected
from offramp.runtime.jobs.data.labelled_rows import check_labels, labelled_rows
from offramp.runtime.jobs.data.opened import own_logits
from offramp.runtime.jobs.data.splits import split_labelled, split_rows
from offramp.runtime.jobs.recording.record import record
from offramp.runtime.points import full
from offramp.runtime.simulate import simulate
from pages import Page


@pytest.fixture(scope="module")
def sample_bundle(tmp_path_factory):
    return shutil.copytree(sample.BUNDLE, tmp_path_factory.mktemp("sample") / "bundle")


@pytest.fixture
def bundle(sample_bundle, tmp_path):
    return shutil.copytree(sample_bundle, tmp_path / "bundle")


@pytest.fixture(scope="module")
def digits(sample_bundle, tmp_path_factory):
    """Records of the bundled digits."""
    folder = tmp_path_factory.mktemp("digits")
    x, y = sample.heldout()
    np.savez(folder / "d.npz", x=x, labels=y)
    with Cascade.load(sample_bundle) as cascade:
        return record(cascade, folder / "d.npz", folder / "r")


MS = TimeModel.given([1, 2, 3, 4], 4)


def points_of(records, times=None, **asked):
    chosen = choose_points(split_labelled(labelled_rows(records), 0), Asked(**asked), times)
    return chosen.points, chosen.unmet


def test_parts_are_disjoint_complete_stratified_and_seeded():
    y = np.append(np.random.default_rng(0).integers(0, 7, 1000), [-1] * 50)
    one, again, other = split_rows(y, 3), split_rows(y, 3), split_rows(y, 4)
    parts = [one.fit, one.select, one.certify, one.test]
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000)), "unlabelled rows are in no part"
    assert [len(p) for p in parts] == [300, 150, 350, 200]
    for part, share in zip(parts, (0.3, 0.15, 0.35, 0.2), strict=True):
        for k in range(7):
            assert abs((y[part] == k).sum() - share * (y == k).sum()) <= 1.5
    assert (one.certify == again.certify).all()
    assert not np.array_equal(one.certify, other.certify)


def test_points_keep_their_targets_on_new_rows():
    targets = [Budget(0.5, "half"), MaxDrop(0.02), Guarantee(0.03, 0.05), MaxMs(2.0)]
    points, unmet = points_of(made_up(), targets=targets, abstain=[AbstainRisk(0.1)], times=MS)
    assert not unmet
    assert list(points) == ["full", "half", "max-drop-2%", "guarantee-3%", "max-ms-2"]
    fresh = labelled_rows(made_up(rows=20_000, seed=1))
    seen = {name: expected(fresh, point) for name, point in points.items()}
    assert seen["half"]["flops_fraction"] <= 0.52
    assert seen["max-ms-2"]["flops_fraction"] * 4 <= 2.05
    assert seen["max-drop-2%"]["drop"] <= 0.02
    assert seen["guarantee-3%"]["drop"] <= 0.03
    for name in ("max-drop-2%", "guarantee-3%"):
        assert seen[name]["flops_fraction"] < 0.9
    for name, figures in seen.items():
        assert figures["risk"] <= 0.1
        low, high = points[name].expected["intervals"]["accuracy"]
        assert low - 0.01 <= figures["accuracy"] <= high + 0.01


def test_what_cannot_be_kept_says_so_and_names_the_closest():
    targets = [Budget(0.1, "tiny"), Guarantee(0.0005, 0.05), MaxMs(0.5)]
    points, unmet = points_of(made_up(rows=400), targets=targets, abstain=[AbstainRisk(0.001)], times=MS)
    said = "\n".join(unmet)
    assert "the cheapest rule costs 25% at 95% confidence, which is the closest" in said
    assert "the smallest these rows could promise is" in said
    assert "the quickest rule takes 1 ms" in said
    assert "0.1%" in said
    for name, point in points.items():
        assert point.abstain_below == -math.inf, "nothing that abstains on every row is put in force unasked"
        assert point.provenance["abstention"]["feasible"] is False
        assert promised(point).risk is None
        assert point.expected["coverage"] == 1
        assert point.provenance.get("met") is (None if name == "full" else False)
    assert points["guarantee-0.05%"].thresholds == full(4).thresholds
    asked = {"targets": [Budget(0.5, "b")], "abstain": [AbstainRisk(0.001)], "abstain_all_if_infeasible": True}
    for point in points_of(made_up(rows=400), **asked)[0].values():
        assert point.abstain_below == math.inf
        assert point.expected["risk"] is None
    few, unmet = points_of(made_up(rows=100), targets=[MaxDrop(0.001)], abstain=[])
    assert few["max-drop-0.1%"].thresholds == full(4).thresholds, "from 45 rows no such drop can be seen"
    assert "can be had only from the full model: from 45 rows of fit and select and 35 rows of certify" in unmet[0]


def test_a_further_risk_adds_points_and_none_never_abstains():
    points, _ = points_of(made_up(), targets=[Budget(0.5, "half")], abstain=[AbstainRisk(0.1), AbstainRisk(0.05)])
    assert set(points) == {"full", "half", "full-risk-5%", "half-risk-5%"}
    assert points["half-risk-5%"].thresholds == points["half"].thresholds
    assert points["half-risk-5%"].abstain_below >= points["half"].abstain_below
    plain, _ = points_of(made_up(), abstain=[])
    assert all(point.abstain_below == -math.inf for point in plain.values())


def test_guaranteed_points_certify_abstention_at_their_share_of_delta():
    points, _ = points_of(made_up(), targets=[Guarantee(0.03)], abstain=[AbstainRisk(0.1, 0.05)])
    chosen = points["guarantee-3%"].provenance
    assert 0.05 / (chosen["candidates"] + 1) < chosen["abstention"]["level"] < 0.05
    assert chosen["abstention"]["tested_for"] >= 1
    assert points["full"].provenance["abstention"]["level"] == 0.05


def test_calibrators_are_fitted_where_they_help_and_are_served_as_simulated(bundle, tmp_path):
    # Over-confident on purpose: three times too sharp.
    result = calibrate(None, made_up(sharp=3.0), targets=[Budget(0.6, "b")], out=tmp_path / "o", report=False)
    point = result.calibration.points["full"]
    assert point.calibrators[-1].name != "identity"
    tried = [line for line in result.tried if line["point"] == "full"]
    assert sum(line["chosen"] for line in tried) == 1
    best = next(line for line in tried if line["chosen"])
    plain = next(line for line in tried if line["calibrator"] == "identity")
    assert best["confce_corr"] < plain["confce_corr"] / 3
    assert best["lince_upper"] <= 0.1
    x, _ = sample.heldout()
    with Cascade.load(bundle) as cascade:
        records = cascade.record({"x": x})
        fitted = tuple(type(point.calibrators[-1])().fit(records.logits[j], records.label[-1]) for j in range(3))
        served = OperatingPoint((4.0, 3.0, -math.inf), abstain_below=2.0, calibrators=fitted)
        answer, outcome = cascade.at(served).predict({"x": x}), simulate(records, served)
        sure = (np.abs(records.score - np.array([[4.0], [3.0], [2.0]])) > 1e-3).all(axis=0)
        assert (answer.exit == outcome.exit)[sure].all()
        np.testing.assert_allclose(answer.confidence[sure], outcome.confidence[sure], atol=1e-5)
        assert (answer.abstain == outcome.abstain)[sure].mean() > 0.99


def test_rows_with_no_label_decide_nothing_and_are_reported(tmp_path):
    records = made_up(rows=2000)
    labels = records.truth.copy()
    labels[:300] = -1
    result = calibrate(None, replace(records, truth=labels), out=tmp_path / "o", report=False)
    assert result.provenance["labelled"] == 1700
    assert any("300 of 2000 rows are labelled −1" in note for note in result.notes)
    assert {line["rows"] for line in result.shifts if line["shift"] == "unlabelled"} == {300}
    used = np.concatenate([result.rows.labelled.rows[part] for part in (result.split.fit, result.split.certify)])
    assert used.min() >= 300


@pytest.mark.parametrize("decides", [True, False])
def test_records_in_memory_give_what_their_folder_gives_routing_included(tmp_path, decides):
    records = routed(1600, decides=decides, seen=((), (0, 1), (0, 1)))
    folder = saved(records, tmp_path / "r")
    asked = {"targets": [Budget(0.8, "b")], "calibrators": ["platt", "ar_condcal"] if decides else "auto"}
    one, two = (
        calibrate(None, given, out=tmp_path / name, report=False, **asked)
        for name, given in (("memory", records), ("folder", folder))
    )
    assert any(note.startswith("audit of the routing: ") for note in one.notes)
    assert one.provenance == two.provenance
    assert ("ar_condcal" in one.provenance["calibrators"]) is decides
    for table in ("notes", "unmet", "points", "promises", "tried"):
        assert getattr(one, table) == getattr(two, table)
    for name, point in one.calibration.points.items():
        same = two.calibration.points[name]
        assert (same.thresholds, same.abstain_below) == (point.thresholds, point.abstain_below)
        assert [c.to_dict() for c in same.calibrators] == [c.to_dict() for c in point.calibrators]


@pytest.mark.parametrize(
    ("seen", "message"),
    [(None, "doesn't say which exit has seen which routing"), (((), (0,), (2,)), "doesn't fit its 2 layers")],
)
def test_routing_that_nobody_says_who_has_seen_is_refused(tmp_path, seen, message):
    records = replace(routed(200), routing_seen=seen)
    for given in (records, saved(records, tmp_path / "r")):
        with pytest.raises(InputError, match=message):
            calibrate(None, given, out=tmp_path / "o")


# ---------------------------------------------------------------- data that can't be calibrated on


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        (made_up(labels=False), {}, "no labels"),
        (made_up(rows=49), {}, "49 labelled rows, expected at least 50"),
        (made_up(rows=300), {"targets": [Budget(0.5, "full")]}, "'full' is taken"),
        (made_up(rows=300), {"targets": [Budget(0.5), Budget(0.5)]}, "given twice"),
        (
            made_up(rows=300),
            {
                "targets": [Budget(0.4, "a"), Budget(0.4, "a-risk-2%")],
                "abstain": [AbstainRisk(0.05), AbstainRisk(0.02)],
            },
            "'a-risk-2%' is also that of a point which a further abstain risk adds",
        ),
        (
            made_up(rows=300),
            {"targets": [Budget(0.4, "full-risk-2%")], "abstain": [AbstainRisk(0.05), AbstainRisk(0.02)]},
            "'full-risk-2%' is also",
        ),
        (made_up(rows=300), {"abstain": [AbstainRisk(0.05)] * 2}, "the risk 5% is given twice"),
        (made_up(rows=300), {"seed": -1}, "seed: expected a whole number of at least 0, got -1"),
        (made_up(rows=300), {"targets": [MaxMs(1.0)]}, "needs the milliseconds"),
        (made_up(rows=300), {"times": [3, 2, 1, 4]}, "never falling"),
        (made_up(rows=300), {"calibrators": ["warp"]}, "expected one of"),
        (made_up(rows=300), {"calibrators": ["ar_condcal"]}, "the audit says yes"),
        (made_up(rows=300), {"shifts": {"s": made_up(rows=50, exits=3)}}, "shift 's': 3 exits"),
        (made_up(rows=300), {"subgroup": ("g", [1, 2])}, "one value a row, 300 of them"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(tmp_path, records, options, message):
    with pytest.raises(InputError, match=message):
        calibrate(None, records, out=tmp_path / "o", **options)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("wrong", [lambda: Budget(1.5), lambda: AbstainRisk(2.0), lambda: Guarantee(0.0)])
def test_targets_out_of_range_are_refused(wrong):
    with pytest.raises(InputError, match="expected a number in"):
        wrong()


def test_labels_that_count_classes_in_another_order_are_refused(tmp_path):
    records = made_up(rows=1000, classes=10)
    moved = replace(records, truth=(records.truth + 3) % 10)
    with pytest.raises(InputError, match=r"once classes are renamed .* another order than the model's columns"):
        calibrate(None, moved, out=tmp_path / "o")
    noise = replace(records, truth=np.random.default_rng(7).integers(0, 10, 1000))
    assert any("are the labels those of these rows" in note for note in check_labels(labelled_rows(noise)))


def test_own_logits_are_checked_by_name(tmp_path):
    z, y = np.zeros((60, 3), np.float32), np.zeros(60, int)
    np.save(tmp_path / "a.npy", z)
    np.save(tmp_path / "b.npy", np.zeros((60, 4), np.float32))
    with pytest.raises(InputError, match=r"b\.npy: has the shape \(60, 4\), the first exit's is \(60, 3\)"):
        own_logits([tmp_path / "a.npy", tmp_path / "b.npy"], y)
    with pytest.raises(InputError, match="labels: expected 60 rows"):
        own_logits([z], y[:50])
    with pytest.raises(InputError, match="cumulative cost"):
        own_logits([z, z], y, [2, 1])
    with pytest.raises(InputError, match=r"nothing\.npy: can't be read"):
        own_logits([tmp_path / "nothing.npy"], y)
    with pytest.raises(InputError, match="not so in row 3"):
        calibrate(None, own_logits([z], np.where(np.arange(60) == 3, 3, 0)), out=tmp_path / "o")


@pytest.mark.parametrize("kind", ["one class", "all right", "fifty rows", "one exit", "all wrong"])
def test_degenerate_data_gets_an_honest_answer(tmp_path, kind):
    records = made_up(rows=50 if kind == "fifty rows" else 600, exits=1 if kind == "one exit" else 4)
    if kind == "one class":
        keep = np.flatnonzero(records.truth == 2)
        logits = records.logits[:, keep]
        records = own_logits(list(logits), records.truth[keep])
    elif kind == "all right":
        y = records.truth
        logits = [records.logits[j] + 40 * np.eye(5, dtype=np.float32)[y] for j in range(4)]
        records = own_logits(logits, y)
    elif kind == "all wrong":
        flipped = np.where(records.label[-1] == 0, 1, 0)
        records = replace(records, truth=np.where((records.label == flipped).any(axis=0), -1, flipped))
    result = calibrate(
        None,
        records,
        targets=[Budget(0.5), MaxDrop(0.01), Guarantee(0.05)],
        abstain=[AbstainRisk(0.05)],
        out=tmp_path / "o",
    )
    said = "\n".join([*result.notes, *result.unmet])
    for word in {"one class": ["every row has the label 2"], "all right": ["no error to calibrate"]}.get(kind, []):
        assert word in said
    if kind == "all right":
        assert result.calibration.points["budget-50%"].expected["accuracy"] == 1.0
    if kind == "all wrong":
        assert all(p.abstain_below == -math.inf for p in result.calibration.points.values())
    json.loads((result.written / "metrics.json").read_text())
    assert "</html>" in (result.written / "report.html").read_text()


# ---------------------------------------------------------------- versions


def test_calibrate_writes_a_new_version_that_loads_and_keeps_the_old(bundle, digits):
    before = json.loads((bundle / "calibration.json").read_text())
    result = calibrate(bundle, digits, targets=[Budget(0.5, "half")], abstain=[AbstainRisk(0.1)], report=False)
    new = result.calibration
    assert new.version == before["version"] + 1
    with Cascade.load(bundle, operating_point="half") as cascade:
        assert cascade.operating_point.thresholds == new.points["half"].thresholds
        assert cascade.operating_point.abstain_below == new.points["half"].abstain_below
    kept = sorted(f.name for f in (bundle / "history").iterdir() if f.is_dir())
    assert kept == [str(before["version"]), str(new.version)]
    assert json.loads((bundle / "history" / kept[0] / "calibration.json").read_text()) == before
    copy = bundle / "history" / kept[1] / "calibration.json"
    assert copy.read_bytes() == (bundle / "calibration.json").read_bytes()
    (bundle / "calibration.json").write_text("damaged")
    again = calibrate(bundle, digits, targets=[Budget(0.5, "half")], report=False)
    assert again.calibration.version == new.version + 1, "a damaged one can be replaced"
    assert any("can't be read" in note for note in again.notes)


def test_a_dry_run_leaves_nothing_but_its_look(bundle, digits):
    before = sorted((p, p.stat().st_mtime_ns) for p in bundle.rglob("*"))
    result = calibrate(bundle, digits, dry_run=True)
    assert result.written is None
    assert b"</html>" in result.files["report.html"]
    (look,) = History(bundle).looks()
    assert (look.outcome, look.seed, look.rows) == ("dry run", 0, 497)
    shutil.rmtree(bundle / "history")
    assert sorted((p, p.stat().st_mtime_ns) for p in bundle.rglob("*")) == before


def test_a_dry_run_where_nothing_can_be_written_says_that_its_look_is_lost():
    result = calibrate(None, made_up(rows=300), out="/dev/null/x", calibrators="none", dry_run=True, report=False)
    assert any("this look at the rows couldn't be noted" in note for note in result.notes)


def test_looks_at_the_same_rows_are_counted_and_said_from_the_second_on(tmp_path):
    records = made_up(rows=600)
    plain = {"out": tmp_path / "o", "abstain": [], "calibrators": "none", "report": False, "force": True}

    def looks(records=records, **options):
        result = calibrate(None, records, **plain, **options)
        said = [note for note in result.notes if note.startswith("look ")]
        count = result.provenance.get("looks", 1)
        assert (count == 1) == (said == [])
        return count, said

    assert looks(seed=0, dry_run=True) == (1, [])
    count, said = looks(seed=1, dry_run=True)
    assert count == 2
    assert said[0].startswith("look 2 at these rows: other seeds or options tried before")
    assert "dry runs included: 1. " in said[0]
    assert "up to 2 times its delta" in said[0]
    assert looks(seed=0)[0] == 2, "the same once more is no further look"
    assert looks(seed=0)[0] == 2
    assert looks(seed=0, targets=[Budget(0.4)])[0] == 3
    assert looks(made_up(rows=600, seed=1), seed=3)[0] == 1, "new rows"
    assert [one.outcome for one in History(tmp_path / "o").looks()][-3:] == ["version 2", "version 3", "version 4"]
    assert [one.looks for one in history(tmp_path / "o")] == [2, 2, 3, 1]


def test_records_of_another_bundle_are_refused(bundle, digits, tmp_path):
    folder = shutil.copytree(digits, tmp_path / "r")
    index = json.loads((folder / "records.json").read_text())
    (folder / "records.json").write_text(json.dumps({**index, "manifest": "0" * 64}))
    with pytest.raises(InputError, match="recorded from another bundle"):
        calibrate(bundle, folder)


def told_on(records, rows):
    """On these rows the first exit's score is far lower where it is wrong: a bar in between lets all others leave."""
    score = records.score.copy()
    score[0, rows] -= 100 * (records.label[0, rows] != records.truth[rows])
    return replace(records, score=score)


def test_a_worse_calibration_is_refused_and_force_replaces(tmp_path):
    good, out = made_up(rows=6000, seed=1), tmp_path / "o"
    plain = {"targets": [Budget(0.6, "b")], "abstain": [], "calibrators": "none", "out": out, "report": False}
    first = calibrate(None, good, **plain)
    spoilt = told_on(good, first.split.propose)
    with pytest.raises(
        CalibrationRefused, match=r"b: accuracy goes from .* on \d+ test rows that neither calibration was made from \("
    ) as refusal:
        calibrate(None, spoilt, **plain)
    assert refusal.value.result.refused
    assert read_version(out).version == 1
    assert [one.outcome for one in History(out).looks()] == ["version 1", "refused"]
    forced = calibrate(None, spoilt, **plain, force=True)
    assert forced.calibration.version == read_version(out).version == 2
    assert [one.outcome for one in History(out).looks()] == ["version 1", "version 2"]
    one, two = history(out)
    assert one.forced == ()
    assert two.forced[0].startswith("b: accuracy goes from")


def test_the_same_data_again_is_not_refused_and_gives_the_same(tmp_path):
    records, out = made_up(rows=1500, sharp=2.0), tmp_path / "o"
    plain = {"targets": [Budget(0.5)], "calibrators": ["platt", "temperature"], "out": out, "report": False}
    one = calibrate(None, records, **plain)
    two = calibrate(None, records, **plain)
    other = calibrate(None, records, **plain, seed=5)
    assert not two.refused
    assert not other.refused
    assert [c["difference"] for c in two.compared] == [0.0] * len(two.compared)
    assert other.compared[0]["rows"] < len(other.split.test), "rows that made the old one don't judge it"
    for name, point in one.calibration.points.items():
        same = two.calibration.points[name]
        assert same.thresholds == point.thresholds
        assert same.abstain_below == point.abstain_below
        assert [c.to_dict() for c in same.calibrators] == [c.to_dict() for c in point.calibrators]


def test_two_at_once_lose_neither(tmp_path, monkeypatch):
    looked = threading.Barrier(2)
    in_force = History.in_force

    def slowly(home):
        found = in_force(home)
        # Both have looked at the one in force, unless the second must wait for the first.
        with suppress(threading.BrokenBarrierError):
            looked.wait(0.5)
        return found

    monkeypatch.setattr(History, "in_force", slowly)
    out = tmp_path / "o"

    def one(seed):
        return calibrate(None, made_up(rows=300), out=out, calibrators="none", seed=seed, report=False, force=True)

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(one, [0, 1]))
    assert sorted(result.calibration.version for result in made) == [1, 2]
    assert sorted(result.written.name for result in made) == ["1", "2"]
    assert read_version(out).version == 2
    for result in made:
        assert read_version(result.written).points == result.calibration.points
    assert sorted(p.name for p in out.iterdir()) == ["calibration.json", "history"], "the lock is gone"


def test_points_that_are_not_asked_for_again_stay_as_they_are_unless_they_are_to_be_replaced(tmp_path):
    plain = {"out": tmp_path / "o", "abstain": [], "calibrators": "none"}
    half, third = Budget(0.5, "half"), Budget(0.3, "third")
    first = calibrate(None, made_up(rows=300), targets=[half, third], **plain)
    assert not first.kept
    second = calibrate(None, made_up(rows=300, seed=1), targets=[half], **plain)
    third_run = calibrate(None, made_up(rows=300, seed=2), targets=[half], **plain)
    old = read_version(first.written).points["third"]
    for result in (second, third_run):
        stored = read_version(result.written).points
        assert list(stored) == ["full", "half", "third"]
        assert stored["third"] == old
        assert stored["third"].expected == {"from_version": 1, **old.expected}
        assert "from_version" not in stored["half"].expected
        assert stored["full"].expected != first.calibration.points["full"].expected
        assert any("kept as version" in note and "'third'" in note for note in result.notes)
        found = json.loads(result.files["metrics.json"])
        assert [line["point"] for line in found["operating_points"]] == ["full", "half"], "only what was measured"
        assert [(line["point"], line["from_version"]) for line in found["kept"]] == [("third", 1)]
        assert {line["point"] for line in result.estimates} == {"half"}
        assert result.promises == [], "nothing was certified"
    last = calibrate(None, made_up(rows=300, seed=3), targets=[half], replace=True, **plain)
    assert list(read_version(last.written).points) == ["full", "half"]
    assert any("version 3, in force" in note and "lacks: 'third'. " in note for note in last.notes)


def test_a_point_of_another_number_of_exits_cannot_stay(tmp_path):
    plain = {"out": tmp_path / "o", "calibrators": "none", "report": False}
    calibrate(None, made_up(rows=300), targets=[Budget(0.5, "half"), Budget(0.3, "third")], **plain)
    result = calibrate(None, made_up(rows=300, exits=3), targets=[Budget(0.5, "half")], **plain)
    assert list(result.calibration.points) == ["full", "half"]
    assert any("lacks: 'third', which aren't of 3 exits" in note for note in result.notes)


def test_a_shift_of_rows_that_were_calibrated_on_is_noted(tmp_path):
    records = made_up(rows=400)
    result = calibrate(
        None, records, shifts={"same": records, "fresh": made_up(rows=200, seed=1)}, out=tmp_path / "o", report=False
    )
    made_from = 400 - len(result.split.test)
    said = [note for note in result.notes if note.startswith("shift ")]
    assert len(said) == 1
    assert said[0].startswith(f"shift 'same': {made_from} of its 400 rows were calibrated on")


def without_dates(folder):
    def lines(text):
        return [{k: v for k, v in json.loads(one).items() if k not in ("created", "digest", "when")} for one in text]

    return {
        str(p.relative_to(folder)): lines([p.read_text()])
        if p.suffix == ".json"
        else lines(p.read_text().splitlines())
        if p.suffix == ".jsonl"
        else re.sub(rb"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d", b"", p.read_bytes())
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def kill_and_finish(bundle, digits, kills, seed):
    """Kill `calibrate` at random moments: the bundle always loads, and what is left at the end is as undisturbed."""
    targets = ["--budget", "half=0.5", "--max-drop", "2%", "--abstain-risk", "0.1", "--no-times"]
    command = [sys.executable, "-m", "offramp.runtime.cli", "calibrate", "bundle", str(digits), *targets]
    quiet = {"cwd": bundle.parent, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    clean = shutil.copytree(bundle, bundle.parent / "clean")
    started = time.monotonic()
    subprocess.run(command, check=True, **quiet)
    took = time.monotonic() - started
    want = without_dates(bundle)
    rng = np.random.default_rng(seed)
    shutil.rmtree(bundle)
    shutil.copytree(clean, bundle)
    killed = 0
    for _ in range(kills):
        process = subprocess.Popen(command, **quiet)
        time.sleep(float(rng.uniform(0.3, 1.05)) * took)
        os.kill(process.pid, signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        current = read_version(bundle).version
        assert current in (1, 2)
        with Cascade.load(bundle) as cascade:
            cascade.at("half" if current == 2 else "balanced").predict({"x": sample.heldout()[0][:4]})
        if current == 2:  # it had finished: begin again
            shutil.rmtree(bundle)
            shutil.copytree(clean, bundle)
    assert killed, "no run was killed in its middle"
    subprocess.run(command, check=True, **quiet)
    assert without_dates(bundle) == want
    assert not list(bundle.rglob("*.tmp"))


def test_killed_at_any_moment_it_finishes_as_if_undisturbed(bundle, digits):
    kill_and_finish(bundle, digits, kills=5, seed=0)


@pytest.mark.slow
def test_killed_twenty_times_it_finishes_as_if_undisturbed(bundle, digits):
    kill_and_finish(bundle, digits, kills=20, seed=1)


# ---------------------------------------------------------------- the command


def run(capsys, *arguments):
    code = 0
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


def test_every_kind_of_target_on_the_command_line(capsys, bundle, digits, tmp_path):
    code, out, err = run(
        capsys, "calibrate", bundle, digits, "--budget", "0.5", "--max-ms", "quick=1000", "--max-drop", "2%",
        "--guarantee", "sure=10%", "--delta", "0.1", "--abstain-risk", "10%", "--exit-ms", "1,2,3",
        "--shift", f"again={digits}", "--report", tmp_path / "report",
    )  # fmt: skip
    assert code == 0, err
    for name in ("full", "budget-50%", "quick", "max-drop-2%", "sure"):
        assert name in out
    assert "again: full abstains on" in out
    found = json.loads((tmp_path / "report" / "metrics.json").read_text())
    assert found["exits"][0]["ms"] == 1
    assert {line["shift"] for line in found["shift_promises"]} == {"again"}
    code, out, _ = run(capsys, "diff", bundle / "history" / "1", bundle)
    assert code == 0
    assert "version 1" in out
    assert "budget-50%" in out
    code, out, _ = run(capsys, "diff", bundle, bundle, "--json")
    assert json.loads(out)["changes"] == []
    assert run(capsys, "diff", bundle, tmp_path / "nothing")[0] == 2


def test_own_logits_need_no_bundle(capsys, tmp_path):
    records = made_up(rows=500)
    files = []
    for j, z in enumerate(records.logits):
        np.save(tmp_path / f"{j}.npy", z)
        files.append(tmp_path / f"{j}.npy")
    np.save(tmp_path / "y.npy", records.truth)
    np.savez(tmp_path / "g.npz", sex=np.arange(500) % 2)
    code, out, err = run(
        capsys, "calibrate", "--logits", *files, "--labels", tmp_path / "y.npy", "--flops", "1,2,3,4",
        "--out", tmp_path / "o", "--budget", "half=0.5", "--subgroup", f"{tmp_path / 'g.npz'}:sex",
    )  # fmt: skip
    assert code == 0, err
    assert "half" in out
    assert set(read_version(tmp_path / "o").points) == {"full", "half"}
    found = json.loads((tmp_path / "o" / "history" / "1" / "metrics.json").read_text())
    assert {(line["subgroup"], line["value"]) for line in found["subgroups"]} == {("sex", "0"), ("sex", "1")}
    assert "assumed" not in out
    page = Page((tmp_path / "o" / "history" / "1" / "report.html").read_text())
    assert "FLOPs" in page.table("exit", "accuracy")[0]
    code, out, err = run(
        capsys, "calibrate", "--logits", *files, "--labels", tmp_path / "y.npy", "--out", tmp_path / "counted"
    )
    assert code == 0, err
    assert "note: costs 1, 2, 3, 4 assumed: give --flops" in out
    assert "assumed cost" in out
    assert "FLOPs" not in out
    assert "assumed" not in err
    page = (tmp_path / "counted" / "history" / "1" / "report.html").read_text()
    assert "costs 1, 2, 3, 4 assumed: give --flops" in page
    assert "assumed cost" in Page(page).table("exit", "accuracy")[0]
    assert "FLOPs" not in page
    assert run(capsys, "calibrate", "--logits", *files, "--out", tmp_path / "p")[0] == 2
    assert run(capsys, "calibrate", "--logits", *files, "--labels", tmp_path / "y.npy")[0] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--budget", "a=0.4", "--budget", "a-risk-2%=0.4", "--abstain-risk", "5%", "--abstain-risk", "2%"],
            "a-risk-2%",
        ),
        (["--abstain-risk", "none", "--abstain-risk", "5%"], "--abstain-risk: none goes alone"),
        (["--seed", "-1"], "'-1': expected a whole number of at least 0"),
        (["--seed", "1.5"], "'1.5': expected a whole number of at least 0"),
        (["--delta", "1"], r"'1': expected a number in (0, 1), or"),
        (["--abstain-risk", "100%"], r"'100%': expected a number in (0, 1), or"),
        (["--max-drop", "x=1"], r"'1': expected a number in (0, 1), or"),
        (["--budget", "0"], r"'0': expected a number in (0, 1], or"),
    ],
)
def test_options_that_mean_nothing_are_exit_code_2(capsys, tmp_path, options, message):
    records = saved(made_up(rows=300), tmp_path / "r")
    code, _, err = run(capsys, "calibrate", records, "--out", tmp_path / "o", *options)
    assert code == 2
    assert message in err
    assert not (tmp_path / "o").exists()
    assert run(capsys, "calibrate", records, "--out", tmp_path / "o", "--budget", "100%")[0] == 0


def test_a_refusal_is_exit_code_3_and_force_is_0(capsys, tmp_path):
    good, out = made_up(rows=6000, seed=1), tmp_path / "o"
    options = ["--out", out, "--budget", "b=0.6", "--abstain-risk", "none", "--calibrator", "none"]
    assert run(capsys, "calibrate", saved(good, tmp_path / "good"), *options)[0] == 0
    spoilt = saved(told_on(good, split_rows(good.truth, 0).propose), tmp_path / "spoilt")
    code, _, err = run(capsys, "calibrate", spoilt, *options, "--report", tmp_path / "why")
    assert code == 3
    assert "b: accuracy goes from" in err
    assert "--force" in err
    assert f"its report: {tmp_path / 'why'}/report.html" in err
    assert main(["history", str(out)]) == 0
    assert "looks that put nothing in force: 1 refused" in capsys.readouterr().out
    code, _, err = run(capsys, "calibrate", spoilt, *options, "--budget", "c=0.7")
    assert code == 3
    assert "warning: look 2 at these rows" in err
    assert read_version(out).version == 1
    assert not list(out.glob(".*")), "the lock is gone"
    code, _, err = run(capsys, "calibrate", spoilt, *options)
    assert code == 3
    assert "its report: give --report FOLDER" in err
    assert "was refused" in (tmp_path / "why" / "report.html").read_text()
    code, said, err = run(capsys, "calibrate", spoilt, *options, "--dry-run")
    assert code == 3
    assert re.search(r"would be refused: b: accuracy goes .* test rows that neither calibration was made from", said)
    assert "accuracy goes" not in err
    code, said, err = run(capsys, "calibrate", spoilt, *options, "--force")
    assert code == 0
    assert "would be refused" not in said
    assert "warning: worse than the one in force: b: accuracy goes" in err
    assert read_version(out).version == 2
