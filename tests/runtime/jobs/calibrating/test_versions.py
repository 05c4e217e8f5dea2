"""A version can be put in force again, and nothing is lost, renumbered or half-done by it."""

import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from killing import killed_at
from offramp.runtime import BundleError, InputError, OperatingPoint, sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.calibration_file import Calibration, encode_calibration
from offramp.runtime.cli import main
from offramp.runtime.jobs import history, promote, rollback
from offramp.runtime.jobs.calibrating.history import History, home_of
from offramp.runtime.points import full


def made(version, bar, manifest=""):
    half = OperatingPoint(
        (bar, -math.inf),
        name="half",
        expected={"accuracy": 0.9},
        provenance={"target": {"kind": "budget", "share": 0.5}},
    )
    return encode_calibration(
        Calibration({"full": full(2), "half": half}, version, provenance={"rows": 600}),
        manifest,
        created="2026-11-28T01:02:03",
        producer="a test",
    )


def publish(home, bar):
    """As `calibrate` does: the next version, whose bar tells it from others."""
    with home.locked():
        version = home.next_version(home.current())
        return home.publish(made(version, bar, home.digest), version, {}, np.array([version], np.uint64)).name


def bar(home):
    return home.current().points["half"].thresholds[0]


@pytest.fixture
def home(tmp_path):
    """Three versions, their number is their bar; the third is in force."""
    home = History(tmp_path / "o")
    for number in (1, 2, 3):
        publish(home, float(number))
    return home


def test_a_promoted_version_is_in_force_byte_for_byte(home):
    assert promote(home.path, 1).version == 1
    kept = home.path / "history" / "1" / "calibration.json"
    assert (home.path / "calibration.json").read_bytes() == kept.read_bytes()
    assert [one.in_force for one in history(home.path)] == ["now", "was", "was"]
    assert sorted(p.name for p in home.path.iterdir()) == ["calibration.json", "history"], "no lock, nothing temporary"


def test_promoting_what_is_in_force_changes_nothing(home):
    before = {p: p.stat().st_mtime_ns for p in home.path.rglob("*")}
    promote(home.path, 3)
    promote(home.path, "3")
    assert {p: p.stat().st_mtime_ns for p in home.path.rglob("*") if p != home.path} == {
        p: t for p, t in before.items() if p != home.path
    }


def test_each_rollback_goes_one_further_back_and_never_returns(home):
    assert [rollback(home.path).version, rollback(home.path).version] == [2, 1]
    with pytest.raises(InputError, match="no version was in force before it"):
        rollback(home.path)
    assert bar(home) == 1


def test_a_rollback_undoes_a_promotion(home):
    promote(home.path, 1)
    assert rollback(home.path).version == 3
    assert rollback(home.path).version == 2


def test_calibrating_after_a_rollback_overwrites_and_renumbers_nothing(home):
    before = {p: p.read_bytes() for p in (home.path / "history").rglob("*.json")}
    rollback(home.path)
    rollback(home.path)
    assert publish(home, 9.0) == "4"
    assert {p: p.read_bytes() for p in before} == before
    assert rollback(home.path).version == 1, "what was in force before 4"


def test_a_calibration_put_there_by_hand_is_part_of_the_story(home):
    shutil.copy(home.path / "history" / "1" / "calibration.json", home.path)
    (one, *_), last = history(home.path), home.put_in_force()[-1]
    assert (one.in_force, last.by) == ("now", "found")
    assert rollback(home.path).version == 3
    (home.path / "calibration.json").write_bytes(made(2, 0.5))
    assert [one.version for one in history(home.path)][-1].startswith("2-"), "not kept yet, but listed"
    assert rollback(home.path).version == 3
    foreign = home.kept()[2]
    assert foreign.startswith("2-")
    promote(home.path, foreign)
    assert bar(home) == 0.5


@pytest.mark.parametrize("state", ["damaged", "gone"])
def test_where_nothing_readable_is_in_force_a_rollback_puts_the_last_one_back(home, state):
    where = home.path / "calibration.json"
    where.unlink() if state == "gone" else where.write_text("damaged")
    assert rollback(home.path).version == 3
    assert rollback(home.path).version == 2


def test_versions_from_before_there_was_a_log_are_not_overwritten(home):
    (home.path / "history" / "log.jsonl").unlink()
    shutil.copy(home.path / "history" / "1" / "calibration.json", home.path)
    with pytest.raises(InputError, match="no version was in force before it"):
        rollback(home.path)
    assert publish(home, 9.0) == "4"
    assert home.versions() == [1, 2, 3, 4]


def test_a_log_that_cannot_be_read_is_said_and_costs_no_version(home):
    log = home.path / "history" / "log.jsonl"
    log.write_bytes(b'{"version": "1", "when"\n[]\n{"version": "../x", "when": "", "by": ""}\n\xff\n')
    with pytest.raises(BundleError, match=r"log\.jsonl: has a line that can't be read.*offramp promote"):
        rollback(home.path)
    promote(home.path, 1)
    assert publish(home, 9.0) == "4"


# ---------------------------------------------------------------- what can't be put in force


def spoil(folder, how):
    where = folder / "calibration.json"
    if how == "cut short":
        where.write_bytes(where.read_bytes()[:-9])
    elif how == "no file":
        where.unlink()
    elif how == "another bundle's":
        where.write_bytes(made(1, 1.0, "ab" * 32))
    else:
        where.write_bytes(made(2, 1.0))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut short", "calibration.json: Input data was truncated"),
        ("no file", r"holds no calibration\.json"),
        ("another bundle's", "belongs to a bundle"),
        ("another number", "says that it is version 2"),
    ],
)
def test_a_version_that_cannot_be_trusted_stays_out_of_force(home, how, message, capsys):
    spoil(home.path / "history" / "1", how)
    with pytest.raises(BundleError, match=message):
        promote(home.path, 1)
    assert main(["promote", str(home.path), "1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert bar(home) == 3
    assert history(home.path)[0].error
    assert [one.in_force for one in history(home.path)] == ["was", "was", "now"]
    rollback(home.path)
    with pytest.raises(BundleError, match=message):
        rollback(home.path)
    assert bar(home) == 2


def test_a_version_of_another_manifest_is_refused_by_a_bundle(tmp_path, capsys):
    bundle = Path(shutil.copytree(sample.BUNDLE, tmp_path / "bundle"))
    home = home_of(bundle)
    assert home.manifest == read_bundle(bundle).manifest
    (only,) = history(bundle)
    assert (only.version, only.in_force, only.by) == ("1", "now", "found")
    assert promote(bundle, 1).version == 1, "in force, if not kept yet"
    folder = bundle / "history" / "2"
    folder.mkdir(parents=True)
    (folder / "calibration.json").write_bytes(made(2, 1.0, "ab" * 32))
    assert main(["promote", str(bundle), "2"]) == 2
    assert "belongs to another bundle" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["4", "0", "-1", "../1", "one", ""])
def test_a_version_that_is_not_there_is_one_line_with_those_that_are(home, asked, capsys):
    with pytest.raises(InputError, match=r"no version '.*': there are 1, 2, 3\."):
        promote(home.path, asked)
    assert main(["promote", str(home.path), "--", asked]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert bar(home) == 3


def test_a_folder_without_calibrations_is_one_line(tmp_path, capsys):
    for command in (["history"], ["promote"], ["rollback"]):
        more = ["1"] if command == ["promote"] else []
        assert main([*command, str(tmp_path), *more]) == 2
        assert "no calibrations there" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- killed, and at once


@pytest.mark.parametrize("command", ["promote", "rollback", "calibrate"])
def test_killed_at_any_touch_of_the_disk_what_was_in_force_before_stays_known(home, tmp_path, command):
    promote(home.path, 1)  # 1, 2, 3, 1 by now
    publish(home, 4.0)
    seen, touch = set(), 0
    while True:
        other = History(shutil.copytree(home.path, tmp_path / str(touch)))
        work = {
            "promote": lambda other=other: promote(other.path, 2),
            "rollback": lambda other=other: rollback(other.path),
            "calibrate": lambda other=other: publish(other, 5.0),
        }[command]
        if not killed_at(touch, work):
            break
        done = {"promote": (2, [4, 1, 3, 2, 1]), "rollback": (1, [3, 2, 1]), "calibrate": (5, [4, 1, 3, 2, 1])}
        now = bar(other)
        want = [1, 3, 2, 1] if now == 4 else done[command][1]
        assert now in (4, done[command][0])
        assert other.next_version(other.current()) == (6 if now == 5 else 5)
        assert [rollback(other.path).version for _ in want] == want
        assert publish(other, 6.0) == ("6" if now == 5 else "5")
        assert not list(other.path.rglob(".*")), "nothing temporary is left"
        seen.add(now)
        touch += 1
    assert seen == {4, done[command][0]}


def test_many_at_once_wait_for_each_other(home):
    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(publish, home, 9.0) for _ in range(3)] + [
            pool.submit(promote, home.path, n) for n in (1, 2, 3)
        ]:
            done.result()
    assert home.versions() == [1, 2, 3, 4, 5, 6]
    assert home.in_force_name() == home.put_in_force()[-1].version


# ---------------------------------------------------------------- the command


def test_history_is_a_table_with_a_line_a_point_and_json(home, capsys):
    rollback(home.path)
    assert main(["history", str(home.path)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["version", "date", "in", "force"]
    assert "now, since 20" in lines[3]
    assert lines[4].split() == ["half", "budget", "0.5", "90.00%", "-", "-", "-"]
    assert "version 2: put in force by rollback" in out
    assert main(["history", str(home.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["versions"]
    assert [(one["version"], one["in_force"], one["rows"]) for one in found] == [
        ("1", "was", 600),
        ("2", "now", 600),
        ("3", "was", 600),
    ]


def test_promote_and_rollback_say_what_is_in_force(home, capsys):
    assert main(["promote", str(home.path), "1"]) == 0
    assert "version 1 is in force, with full, half" in capsys.readouterr().out
    assert main(["rollback", str(home.path)]) == 0
    assert "version 3 is in force again" in capsys.readouterr().out


def test_a_bundle_without_a_calibration_has_no_history(tmp_path, capsys):
    bundle = Path(shutil.copytree(sample.BUNDLE, tmp_path / "bundle"))
    (bundle / "calibration.json").unlink()
    assert history(bundle) == []
    assert main(["history", str(bundle)]) == 0
    assert "no calibration yet" in capsys.readouterr().out
