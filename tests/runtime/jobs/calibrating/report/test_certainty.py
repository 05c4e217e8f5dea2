"""All promises at once, and whether the test rows gainsay what they take for granted."""

import numpy as np
import pytest
from made_rows import made_rows
from offramp.runtime.jobs.calibrating.report.certainty import certify_against_test, joint
from offramp.runtime.jobs.data.splits import SplitRows, split_labelled
from scipy import stats


def test_together_promises_hold_with_what_their_deltas_leave():
    deltas = [{"delta": 0.05}, {"delta": 0.01}]
    found = joint(deltas)
    assert found["together"] == pytest.approx(0.94)
    assert "all together they hold with probability 0.94 at least (1 − Σδ)" in found["sentence"]
    assert joint(deltas[:1])["sentence"] == "There is one promise, which holds with probability 0.95 at least."
    assert joint([])["sentence"].startswith("Nothing is promised")
    many = joint([{"delta": 0.05}] * 40)
    assert many["together"] is None
    assert "add up to 2" in many["sentence"]


def test_looks_at_the_same_rows_count():
    assert joint([{"delta": 0.05}], looks=3)["together"] == pytest.approx(0.85)
    assert "after 3 looks at these rows" in joint([{"delta": 0.05}], looks=3)["sentence"]


def risk(errors, answered):
    return {"point": "p", "promise": "risk among the answered", "errors": errors, "answered": answered}


def counted(errors, answered):
    return {"point": "p", "errors_answered": errors, "answered": answered, "lost": 0, "rows": answered}


def test_what_differs_beyond_chance_is_named_and_what_does_not_is_no_proof():
    rows = split_labelled(made_rows(1200, seed=2), 0)
    same = certify_against_test([risk(9, 300)], [counted(12, 310)], rows)
    assert not same["differs"]
    assert "no sign against it: 2 comparisons" in same["sentence"]
    _, errors = same["tests"]
    assert errors["p_value"] == pytest.approx(stats.fisher_exact([[9, 291], [12, 298]]).pvalue)
    assert (errors["certify"], errors["certify_rows"], errors["test"], errors["test_rows"]) == (9, 300, 12, 310)
    assert errors["p_holm"] >= errors["p_value"]
    other = certify_against_test([risk(3, 300)], [counted(40, 310)], rows)
    assert other["differs"]
    assert "errors among the answered of p (p = " in other["sentence"]
    lost = {"point": "p", "promise": "accuracy drop", "lost": 1, "rows": 330}
    moved = certify_against_test([lost], [counted(0, 310) | {"lost": 30, "rows": 330}], rows)
    assert "rows lost to leaving early of p" in moved["sentence"]


def test_other_labels_are_seen():
    made = made_rows(1200, seed=2)
    split = split_labelled(made, 0)
    order = np.argsort(made.truth, kind="stable")
    parts = type(split.split)(order[:300], order[300:500], np.sort(order[500:850]), np.sort(order[850:]))
    found = certify_against_test([], [], SplitRows(made, made, parts))
    assert found["differs"]
    assert "labels (p = " in found["sentence"]


def test_without_rows_nothing_is_compared():
    rows = split_labelled(made_rows(1200, seed=2), 0)
    empty = SplitRows(rows.everything, rows.labelled, type(rows.split)(*(np.arange(0),) * 4))
    assert certify_against_test([risk(0, 0)], [counted(0, 0)], empty)["sentence"].startswith("There are too few rows")
