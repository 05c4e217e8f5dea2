"""A point in one sentence, and which point comes first."""

import pytest
from offramp.runtime.jobs.calibrating.report.headline import headline, sentence

LINE = {
    "point": "fast", "rows": 825, "accuracy": 0.972, "drop": 0.003, "drop_low": 0.001, "drop_high": 0.006,
    "flops_fraction": 0.247, "ms_fraction": 0.31, "coverage": 0.96, "risk": 0.011,
}  # fmt: skip
RISK = {"point": "fast", "promise": "risk among the answered", "target": 0.02, "delta": 0.05, "held": True}


def test_the_sentence_is_the_one_that_was_asked_for():
    assert sentence(LINE, [RISK]) == (
        "Costs 24.7% of the FLOPs and 0.31 of the time for 0.3 points less accuracy; answers 96% of rows with an error "
        "of at most 2%, at 95% confidence."
    )


@pytest.mark.parametrize(
    ("changed", "promises", "said"),
    [
        (
            {"drop": -0.0012, "drop_low": -0.007, "drop_high": 0.004},
            [RISK],
            "for 0.1 points more accuracy (within noise);",
        ),
        ({"drop": 0.0, "drop_low": -0.004, "drop_high": 0.004}, [RISK], "for the same accuracy;"),
        ({"ms_fraction": None}, [RISK], "Costs 24.7% of the FLOPs for"),
        ({"coverage": 1.0}, [RISK], "answers every row with an error of at most 2%"),
        ({"coverage": 0.9996}, [RISK], "answers 99.9% of rows"),
        ({}, [], "answers 96% of rows, 1.1% of them wrongly; no error is promised."),
        ({"risk": None, "coverage": 0.0}, [], "answers 0% of rows; no error is promised."),
        ({}, [{**RISK, "point": "other"}], "no error is promised"),
        ({"flops_fraction": 1.0, "ms_fraction": 1.0, "drop": 0.0}, [RISK], "for an accuracy of 97.2%;"),
        ({"rows": 0, "flops_fraction": None}, [RISK], "No row was kept to measure it on."),
    ],
)
def test_each_part_says_what_is_so(changed, promises, said):
    assert said in sentence(LINE | changed, promises)


def test_the_cheapest_comes_first_that_is_asked_about_accuracy_and_not_shown_broken():
    points = [
        {"point": name, "flops_fraction": cost} for name, cost in (("full", 1.0), ("a", 0.2), ("b", 0.4), ("c", 0.5))
    ]
    dropped = [{"point": name, "estimate": "accuracy drop", "within": None} for name in ("b", "c")]
    assert headline(points[:1], [], []) == "full"
    assert headline(points, [], []) == "a"
    assert headline(points, [], dropped) == "b"
    broken = [{"point": "b", "promise": "risk among the answered", "held": False}]
    assert headline(points, broken, dropped) == "c"
    assert headline([{**p, "flops_fraction": None} for p in points], [], []) == "a", "without a test row"
