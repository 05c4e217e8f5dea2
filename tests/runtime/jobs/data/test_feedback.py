"""Kept rows as records: an even sample of what was served, whoever left where."""

import json
import shutil
import sys

import numpy as np
import pytest
from offramp.runtime import Cascade, InputError, RuntimeUnavailable, sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.cli import main
from offramp.runtime.jobs import calibrate, from_feedback
from offramp.runtime.thresholds import leave_at

pytest.importorskip("sqlalchemy")
pytest.importorskip("alembic")

from offramp.runtime.online.store.served import Served
from offramp.runtime.online.store.store import Limits, Store

ROWS, BARS = 1500, (3.0, 3.0, -np.inf)


@pytest.fixture(scope="module")
def recorded():
    """Noisy digits, their labels and what every exit says of them."""
    images, labels = sample.heldout()
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(images), ROWS)
    noisy = np.clip(images[picks] + rng.normal(0, 2.5, images[picks].shape), 0, 16).astype(np.uint8)
    with Cascade.load(sample.BUNDLE, threads=1) as cascade:
        return cascade.record({"x": noisy}), labels[picks]


@pytest.fixture
def keep(tmp_path, recorded):
    """keep(shadow=…, …) -> a store with the rows, some of which were run to the end afterwards."""

    def made(shadow=0.5, *, rows=slice(None), name="kept.db", store=None, point="balanced", time=1e9, key="a"):
        records, labels = recorded
        manifest = read_bundle(sample.BUNDLE).manifest
        score, logits = records.score[:, rows], records.logits[:, rows]
        left = leave_at(score, BARS)
        ids = [f"{point}{key}{k}" for k in range(len(left))]
        ran = np.arange(3)[:, None] <= left
        drawn = np.random.default_rng(1).random(len(left)) < shadow
        path = tmp_path / name
        about = {"model": manifest.name, "bundle": manifest.digest, "exits": 3, "classes": manifest.classes}
        with Store.open(path, **{**about, **(store or {})}, limits=Limits(days=1e6, unflushed=10**5)) as kept:
            kept.append(
                Served(
                    ids,
                    np.zeros(len(left), int),
                    time,
                    0,
                    point,
                    left,
                    False,
                    np.where(ran, score, np.nan),
                    list(logits),
                    shadow,
                )
            )
            at = np.flatnonzero(drawn)
            kept.complete([ids[k] for k in at], np.zeros(len(at), int), score[:, at], list(logits[:, at]))
            kept.feedback(ids, np.zeros(len(left), int), labels[rows], key)
        return path

    return made


def test_hard_rows_are_as_rare_among_them_as_in_the_traffic(keep, recorded):
    records, labels = recorded
    opened = from_feedback(sample.BUNDLE, keep(0.4))
    left = leave_at(records.score, BARS)
    early = (left < 2).mean()
    expected = 0.4 * ROWS
    assert abs(len(opened.records) - expected) < 4 * np.sqrt(expected)
    found = (leave_at(opened.records.score, BARS) < 2).mean()
    assert abs(found - early) < 4 * np.sqrt(early * (1 - early) / expected)
    assert (opened.records.label[-1] == opened.records.truth).mean() == pytest.approx(
        (records.label[-1] == labels).mean(), abs=0.05
    )
    assert opened.described["labelled"] == ROWS
    assert opened.notes == ()


def test_they_are_as_they_were_recorded_but_for_the_rounding(keep, recorded):
    records, labels = recorded
    opened = from_feedback(sample.BUNDLE, keep(1.0))
    mine = opened.records
    assert len(mine) == ROWS
    order, its = np.argsort(mine.score[0], kind="stable"), np.argsort(records.score[0], kind="stable")
    assert np.array_equal(mine.score[:, order], records.score[:, its])
    assert np.array_equal(mine.truth[order], labels[its])
    z = records.logits - records.logits.max(axis=2, keepdims=True)
    assert np.allclose(mine.logits[:, order], z[:, its], atol=0.05)
    assert mine.logits.dtype == np.float16
    assert np.array_equal(mine.flops, records.flops)


def test_rows_from_before_the_first_shadow_run_are_left_out(keep):
    keep(0.0, rows=slice(0, 700), time=1e9, point="old")
    path = keep(0.5, rows=slice(700, None), time=2e9, point="new")
    opened = from_feedback(sample.BUNDLE, path)
    assert opened.described["from"] == 2e9
    assert opened.notes == ()


def test_early_leavers_that_could_not_be_drawn_are_told(keep, recorded):
    records, _ = recorded
    keep(1.0, rows=slice(0, 1000), time=1e9)
    opened = from_feedback(sample.BUNDLE, keep(0.0, rows=slice(1000, None), time=2e9, key="b"))
    early = leave_at(records.score, BARS) < 2
    assert f"{early[1000:].sum() / early.sum():.1%} of the rows that left early" in opened.notes[0]


def test_one_sender_has_at_most_its_share(keep):
    keep(1.0, rows=slice(0, 200), key="a")
    keep(1.0, rows=slice(200, 400), key="b")
    path = keep(1.0, rows=slice(400, None), key="c")
    assert len(from_feedback(sample.BUNDLE, path).records) == ROWS
    few = from_feedback(sample.BUNDLE, path, share=0.4).records
    assert 400 < len(few) < 800


@pytest.fixture
def bundle(tmp_path):
    return shutil.copytree(sample.BUNDLE, tmp_path / "bundle")


def test_a_bundle_is_calibrated_from_what_it_served(bundle, keep, capsys):
    path = str(keep(0.7))
    command = ["calibrate", str(bundle), "--from-feedback", path, "--budget", "half=0.5", "--no-times"]
    assert main([*command, "--calibrator", "none", "--abstain-risk", "0.001%"]) == 3
    said = capsys.readouterr()
    assert "wrote" in said.out
    assert "--abstain-risk isn't promised at full, half" in said.err
    made = json.loads((bundle / "calibration.json").read_text())
    assert made["provenance"]["records"]["feedback"] == path
    with Cascade.load(bundle, operating_point="half", threads=1) as cascade:
        assert cascade.operating_point.name == "half"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--from-feedback", "nowhere.db"], "nowhere.db: no such file"),
        (["records", "--from-feedback", "x.db"], "--from-feedback: give the bundle that served the rows"),
    ],
)
def test_mistakes_are_one_line(bundle, capsys, options, said):
    with pytest.raises(SystemExit, match="2"):
        raise SystemExit(main(["calibrate", str(bundle), *options]))
    assert said in capsys.readouterr().err


def test_too_few_rows_and_another_bundles_are_told(bundle, keep):
    path = keep(0.05, rows=slice(0, 300))
    with pytest.raises(InputError, match=r"300 rows have a label, \d+ of them all exits known.*Shadow runs make more"):
        calibrate(bundle, from_feedback(bundle, path))
    other = keep(1.0, name="other.db", store={"model": "intents", "bundle": "0" * 64})
    with pytest.raises(InputError, match="of the models 'intents'"):
        from_feedback(bundle, other)


def test_without_the_extra_the_command_that_brings_it_is_said(keep, monkeypatch):
    path = keep(1.0)
    for name in [name for name in sys.modules if name.startswith("offramp.runtime.online.store")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "alembic", None)
    with pytest.raises(RuntimeUnavailable, match=r"\[online\]"):
        from_feedback(sample.BUNDLE, path)
