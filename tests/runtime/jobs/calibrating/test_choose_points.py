"""From targets to operating points: `full` first, each with its own figures, abstention and complaints."""

import math
from dataclasses import replace

import numpy as np
import pytest
from made_rows import made_rows
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.calibrating.choose_points import Asked, choose_points
from offramp.runtime.jobs.calibrating.chooser import Chooser
from offramp.runtime.jobs.calibrating.targets import AbstainRisk, Budget, Guarantee, MaxDrop
from offramp.runtime.jobs.data.expected import expected
from offramp.runtime.jobs.data.labelled_rows import outcome_of
from offramp.runtime.jobs.data.splits import SplitRows, split_labelled
from offramp.runtime.points import full


@pytest.fixture(scope="module")
def rows():
    return made_rows(1200, seed=2)


def chosen(rows, seed=0, progress=None, **options):
    parts = split_labelled(rows, seed)
    return parts, choose_points(parts, Asked(seed=seed, **options), progress=progress)


def test_points_come_in_the_order_asked_for_each_followed_by_its_further_risks(rows):
    targets = [Budget(0.6, "z"), Budget(0.4, "a")]
    risks = [AbstainRisk(0.1), AbstainRisk(0.05), AbstainRisk(0.02)]
    points = chosen(rows, targets=targets, abstain=risks)[1].points
    assert list(points)[:3] == ["full", "z", "a"]
    assert set(list(points)[3:]) == {f"{p}-risk-{r}" for p in ("full", "z", "a") for r in ("5%", "2%")}
    for name, point in points.items():
        assert point.name == name
        assert point.thresholds == points[name.partition("-")[0]].thresholds
        assert point.provenance["abstention"]["risk"] == (
            float(name.rpartition("-")[2][:-1]) / 100 if "-risk-" in name else 0.1
        )


def test_thresholds_are_those_of_the_chooser_on_the_proposing_rows_alone(rows):
    parts, found = chosen(rows, targets=[Budget(0.5, "half")], abstain=[])
    again, points = Chooser.of(parts.propose, parts.certify), found.points
    assert found.chooser.rules == again.rules
    assert points["half"].thresholds == again.choose(Budget(0.5)).thresholds
    assert points["full"].thresholds == full(4).thresholds
    assert points["half"].abstain_below == -math.inf


def test_what_is_expected_is_measured_on_the_test_rows_alone(rows):
    parts, found = chosen(rows, targets=[Budget(0.5, "half")])
    for point in found.points.values():
        assert point.expected == expected(parts.test, point)
        assert point.expected["rows"] == len(parts.split.test)


def test_an_abstention_says_which_certifying_rows_its_bound_rests_on(rows):
    parts, found = chosen(rows, targets=[Budget(0.5, "half")], abstain=[AbstainRisk(0.1)])
    for point in found.points.values():
        outcome, said = outcome_of(parts.certify, point), point.provenance["abstention"]
        wrong = outcome.label != parts.certify.truth
        assert said["answered"] == (~outcome.abstain).sum() > 0
        assert said["errors"] == (wrong & ~outcome.abstain).sum()


def test_rows_of_the_test_decide_nothing(rows):
    asked = {"targets": [Budget(0.5, "half"), Guarantee(0.05, name="sure")]}
    parts, found = chosen(rows, **asked)
    points, test, shuffled = found.points, parts.split.test, rows.truth.copy()
    shuffled[test] = np.random.default_rng(0).permutation(shuffled[test])
    other = replace(rows, truth=shuffled)
    again = choose_points(SplitRows(other, other, parts.split), Asked(**asked)).points
    assert again == points, "thresholds, abstention and calibrators"
    for name, point in points.items():
        assert again[name].expected["accuracy"] < point.expected["accuracy"]


def test_what_cannot_be_kept_is_told_under_the_points_name(rows):
    found = chosen(rows, targets=[Budget(0.1, "tiny")], abstain=[AbstainRisk(0.0001)])[1]
    points, unmet = found.points, found.unmet
    assert [line.partition(": ")[0] for line in unmet] == ["full", "tiny", "tiny"]
    assert points["tiny"].provenance["closest"] in unmet[1]
    assert points["tiny"].abstain_below == -math.inf


def test_what_was_tried_is_told_for_every_point_and_one_is_chosen(rows):
    found = chosen(rows, targets=[Budget(0.5, "half")], calibrators=("identity", "temperature"))[1]
    points, tried = found.points, found.tried
    assert {line["point"] for line in tried} == {"full", "half"}
    for name in points:
        by_exits = {}
        for line in (line for line in tried if line["point"] == name):
            by_exits.setdefault(line["exits"], []).append(line)
        for lines in by_exits.values():
            assert sum(line["chosen"] for line in lines) == 1
            assert {line["calibrator"] for line in lines} == {"identity", "temperature"}


def test_progress_is_told_point_by_point(rows):
    seen = []
    chosen(rows, targets=[Budget(0.5), MaxDrop(0.1)], progress=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": [Budget(0.5, "full")]}, "'full' is taken by the whole network"),
        ({"targets": [Budget(0.5), Budget(0.5)]}, "'budget-50%' is given twice"),
        ({"abstain": [AbstainRisk(0.05), AbstainRisk(0.05, 0.1)]}, "the risk 5% is given twice"),
        (
            {"targets": [Budget(0.5, "full-risk-2%")], "abstain": [AbstainRisk(0.05), AbstainRisk(0.02)]},
            "'full-risk-2%' is also that of a point which a further abstain risk adds",
        ),
    ],
)
def test_names_that_would_meet_are_refused(rows, options, message):
    with pytest.raises(InputError, match=message):
        chosen(rows, **options)
