"""A new calibration is refused for what is worse on rows that made neither, and for nothing else."""

import math
from dataclasses import replace

import numpy as np
import pytest
from made_rows import made_rows
from offramp.runtime import OperatingPoint, calibration, metrics
from offramp.runtime.jobs.calibrating.comparison import LEAST_ROWS, compare_points, refusals
from offramp.runtime.points import full
from offramp.runtime.simulate import simulate

INF = math.inf


def point(*bars, below=-INF, **provenance):
    return OperatingPoint((*bars, -INF), below, "p", provenance=provenance)


def compared(old, new, rows, **options):
    return {line.figure: line for line in compare_points({"p": old}, {"p": new}, rows, **options)}


@pytest.fixture(scope="module")
def rows():
    return made_rows(1500, seed=5)


def test_figures_are_those_of_the_points_on_the_rows(rows):
    old, new = point(3.0, 3.0, 3.0, below=1.0), point(1.0, 2.0, 4.0, below=2.0)
    lines = compared(old, new, rows)
    assert list(lines) == ["accuracy", "flops_fraction", "coverage", "risk", "n·ConfCE^corr"]
    for side, one in (("old", old), ("new", new)):
        outcome = simulate(rows, one)
        right, kept = outcome.label == rows.truth, ~outcome.abstain
        wanted = {
            "accuracy": right.mean(),
            "flops_fraction": outcome.flops.mean() / rows.flops[-1].mean(),
            "coverage": kept.mean(),
            "risk": 1 - right[kept].mean(),
            "n·ConfCE^corr": len(rows) * metrics.confce_corr(outcome.confidence, right),
        }
        assert {figure: getattr(line, side) for figure, line in lines.items()} == pytest.approx(wanted)
    for line in lines.values():
        assert line.difference == pytest.approx(line.new - line.old)
        assert line.low <= line.difference <= line.high or line.figure.startswith("n")
        assert line.rows == len(rows)
        assert line.point == "p"


def worse(old, new, rows):
    return {figure for figure, line in compared(old, new, rows).items() if line.worse}


def test_accuracy_lost_for_nothing_is_worse_and_traded_for_flops_it_is_not(rows):
    half, third = ({"target": {"kind": "budget", "share": share}} for share in (0.5, 0.3))
    careful = point(6.0, 6.0, 6.0, **half)
    assert worse(careful, point(0.0, 0.0, 0.0, **third), rows) == set(), "another target may trade"
    assert worse(careful, point(0.0, 0.0, 0.0, **half), rows) == {"accuracy"}, "the same may not"


def test_accuracy_within_what_the_target_allows_may_be_traded(rows):
    careful = point(6.0, 6.0, 6.0, target={"drop": 0.5})
    for allowed, refused in ((0.5, False), (0.001, True)):
        for kind in ("drop", "epsilon"):
            cheap = point(0.0, 0.0, 0.0, target={kind: allowed})
            assert ("accuracy" in worse(careful, cheap, rows)) == refused


def test_flops_spent_without_accuracy_are_worse(rows):
    first = [np.repeat(one[:1], 4, axis=0) for one in (rows.label, rows.score)]
    same = replace(rows, logits=rows.logits[:1] * 4, label=first[0], score=first[1])  # deeper exits say the same
    assert worse(point(-INF, -INF, -INF), full(4), same) == {"flops_fraction"}
    assert worse(full(4), point(-INF, -INF, -INF), same) == set()


def test_answers_given_up_without_less_risk_are_worse(rows):
    # Confidence turned round: the surest abstain, and the risk doesn't fall.
    kept = point(INF, INF, INF, below=0.0)
    lines = compared(kept, point(INF, INF, INF, below=3.0), rows)
    assert not lines["coverage"].worse, "less is answered, and that is safer"
    assert lines["coverage"].difference < -0.02
    rows = replace(rows, truth=rows.label[-1])  # no error at all: nothing to be safer from
    assert compared(kept, point(INF, INF, INF, below=3.0), rows)["coverage"].worse


@pytest.mark.parametrize(("promised", "refused"), [(0.03, True), (0.001, False), (0.5, False)])
def test_a_promised_risk_is_not_broken_where_it_was_kept(rows, promised, refused):
    promise = {"abstention": {"risk": promised}}
    line = compared(point(INF, INF, INF, below=2.0, **promise), point(INF, INF, INF, **promise), rows)["risk"]
    assert 0.001 < line.old < 0.03 < line.new
    assert line.p_value < 0.01
    assert line.worse == refused


def test_confidence_that_is_less_true_is_worse():
    rows = made_rows(1500, seed=5, gap=0.4)
    fitted = calibration.get("temperature").fit(0.4 * rows.logits[-1][:], rows.truth)
    true, sharp = full(4), replace(full(4), calibrators=(fitted,) * 4)
    assert worse(true, sharp, rows) == {"n·ConfCE^corr"}
    assert worse(sharp, true, rows) == set()


def test_chance_alone_is_no_reason():
    one, two = point(2.0, 2.0, 2.0), point(2.05, 2.0, 1.95)
    assert not set().union(*(worse(one, two, made_rows(200, seed=seed)) for seed in range(20)))


def test_without_enough_rows_or_a_point_in_common_nothing_is_said(rows):
    one, two = {"p": point(1.0, 1.0, 1.0)}, {"p": point(6.0, 6.0, 6.0)}
    assert compare_points(one, two, rows.take(np.arange(LEAST_ROWS - 1))) == []
    assert compare_points(one, two, rows.take(np.arange(LEAST_ROWS)))
    assert compare_points(one, {"q": two["p"]}, rows) == []
    assert compare_points(one, one, rows) == [], "what didn't change isn't tested"


def test_a_risk_of_no_answers_is_not_known_and_no_reason(rows):
    line = compared(full(4), replace(full(4), abstain_below=INF), rows)["risk"]
    assert (line.new, line.p_value, line.worse) == (None, 1.0, False)


def test_the_same_rows_and_seed_give_the_same(rows):
    old, new = point(3.0, 3.0, 3.0), point(1.0, 2.0, 4.0)
    assert compared(old, new, rows) == compared(old, new, rows)
    assert compared(old, new, rows, seed=1) != compared(old, new, rows)


def test_reasons_name_point_figure_and_interval(rows):
    same = {"target": {"kind": "budget", "share": 0.5}}
    old, new = point(6.0, 6.0, 6.0, **same), point(0.0, 0.0, 0.0, **same)
    (reason,) = refusals(compare_points({"fast": old}, {"fast": new}, rows))
    assert reason.startswith("fast: accuracy goes from 0.")
    assert "on 1500 test rows that neither calibration was made from (difference -0." in reason
    assert "95% interval [-0." in reason
    assert refusals(compare_points({"fast": new}, {"fast": old}, rows)) == []
