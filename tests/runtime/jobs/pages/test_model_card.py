"""A bundle says in words what it is; sections are replaced, what people wrote stays."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from offramp.runtime import Cascade, OperatingPoint, sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.calibration_file import Calibration
from offramp.runtime.jobs import calibrate, promote, repack
from offramp.runtime.jobs.calibrating.card import promises_of
from offramp.runtime.jobs.pages.model_card import CARD, DATA, PROMISES, model_card, put_section, read_card, section
from offramp.runtime.jobs.recording.record import record

DOCUMENT = {
    "name": "net",
    "version": "2",
    "producer": "offramp 1",
    "created": "2026-01-01",
    "classes": [f"c{k}" for k in range(30)],
    "inputs": [{"name": "ids", "dtype": "int64", "shape": ["batch", "seq"]}],
    "blocks": [{"flops": "batch*(10*seq)", "params": 1200}, {"flops": "batch*(20*seq)", "params": 3}],
    "exits": [{"name": "early"}, {"name": "late"}],
    "rows_independent": True,
    "verified": {"sizes": [{"batch": 3, "seq": 8}], "max_difference": 1.5e-7, "against": "torch"},
}


@pytest.fixture
def bundle(tmp_path):
    """The sample's digits, with a card."""
    folder = Path(shutil.copytree(sample.BUNDLE, tmp_path / "digits"))
    (folder / "calibration.json").unlink()
    (folder / CARD).write_text(model_card(json.loads((folder / "manifest.json").read_text())), encoding="utf-8")
    return folder


def test_a_section_is_what_stands_between_two_headings(bundle):
    assert section(read_card(bundle), PROMISES) == "None until `offramp calibrate` has chosen thresholds."
    assert "| exit_2 |" in section(read_card(bundle), "Architecture")
    assert section(read_card(bundle), "Nothing") is None


@pytest.mark.parametrize("heading", [PROMISES, DATA])
def test_a_section_is_replaced_and_the_others_stay(bundle, heading):
    before = {h: section(read_card(bundle), h) for h in ("Architecture", "What was verified", PROMISES, DATA)}
    put_section(bundle, heading, ["größer", "", "- new"])
    put_section(bundle, heading, ["größer", "", "- newer"])
    after = {h: section(read_card(bundle), h) for h in before}
    assert after == before | {heading: "größer\n\n- newer"}


@pytest.mark.parametrize("text", ["# Mine\n", "", None])
def test_a_card_of_another_kind_or_none_is_left_alone(bundle, text):
    (bundle / CARD).unlink() if text is None else (bundle / CARD).write_text(text)
    put_section(bundle, PROMISES, "new")
    assert read_card(bundle) == text


def test_a_card_that_is_no_text_is_left_alone(bundle):
    (bundle / CARD).write_bytes(b"\xff\xfe## Promises")
    put_section(bundle, PROMISES, "new")
    assert (bundle / CARD).read_bytes() == b"\xff\xfe## Promises"


def test_calibrate_and_promote_say_what_is_in_force(bundle, tmp_path):
    put_section(bundle, DATA, "Digits of 43 people.")
    x, labels = sample.heldout()
    np.savez(tmp_path / "d.npz", x=x, labels=labels)
    with Cascade.load(bundle) as cascade:
        records = record(cascade, tmp_path / "d.npz", tmp_path / "records")
    first = calibrate(bundle, records).calibration
    said = section(read_card(bundle), PROMISES)
    assert said.startswith("Calibration 1, of ")
    assert all(f"- **{name}**: " in said for name in first.points)
    calibrate(bundle, records, seed=1, force=True)
    assert section(read_card(bundle), PROMISES).startswith("Calibration 2, of ")
    promote(bundle, 1)
    assert section(read_card(bundle), PROMISES) == said
    assert section(read_card(bundle), DATA) == "Digits of 43 people."


def test_what_cannot_be_read_of_a_point_is_said_and_stops_nothing():
    odd = OperatingPoint((0.0, -math.inf), name="odd", provenance={"abstention": "yes", "target": 3})
    wrong = OperatingPoint((0.0, -math.inf), name="wrong", expected={"rows": "many", "accuracy": 0.5, "drop": "?"})
    whole = OperatingPoint((math.inf, -math.inf), name="full")
    lines = promises_of(Calibration({"full": whole, "odd": odd, "wrong": wrong}))
    assert lines[2:4] == [
        "- **full**: No row was kept to measure it on.",
        "- **odd**: What it was measured to do can't be read.",
    ]
    assert lines[4].startswith("- **wrong**: ")


def test_repack_keeps_what_people_wrote_and_tells_the_new_exits(bundle, tmp_path):
    put_section(bundle, DATA, "Digits of 43 people.")
    card = read_card(repack(bundle, tmp_path / "fewer", [1]))
    assert section(card, DATA) == "Digits of 43 people."
    assert "| exit_1 |" in section(card, "Architecture")
    assert "| exit_0 |" not in section(card, "Architecture")
    assert len(read_bundle(tmp_path / "fewer").manifest.exits) == 2
    (bundle / CARD).write_text("# Mine")
    assert not (repack(bundle, tmp_path / "other", [1]) / CARD).exists()


def test_it_says_what_a_row_costs_at_each_exit_and_what_was_verified():
    card = model_card(DOCUMENT)
    assert card.startswith("# net 2\n")
    assert "| exit | weights its block uses | FLOPs of a row that leaves there (seq 8) |" in card
    assert "| early | 1,200 | 80 |\n| late | 3 | 240 |" in card
    assert "- `ids`: int64 [batch, seq]" in card
    assert "logits differ by at most 1.5e-07" in card
    assert "A row's answer doesn't depend on the rows beside it." in card
    assert "c19, …" in card


def test_it_promises_nothing_and_leaves_the_licence_to_its_maker():
    card = model_card({**DOCUMENT, "rows_independent": False})
    assert "A row's answer depends on the rows beside it." in card
    assert "None until `offramp calibrate` has chosen thresholds" in card
    assert "Not told at export" in card
