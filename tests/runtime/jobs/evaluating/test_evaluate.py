"""Evaluating: figures are those of the rule that serves, a broken promise is exit code 3, and odd data says so."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_records import made_up, saved
from offramp.export import export_bundle
from offramp.runtime import Cascade, InputError, OperatingPoint, metrics, sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.calibration_file import Calibration, write_calibration
from offramp.runtime.cli import main
from offramp.runtime.jobs import calibrate, evaluate, record
from offramp.runtime.jobs.data.labelled_rows import labelled_rows, outcome_of
from offramp.runtime.jobs.evaluating.classes import by_class, worst
from offramp.runtime.jobs.evaluating.describe import describe, verdict
from offramp.runtime.points import full
from offramp.runtime.records import read_records
from toys import Plain, make

IMAGES, LABELS = sample.heldout()


def data(folder, labels=LABELS, images=IMAGES):
    path = folder / "data.npz"
    np.savez(path, x=images, **({} if labels is None else {"labels": labels}))
    return path


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    with Cascade.load(sample.BUNDLE) as cascade:
        return record(cascade, data(folder), folder / "r")


def with_points(folder, *points, bundle=sample.BUNDLE):
    """A copy of a bundle with these points in force."""
    copy = shutil.copytree(bundle, folder / "bundle")
    manifest = read_bundle(copy).manifest
    every = {point.name: point for point in (full(len(manifest.exits)), *points)}
    write_calibration(copy, manifest, Calibration(every, 1), created="", producer="a test")
    return copy


def promising(**provenance):
    return OperatingPoint((2.0, 2.0, -math.inf), name="promising", provenance=provenance)


RISK = {"abstention": {"risk": 0.05, "delta": 0.1, "feasible": True}}


def test_data_and_its_records_give_the_same_figures_as_serving(tmp_path, records):
    by_data, by_records = evaluate(sample.BUNDLE, data(tmp_path)), evaluate(sample.BUNDLE, records)
    assert (by_data.source, by_records.source) == ("data", "records")
    assert "run once" in by_data.how
    assert "nothing was run" in by_records.how
    with Cascade.load(sample.BUNDLE) as cascade:
        for one, other in zip(by_data.points, by_records.points, strict=True):
            out = cascade.at(one["point"]).predict({"x": IMAGES})
            right = out.label == LABELS
            for line in (one, other):
                assert line["accuracy"] == right.mean()
                assert line["coverage"] == (~out.abstain).mean()
                assert line["risk"] == (~right[~out.abstain]).mean()
                assert line["flops"] == out.flops.mean()
                assert line["accuracy_low"] < line["accuracy"] < line["accuracy_high"]
    assert by_data.classes == by_records.classes


def test_classes_are_counted_as_a_loop_would(records):
    rows = labelled_rows(read_records(records))
    with Cascade.load(sample.BUNDLE) as cascade:
        outcome = outcome_of(rows, cascade.calibration.point("fast"))
    lines = by_class(rows, outcome, [f"c{k}" for k in range(10)])
    assert [line["name"] for line in lines] == [f"c{k}" for k in range(10)]
    for k, line in enumerate(lines):
        mine = rows.truth == k
        right, kept = outcome.label[mine] == k, ~outcome.abstain[mine]
        assert (line["rows"], line["right"]) == (mine.sum(), right.sum())
        assert line["coverage"] == kept.mean()
        assert line["risk"] == (~right[kept]).mean()
        assert line["flops_fraction"] == outcome.flops[mine].sum() / rows.flops[-1][mine].sum()
        assert (line["accuracy_low"], line["accuracy_high"]) == metrics.share_interval(line["right"], line["rows"])
        assert line["answered_so"] == (outcome.label == k).sum()
    order = worst(lines, 3)
    assert len(order) == 3
    assert order[0]["accuracy"] == min(line["accuracy"] for line in lines)


@pytest.mark.parametrize(
    ("labels", "provenance", "code"),
    [
        (LABELS, RISK, 0),
        ((LABELS + 1) % 10, RISK, 3),
        ((LABELS + 1) % 10, {}, 0),  # nothing is promised
        ((LABELS + 1) % 10, {"target": {"share": 0.0001}}, 0),  # an estimate never decides
        ((LABELS + 1) % 10, {"abstention": {"risk": 0.05, "delta": 0.1, "feasible": False}}, 0),
    ],
)
def test_only_a_broken_promise_is_exit_code_3(tmp_path, capsys, labels, provenance, code):
    bundle = with_points(tmp_path, promising(**provenance))
    assert main(["evaluate", str(bundle), str(data(tmp_path, labels))]) == code
    out, err = capsys.readouterr()
    assert ("1 of 1 promises broken" in err) == bool(code)
    assert ("estimates, which nobody promised" in out) == ("target" in provenance)


def test_points_are_chosen_by_name_and_an_unknown_one_is_refused(tmp_path, records, capsys):
    found = evaluate(sample.BUNDLE, records, points=["fast", "full", "fast"])
    assert [line["point"] for line in found.points] == ["fast", "full"]
    assert main(["evaluate", str(sample.BUNDLE), str(records), "--operating-point", "warp"]) == 2
    assert "operating_point is 'warp'" in capsys.readouterr().err


def test_without_labels_the_error_says_what_was_expected(tmp_path):
    with pytest.raises(InputError, match=r"data\.npz: has no `labels`.*Expected a column `labels`.*-1 where unknown"):
        evaluate(sample.BUNDLE, data(tmp_path, None))
    with pytest.raises(InputError, match="none of its 497 rows has a label"):
        evaluate(sample.BUNDLE, data(tmp_path, np.full(497, -1)))
    with Cascade.load(sample.BUNDLE) as cascade:
        bare = record(cascade, data(tmp_path, None), tmp_path / "r")
    with pytest.raises(InputError, match=r"has no `labels`.*Expected records of labelled rows"):
        evaluate(sample.BUNDLE, bare)


def test_records_of_another_bundle_and_what_is_not_there_are_exit_code_2(tmp_path, capsys):
    other = saved(made_up(exits=3, classes=10), tmp_path / "r", manifest="0" * 64)
    assert main(["evaluate", str(sample.BUNDLE), str(other)]) == 2
    assert "recorded from another bundle" in capsys.readouterr().err
    assert main(["evaluate", str(sample.BUNDLE), str(tmp_path / "nowhere.npz")]) == 2
    assert "nowhere.npz: no such file or folder" in capsys.readouterr().err


def test_rows_without_a_label_are_in_no_figure_but_said(tmp_path, records):
    labels = LABELS.copy()
    labels[:100] = -1
    found = evaluate(sample.BUNDLE, data(tmp_path, labels))
    kept = evaluate(sample.BUNDLE, data(tmp_path, LABELS[100:], IMAGES[100:]))
    assert (found.rows, found.unlabelled) == (397, 100)
    assert [line["accuracy"] for line in found.points] == [line["accuracy"] for line in kept.points]
    assert all(0 <= line["unlabelled_abstained"] <= 1 for line in found.points)
    assert found.notes[0].startswith("100 rows have no label (-1) and are in none of the figures; abstained on: full ")


def test_one_class_is_measured_and_said(tmp_path):
    sevens = LABELS == 7
    found = evaluate(sample.BUNDLE, data(tmp_path, LABELS[sevens], IMAGES[sevens]))
    assert {line["class"] for line in found.classes} == {7}
    assert any("every row has the same label" in note for note in found.notes)


def test_a_single_row_is_enough(tmp_path):
    found = evaluate(sample.BUNDLE, data(tmp_path, LABELS[:1], IMAGES[:1]))
    assert found.points[0]["accuracy_low"] < 0.03
    assert describe(found)


NAMES = [f"Klasse {k} – 猫" for k in range(999)] + ["a\nb"]


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    """A bundle of 1,000 classes, never calibrated."""
    model = make(Plain, 8, 1000, 2)
    inputs, axes = {"x": torch.zeros(2, 8)}, {"x": {0: "batch"}}
    return export_bundle(model, inputs, tmp_path_factory.mktemp("t") / "bundle", dynamic_axes=axes, classes=NAMES)


def test_a_thousand_classes_show_the_worst_fifteen_and_keep_all_in_json(thousand, tmp_path, capsys):
    rng = np.random.default_rng(0)
    labels = np.arange(1000)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(1000, 8)).astype(np.float32), labels=labels)
    assert main(["evaluate", str(thousand), str(tmp_path / "d.npz"), "--json", str(tmp_path / "e.json")]) == 0
    out, err = capsys.readouterr()
    assert "not calibrated: there is only `full`" in out
    assert "nothing is promised" in err
    assert "the 15 least accurate of 1,000 classes at full" in out
    assert len(out.split("(--json has all):\n")[1].split("\n\n")[0].splitlines()) == 1 + 15
    assert "猫" in out
    found = json.loads((tmp_path / "e.json").read_text(encoding="utf-8"))
    assert [line["name"] for line in found["classes"]] == NAMES
    assert found["schema"] == "offramp-evaluation/1"
    assert found["operating_points"][0]["point"] == "full"


def test_more_classes_than_rows(thousand, tmp_path):
    np.savez(tmp_path / "d.npz", x=np.zeros((3, 8), np.float32), labels=[0, 999, -1])
    found = evaluate(thousand, tmp_path / "d.npz")
    assert [line["class"] for line in found.classes] == [0, 999]
    assert "a\\nb" in describe(found)
    assert any("2 of the 1,000 classes occur" in note for note in found.notes)


def test_json_on_stdout_is_all_that_is_there(records, capsys):
    assert main(["evaluate", str(sample.BUNDLE), str(records), "--json"]) == 0
    out, _ = capsys.readouterr()
    found = json.loads(out)
    assert found["broken"] == 0
    assert {line["point"] for line in found["classes"]} == {"full", "balanced", "fast"}


def test_rows_that_were_calibrated_on_are_counted(tmp_path, records):
    bundle = shutil.copytree(sample.BUNDLE, tmp_path / "b")
    result = calibrate(bundle, records, replace=True)
    found = evaluate(bundle, records)
    assert any(f"{len(result.rows.made_from)} of the 497 rows were calibrated on" in note for note in found.notes)


def test_figures_apart_from_calibrations_are_named(tmp_path):
    point = replace(
        promising(),
        expected={"rows": 100, "accuracy": 0.5, "intervals": {"accuracy": (0.4, 0.6)}},
    )
    found = evaluate(with_points(tmp_path, point), data(tmp_path))
    (note,) = [note for note in found.notes if "apart" in note]
    assert note.startswith("promising: accuracy of 99.")
    assert "50.00% [40.00%, 60.00%] measured at calibration" in note
    assert "at calibration:" in describe(found)


def test_the_verdict_counts_what_is_shown(tmp_path):
    found = evaluate(with_points(tmp_path, promising(**RISK)), data(tmp_path))
    assert verdict(found) == "no promise is shown broken: 1 of 1 shown kept, 0 neither"


def test_predict_says_the_accuracy_where_there_are_labels(tmp_path, capsys):
    labels = LABELS.copy()
    labels[:7] = -1
    assert main(["predict", str(sample.BUNDLE), str(data(tmp_path, labels))]) == 0
    err = capsys.readouterr().err
    with Cascade.load(sample.BUNDLE) as cascade:
        right = cascade.predict({"x": IMAGES}).label[7:] == LABELS[7:]
    assert f"; accuracy {right.mean():.2%} on 490 labelled rows" in err
    assert main(["predict", str(sample.BUNDLE), str(data(tmp_path, None))]) == 0
    assert "accuracy" not in capsys.readouterr().err
