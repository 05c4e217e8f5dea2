"""The report: one page that fetches nothing, says what metrics.json says, and survives any name and any data."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from made_records import made_up
from offramp.runtime import metrics
from offramp.runtime.jobs import AbstainRisk, Budget, Guarantee, MaxDrop, MaxMs, calibrate
from offramp.runtime.jobs.calibrating.report.page import report_files
from offramp.runtime.jobs.data.expected import expected
from pages import BROWSER, Page, laid_out

ODD = "<b>$x_1$ & “ünï” 中文"


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "o"
    outside = made_up(rows=300, seed=9)
    outside = replace(outside, truth=np.full(300, -1))
    return calibrate(
        None,
        made_up(rows=2000, sharp=2.0),
        targets=[Budget(0.5, ODD), MaxDrop(0.02), MaxMs(3.5), Guarantee(0.03)],
        abstain=[AbstainRisk(0.1)],
        times=[1.0, 2.0, 3.0, 4.0],
        shifts={"outside": outside, "again": made_up(rows=500, seed=5)},
        subgroup=("half", np.arange(2000) % 2),
        out=out,
        command="offramp calibrate --x <&>",
    )


@pytest.fixture(scope="module")
def found(result):
    return json.loads(result.files["metrics.json"])


@pytest.fixture(scope="module")
def text(result):
    return result.files["report.html"].decode()


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_the_page_is_self_contained_and_escaped(text, page):
    assert "<b>$x" not in text
    assert "&lt;b&gt;$x_1$ &amp; “ünï” 中文" in text
    assert "offramp calibrate --x &lt;&amp;&gt;" in text
    assert not page.unclosed
    links = [value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href", "xlink:href")]
    assert all(link.startswith("#") for link in links)
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in page.tags}
    assert not [key for _, attrs in page.tags for key in attrs if key.startswith("on")]


def test_what_is_asked_first_comes_first_and_the_rest_is_folded(page, found):
    visible = ["Operating points", "Cost and accuracy", "What is promised", "What is estimated, not promised"]
    first = [heading for heading in page.headings[1:] if heading != "Targets that can't be kept"]
    assert first[: len(visible) + 1] == [*visible[:3], "Certify against test", visible[3]]
    for heading in ("Rules and counts", "Can confidence be trusted?", "Classes and mistakes", "Under shift"):
        assert heading in page.headings
    for heading in (
        "Exits, each on all test rows",
        f"Calibrators that were tried ({len(found['tried'])})",
        "Subgroups",
        "Where this comes from",
        "Glossary",
    ):
        assert heading in page.headings
    folded = [attrs for tag, attrs in page.tags if tag == "details"]
    assert len(folded) >= 6
    assert not any("open" in attrs for attrs in folded)
    words = " ".join(page.text)
    for said in (found["sentences"][found["headline"]], found["joint"]["sentence"], found["machine"]["cpu"]):
        assert said in words
    assert "n/a" not in words
    assert "by chance" not in words


def test_there_are_captions_and_terms_that_lead_somewhere(page):
    assert sum(tag == "figure" for tag, _ in page.tags) == sum(tag == "figcaption" for tag, _ in page.tags) >= 9
    boxes = {attrs["viewbox"] for tag, attrs in page.tags if tag == "svg"}
    assert len(boxes) == 1, "all of one size"
    targets = {attrs["popovertarget"] for _, attrs in page.tags if "popovertarget" in attrs}
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert targets
    assert targets <= set(ids)
    assert all(ids.count(target) == 1 for target in targets)


def test_the_tables_say_what_the_numbers_are(page, found):
    for shown, line in zip(page.table("point", "accuracy"), found["operating_points"], strict=True):
        assert shown["point"] == line["point"]
        assert shown["accuracy"].startswith(f"{line['accuracy']:.2%} [")
        assert shown["ms a row"].startswith(f"{line['ms']:.4g} [")
    promises = page.table("point", "promise", "at most", "held", "seen in test", "δ")
    for shown, line in zip(promises, found["promises"], strict=True):
        assert shown["held"] == {True: "yes", False: "no", None: "not shown"}[line["held"]]
        counted = "errors" if line["errors"] is not None else "lost"
        assert shown["certified by"].startswith(f"{line[counted]} {counted.rstrip('s')}")
        assert shown["rules tried"] == str(line["tested"])
    assert {line["promise"] for line in found["promises"]} == {"risk among the answered", "accuracy drop"}
    assert [line["estimate"] for line in found["estimates"]] == ["FLOPs", "accuracy drop", "milliseconds a row"]
    assert page.table("point", "estimate", "at most")[2]["at most"] == "3.5"


def test_the_numbers_are_those_of_the_test_rows(result, found):
    test = result.test
    assert found["schema"] == "offramp-metrics/2"
    for j, line in enumerate(found["exits"]):
        assert line["accuracy"] == pytest.approx(float(test.correct[j].mean()))
        assert line["aurc"] == pytest.approx(metrics.aurc(test.score[j], ~test.correct[j]))
    assert found["exits"][-1]["eefp"] is None
    first = next(line for line in found["exits_at_points"] if line["point"] == "full")
    assert first["exit"] == 3
    assert first["reached_by"] == len(test)
    assert first["n_confce_corr"] < first["n_confce_corr_before"]
    best = metrics.oracle(test.correct, test.flops)
    assert found["oracle"]["accuracy"] == pytest.approx(best.accuracy)
    assert sum(line["rows"] for line in found["subgroups"] if line["point"] == "full") == len(test)
    assert found["provenance"]["fingerprint"] == result.provenance["fingerprint"]
    assert set(found["provenance"]["split"]) == {"fit", "select", "certify", "test"}
    assert found["times"] == "given"
    assert found["model"] == {"name": None, "version": None, "exits": 4, "classes": 5}


def test_counts_are_what_the_shares_are_made_of(result, found):
    for line, counts in zip(found["operating_points"], found["counts"], strict=True):
        n = counts["rows"]
        assert n == counts["right"] + counts["wrong"] == counts["answered"] + counts["abstained"] == len(result.test)
        assert n == sum(counts[f"left_at_exit_{j}"] for j in range(4))
        assert line["accuracy"] == pytest.approx(counts["right"] / n)
        assert line["risk"] == pytest.approx(counts["errors_answered"] / counts["answered"])
        assert line["drop"] == pytest.approx((counts["lost"] - counts["gained"]) / n)


def test_thresholds_are_those_in_force(result, found):
    for line in found["thresholds"]:
        point = result.calibration.points[line["point"]]
        assert [float(line[f"exit_{j}"]) for j in range(4)] == list(point.thresholds)
        assert float(line["abstain_below"]) == point.abstain_below


def test_milliseconds_are_the_time_models(result, found):
    times = result.chosen.chooser.times
    for line in found["operating_points"]:
        thresholds = result.calibration.points[line["point"]].thresholds
        assert line["ms"] == pytest.approx(times.ms(result.test.score, thresholds))
        assert line["ms_fraction"] == pytest.approx(line["ms"] / 4.0)
        assert line["ms_low"] <= line["ms"] <= line["ms_high"]


def test_classes_and_mistakes_are_counted_right(result, found):
    test, outcome = result.test, {line["point"]: line for line in found["counts"]}
    assert sum(line["rows"] for line in found["classes"]) == len(test)
    assert sum(line["labelled"] for line in found["classes"]) == 2000
    assert sum(line["right"] for line in found["classes"]) == outcome[found["headline"]]["right"]
    mistakes = found["confident_mistakes"]
    assert len(mistakes) == 20
    assert [m["confidence"] for m in mistakes] == sorted((m["confidence"] for m in mistakes), reverse=True)
    recorded = made_up(rows=2000, sharp=2.0)
    for one in mistakes:
        assert one["row"] in test.rows
        assert one["label"] == str(recorded.truth[one["row"]]) != one["answer"]
        assert one["answer"] == str(recorded.label[one["exit"], one["row"]])
        assert one["full_answer"] == str(recorded.label[-1, one["row"]])


def test_reliability_has_rows_and_a_band_in_every_bin(found, result):
    after = next(line for line in found["reliability"] if line["when"] == "after")
    assert sum(one["rows"] for one in after["bins"]) == after["rows"] == len(result.test)
    for one in after["bins"]:
        right = round(one["accuracy"] * one["rows"])
        assert (one["accuracy_low"], one["accuracy_high"]) == metrics.share_interval(right, one["rows"])


def test_out_of_scope_rows_count_as_errors_and_promises_say_how_far_they_are_exceeded(result):
    lines = {(line["shift"], line["point"]): line for line in result.shifts}
    outside, again = lines["outside", "full"], lines["again", "full"]
    assert outside["out_of_scope"] == outside["rows"] == 300
    assert outside["accuracy"] is None
    assert outside["risk"] == 1.0
    assert outside["protocol"] == "new-class"
    assert 0 < outside["risk_mixed_with_test"] < 1
    assert again["protocol"] == "same classes"
    broken = next(p for p in result.shift_promises if p["shift"] == "outside" and p["point"] == "full")
    assert broken["held"] is False
    assert broken["excess"] == pytest.approx(0.9)
    assert {line["estimate"] for line in result.shift_estimates} == {"FLOPs", "accuracy drop", "milliseconds a row"}


def test_tables_are_flat(result):
    tables = (result.points, result.promises, result.estimates, result.tried, result.shifts, result.shift_promises)
    for table in tables:
        assert table
        for line in table:
            assert all(value is None or isinstance(value, str | int | float | bool) for value in line.values()), line


def right(records):
    return replace(records, truth=np.asarray(records.label[-1]))


EDGES = {
    "one exit": made_up(rows=200, exits=1),
    "one class": made_up(rows=200, classes=1),
    "one label": replace(made_up(rows=200), truth=np.zeros(200, np.int64)),
    "no error": right(made_up(rows=200)),
    "many classes": made_up(rows=1200, exits=2, classes=1000),
}


@pytest.mark.parametrize("records", EDGES.values(), ids=EDGES)
def test_any_data_makes_a_page(records, tmp_path):
    targets = [Budget(1.0, "b"), Guarantee(0.3, name="g")]
    result = calibrate(None, records, targets=targets, calibrators="none", out=tmp_path / "o", dry_run=True, force=True)
    text = result.files["report.html"].decode()
    assert not Page(text).unclosed
    assert not re.search(r"\bnan\b|\bNone\b(?!:)", " ".join(Page(text).text))
    assert json.loads(result.files["metrics.json"])["model"]["classes"] == records.logits[0].shape[1]


def test_without_a_test_row_nothing_is_drawn_and_nothing_is_shown(result):
    split = replace(result.rows.split, test=np.arange(0))
    rows = replace(result.rows, split=split)
    points = {name: replace(p, expected=expected(rows.test, p)) for name, p in result.chosen.points.items()}
    empty = replace(
        result,
        rows=rows,
        chosen=replace(result.chosen, points=points),
        calibration=replace(result.calibration, points=points),
    )
    files = report_files(empty)
    page = Page(files["report.html"].decode())
    words = " ".join(page.text)
    assert not page.unclosed
    assert "No row was kept to measure it on." in words
    assert "Not drawn: Accuracy against FLOPs: there is no test row" in words
    assert {row["held"] for row in page.table("point", "promise", "at most", "held", "seen in test", "δ")} == {
        "not shown"
    }
    assert not re.search(r"\bnan\b|\bNone\b(?!:)", words)
    assert json.loads(files["metrics.json"])["confident_mistakes"] == []


def test_forty_points_make_a_page_that_is_not_forty_times_as_long(tmp_path):
    targets = [Budget(0.3 + k / 100, f"point {k} with quite a long name, of which many begin alike") for k in range(40)]
    result = calibrate(None, made_up(rows=600), targets=targets, calibrators="none", out=tmp_path / "o")
    page = Page(result.files["report.html"].decode())
    assert len(page.table("point", "accuracy")) == 41
    assert sum(tag == "figure" for tag, _ in page.tags) < 15
    assert "33 more points are in the tables only" in " ".join(page.text)


def test_a_refused_or_kept_calibration_says_so_on_top(result):
    refused = replace(result, comparison=replace(result.comparison, refused=("b: accuracy falls",)))
    page = Page(report_files(refused)["report.html"].decode())
    assert page.headings[1] == "This calibration was refused"


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_sticks_out_on_a_telephone_or_a_screen(text, width, tmp_path):
    found = laid_out(text, width, tmp_path)
    assert found["width"] <= width
    assert found["out"] == []
    assert len(set(found["drawings"])) == 1, "all of one size"
    if width == 390:
        assert found["scrolling"], "wide tables scroll by themselves"
