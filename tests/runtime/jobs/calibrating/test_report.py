"""The report: one page that fetches nothing, says what metrics.json says, and survives any name."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from made_records import made_up
from offramp.runtime import metrics
from offramp.runtime.jobs import AbstainRisk, Budget, MaxDrop, calibrate

ODD = "<b>$x_1$ & “ünï” 中文"


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "o"
    outside = made_up(rows=300, seed=9)
    outside = replace(outside, truth=np.full(300, -1))
    return calibrate(
        None,
        made_up(rows=2000, sharp=2.0),
        targets=[Budget(0.5, ODD), MaxDrop(0.02)],
        abstain=[AbstainRisk(0.1)],
        shifts={"outside": outside, "again": made_up(rows=500, seed=5)},
        subgroup=("half", np.arange(2000) % 2),
        out=out,
        command="offramp calibrate --x <&>",
    )


def test_the_page_is_self_contained_and_escaped(result):
    page = (result.written / "report.html").read_text()
    assert "<b>$x" not in page
    assert "&lt;b&gt;$x_1$ &amp; “ünï” 中文" in page
    assert "offramp calibrate --x &lt;&amp;&gt;" in page
    assert not re.search(r"(?:src|href)=['\"](?!data:)", page)
    assert "<script" not in page
    assert page.count("data:image/svg+xml;base64,") >= 8
    for heading in ("Operating points", "Promises", "Calibrators that were tried", "Under shift", "Subgroups"):
        assert heading in page


def test_the_numbers_are_those_of_the_test_rows(result):
    found = json.loads((result.written / "metrics.json").read_text())
    test = result.test
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


def test_tables_are_flat(result):
    for table in (result.points, result.promises, result.tried, result.shifts, result.shift_promises):
        assert table
        for line in table:
            assert all(value is None or isinstance(value, str | int | float | bool) for value in line.values()), line
