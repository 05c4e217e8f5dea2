"""Calibrations through time: the old or the new is in force at every moment, and every one is kept."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from killing import killed_at
from offramp.runtime import BundleError, InputError, OperatingPoint, calibration, sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.calibration_file import Calibration, decode_calibration, encode_calibration
from offramp.runtime.jobs.calibrating.history import History, diff, read_version
from offramp.runtime.points import full

WHOLE = (["calibration.json", "history"], ["1", "2", "log.jsonl"])
KEYS = np.array([7, 3, 2**63 + 1], np.uint64)


def made(version, bar=1.0, manifest=""):
    """The bytes of a calibration of two exits."""
    points = {"full": full(2), "half": OperatingPoint((bar, -math.inf), name="half")}
    return encode_calibration(Calibration(points, version), manifest, created="today", producer="a test")


def publish(history, version, bar=1.0):
    with history.locked():
        return history.publish(made(version, bar), version, {"metrics.json": b"{}"}, KEYS)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def history(tmp_path):
    return History(tmp_path / "o")


def test_a_version_is_kept_with_its_files_and_is_in_force(history):
    assert history.current() is None
    kept = publish(history, 1)
    assert kept == history.path / "history" / "1"
    assert names(kept) == ["calibration.json", "metrics.json", "used.npy"]
    assert (kept / "calibration.json").read_bytes() == (history.path / "calibration.json").read_bytes() == made(1)
    assert history.current().points["half"].thresholds == (1.0, -math.inf)
    assert history.used(1).tolist() == sorted(KEYS.tolist())
    assert names(history.path) == ["calibration.json", "history"], "no lock is left"


def test_killed_at_any_touch_of_the_disk_the_old_or_the_new_is_in_force_and_the_next_run_finishes(tmp_path):
    template, seen, touch = History(tmp_path / "template"), [], 0
    publish(template, 1, bar=1.0)
    while True:
        history = History(shutil.copytree(template.path, tmp_path / str(touch)))
        if not killed_at(touch, lambda history=history: publish(history, 2, bar=2.0)):
            break
        current = history.current()
        assert current.points["half"].thresholds[0] == current.version
        assert read_version(history.path / "history" / "1").version == 1
        for version in history.versions():
            assert read_version(history.path / "history" / str(version)).version == version
            assert history.used(version).tolist() == sorted(KEYS.tolist())
        assert current.version in history.versions(), "what is in force is kept before"
        seen.append(current.version)
        publish(history, 2, bar=2.0)
        assert history.current().version == 2
        assert (names(history.path), names(history.path / "history")) == WHOLE
        touch += 1
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}
    assert seen.count(1) > 10, "it was killed all along the way"


def test_versions_are_the_folders_with_a_number_in_order(history):
    assert history.versions() == []
    kept = history.path / "history"
    for name in ("10", "9", "1", "x", "-3", "1.5", ".4.123-0123abcd.tmp", "1234567890"):
        (kept / name).mkdir(parents=True)
    (kept / "5").write_text("a file")
    assert history.versions() == [1, 9, 10]


def test_the_next_version_follows_the_current_or_what_is_kept_where_that_cannot_be_read(history):
    assert history.next_version(None) == 1
    publish(history, 4)
    assert history.next_version(history.current()) == 5
    (history.path / "calibration.json").write_text("damaged")
    with pytest.raises(BundleError):
        history.current()
    assert history.next_version(None) == 5


@pytest.mark.parametrize("damage", ["missing", "cut short", "empty", "text", "other numbers", "a table"])
def test_rows_that_cannot_be_read_are_not_known(history, damage):
    used = publish(history, 1) / "used.npy"
    if damage == "missing":
        used.unlink()
    elif damage == "cut short":
        used.write_bytes(used.read_bytes()[:-3])
    elif damage in ("empty", "text"):
        used.write_bytes(b"" if damage == "empty" else b"not numpy")
    else:
        np.save(used, KEYS.astype(np.float64) if damage == "other numbers" else KEYS[:, None])
    assert history.used(1) is None


def test_a_calibration_that_another_program_put_in_force_is_kept_too(history):
    publish(history, 1)
    foreign = made(7, bar=0.25)
    (history.path / "calibration.json").write_bytes(foreign)
    publish(history, 8)
    assert history.versions() == [1, 7, 8]
    assert (history.path / "history" / "7" / "calibration.json").read_bytes() == foreign
    assert history.used(7) is None, "nobody knows what it was made from"


def test_a_damaged_one_in_force_is_replaced_and_not_kept(history):
    history.path.mkdir()
    (history.path / "calibration.json").write_bytes(made(3)[:-20])
    publish(history, 4)
    assert history.versions() == [4]


def test_a_foreign_calibration_with_a_number_that_is_taken_is_kept_too(history):
    publish(history, 1)
    foreign = made(1, bar=0.25)
    (history.path / "calibration.json").write_bytes(foreign)
    publish(history, history.next_version(history.current()))
    assert foreign in [path.read_bytes() for path in history.path.rglob("calibration.json")]


def test_calibrating_on_an_old_one_that_was_put_back_loses_none(history):
    for version in (1, 2, 3):
        publish(history, version, bar=version)
    shutil.copy(history.path / "history" / "1" / "calibration.json", history.path / "calibration.json")
    publish(history, history.next_version(history.current()), bar=9.0)
    bars = {read_version(history.path / "history" / str(v)).points["half"].thresholds[0] for v in history.versions()}
    assert bars == {1.0, 2.0, 3.0, 9.0}


def test_a_folder_that_is_no_calibration_is_not_overwritten(history):
    precious = history.path / "history" / "1"
    precious.mkdir(parents=True)
    (precious / "thesis.txt").write_text("years")
    with pytest.raises(InputError, match=r"1 already exists, and has no calibration\.json"):
        publish(history, 1)
    assert (precious / "thesis.txt").read_text() == "years"
    assert history.current() is None


def test_logits_of_no_bundle_and_a_bundle_do_not_share_a_folder(history):
    publish(history, 1)
    (history.path / "calibration.json").write_bytes(made(2, manifest="ab" * 32))
    with pytest.raises(BundleError, match="belongs to a bundle"):
        history.current()
    bundle = Path(shutil.copytree(sample.BUNDLE, history.path / "bundle"))
    inside = History(bundle, read_bundle(bundle).manifest)
    assert inside.digest == inside.manifest.digest
    assert inside.current().version == read_version(bundle).version
    (bundle / "calibration.json").write_bytes(made(2))
    with pytest.raises(BundleError, match="belongs to another bundle"):
        inside.current()


# ---------------------------------------------------------------- reading and comparing


def test_a_version_is_read_from_its_folder_its_file_or_where_it_is_in_force(history):
    kept = publish(history, 3)
    for where in (kept, kept / "calibration.json", history.path, str(history.path)):
        assert read_version(where).version == 3


def test_what_has_no_calibration_is_said_so(tmp_path):
    bundle = Path(shutil.copytree(sample.BUNDLE, tmp_path / "bundle"))
    (bundle / "calibration.json").unlink()
    with pytest.raises(InputError, match=r"this bundle has no calibration\.json yet"):
        read_version(bundle)
    for where in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="no calibration there; expected a bundle, a folder of its history/"):
            read_version(where)


def changes(old, new):
    return {(line["point"], line["field"]): (line["old"], line["new"]) for line in diff(old, new)}


def test_what_changed_is_one_line_a_value():
    warm = calibration.from_dict({"name": "temperature", "version": 1, "fitted": {"classes": 3, "temperature": 2.0}})
    half = OperatingPoint(
        (1.0, -math.inf),
        0.5,
        "half",
        expected={"accuracy": 0.9, "intervals": {}},
        provenance={"target": {"share": 0.5}},
    )
    old = Calibration({"full": full(2), "half": half, "gone": half})
    point = replace(
        half,
        thresholds=(1.5, -math.inf),
        abstain_below=-math.inf,
        calibrators=(calibration.get("identity"), warm),
        expected={"accuracy": 0.8, "risk": 0.1, "intervals": {"accuracy": [0, 1]}},
        provenance={"target": {"share": 0.4}},
    )
    assert changes(old, Calibration({"full": full(2), "half": point, "new": half})) == {
        ("half", "threshold[0]"): (1.0, 1.5),
        ("half", "abstain_below"): (0.5, -math.inf),
        ("half", "calibrator[1]"): ("identity", "temperature temperature=2"),
        ("half", "expected.accuracy"): (0.9, 0.8),
        ("half", "expected.risk"): (None, 0.1),
        ("half", "target"): ({"share": 0.5}, {"share": 0.4}),
        ("gone", "point"): ("there", None),
        ("new", "point"): (None, "there"),
    }
    assert diff(old, old) == []


def test_another_number_of_exits_is_a_change():
    found = changes(Calibration({"full": full(2)}), Calibration({"full": full(3)}))
    assert found["full", "exits"] == (2, 3)
    assert found["full", "threshold[1]"] == (-math.inf, math.inf)


def test_a_calibration_is_unchanged_by_being_written_and_read():
    one = decode_calibration(made(5, bar=0.1), Path("c"))
    assert diff(one, decode_calibration(made(6, bar=0.1), Path("c"))) == []
