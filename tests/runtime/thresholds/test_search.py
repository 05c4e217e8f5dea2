"""Exit rules with one dial: what each does is counted row by row, and none has an exit that nobody uses."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_rows import made_rows
from offramp.runtime.errors import InputError
from offramp.runtime.thresholds import cheapest_within, judge, search

INF = math.inf
BARS = st.one_of(st.sampled_from([-INF, INF, 0.0]), st.integers(-3, 3).map(float))


@st.composite
def seen(draw):
    """Scores with ties, correctness, and cost that differs from row to row; thresholds."""
    exits, rows = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    score = rng.integers(-3, 4, (exits, rows)).astype(np.float32)
    cost = np.cumsum(rng.integers(1, 9, (exits, rows)), axis=0).astype(np.float64)
    bars = (*draw(st.lists(BARS, min_size=exits - 1, max_size=exits - 1)), -INF)
    return score, rng.random((exits, rows)) < 0.6, cost, bars


@given(seen())
@settings(max_examples=200, deadline=None)
def test_a_rule_is_judged_as_row_by_row(given):
    score, correct, cost, bars = given
    exits, rows = score.shape
    spent, dropped, lost, differ = 0.0, 0, 0, 0
    for i in range(rows):
        j = next(j for j in range(exits) if score[j, i] >= bars[j])
        spent += cost[j, i]
        dropped += int(correct[-1, i]) - int(correct[j, i])
        lost += bool(correct[-1, i] and not correct[j, i])
        differ += bool(correct[-1, i] != correct[j, i])
    rule = judge("mine", bars, score, correct, cost)
    assert (rule.family, rule.thresholds) == ("mine", bars)
    assert rule.cost == pytest.approx(spent / cost[-1].sum())
    assert rule.drop == pytest.approx(dropped / rows)
    assert rule.lost == pytest.approx(lost / rows)
    assert rule.margin == pytest.approx(math.sqrt(differ + 1) / rows)


def found(rows):
    early = len(rows.score) - 1
    return search(rows.score, rows.correct, rows.flops, maps=(np.linspace(1, 0.5, early), np.linspace(0, 1, early)))


@pytest.fixture(scope="module")
def rows():
    return made_rows(300)


@pytest.fixture(scope="module")
def rules(rows):
    return found(rows)


def leaving(rows, thresholds):
    left = [next(j for j, b in enumerate(thresholds) if rows.score[j, i] >= b) for i in range(len(rows))]
    return np.bincount(left, minlength=len(thresholds))


def test_the_first_is_the_full_model_and_no_rule_comes_twice(rules):
    assert rules[0].thresholds == (INF, INF, INF, -INF)
    assert (rules[0].family, rules[0].cost, rules[0].drop, rules[0].lost) == ("full", 1.0, 0.0, 0.0)
    assert len({rule.thresholds for rule in rules}) == len(rules)
    kinds = {rule.family.partition(" at ")[0] for rule in rules}
    assert kinds == {"full", "everybody", "equal score", "equal confidence", "exit shares"}


def test_everybody_at_each_exit_is_among_them(rules):
    for j in range(3):
        bars = [INF] * 4
        bars[j] = bars[3] = -INF
        (rule,) = (r for r in rules if r.thresholds == tuple(bars))
        assert rule.family == f"everybody at {j}"
        assert rule.exits == (j,)
        assert rule.complexity == (1, 0)


def test_an_exit_where_no_row_leaves_is_switched_off(rows, rules):
    for rule in (r for r in rules if not r.family.startswith("everybody")):
        unused = leaving(rows, rule.thresholds) == 0
        assert [b == INF for b in rule.thresholds[:-1]] == unused[:-1].tolist()


def test_equal_scores_are_one_number_for_every_exit_in_use(rules):
    for rule in (r for r in rules if r.family.startswith("equal score")):
        assert len({bar for bar in rule.thresholds[:-1] if bar != INF}) == 1


def test_the_dial_goes_finely_from_nearly_everybody_early_to_nearly_nobody(rules):
    for family in ("equal score at 0, 1, 2", "equal confidence at 0, 1, 2", "exit shares at 0, 1, 2"):
        costs = np.sort([rule.cost for rule in rules if rule.family == family])
        if not len(costs):  # it never came near the best
            continue
        assert costs[-1] - costs[0] > 0.25
        assert np.diff(costs).max() < 0.1, "finely enough"


def test_an_exit_whose_score_says_nothing_is_shut_where_confidence_decides():
    rows = made_rows(400)
    score = rows.score.copy()
    score[0] = -score[0]  # the surer, the wronger
    rules = search(score, rows.correct, rows.flops, maps=([-1.0, 1.0, 1.0], [0.0, 0.0, 0.0]))
    assert all(rule.thresholds[0] == INF for rule in rules if rule.family.startswith("equal confidence"))


def test_one_exit_leaves_only_the_full_model():
    rows = made_rows(50, exits=1)
    (only,) = found(rows)
    assert (only.family, only.thresholds, only.cost, only.drop) == ("full", (-INF,), 1.0, 0.0)


def test_without_rows_there_is_only_the_full_model():
    rows = made_rows(50).take(np.arange(0))
    assert [r.family for r in found(rows)] == ["full"]


def test_cost_nothing_is_no_division_by_it():
    rows = made_rows(50, exits=2, flops=[0, 0])
    assert found(rows)[0].cost == 0


def test_maps_that_are_none_are_refused():
    rows = made_rows(50)
    for maps in (([1.0], [0.0]), ([1.0, np.nan, 1.0], [0.0, 0.0, 0.0])):
        with pytest.raises(InputError, match="maps: expected slopes and intercepts, 3 finite numbers each"):
            search(rows.score, rows.correct, rows.flops, maps=maps)


def test_no_threshold_lies_on_a_score(rows, rules):
    scores = set(rows.score.astype(np.float64).ravel().tolist())
    assert not scores & {bar for rule in rules for bar in rule.thresholds}


@pytest.mark.parametrize("seed", range(4))
def test_figures_along_a_dial_are_those_of_the_rule_judged_by_itself(seed):
    rows = made_rows(120, seed=seed)
    for rule in found(rows)[::7]:
        alone = judge(rule.family, rule.thresholds, rows.score, rows.correct, rows.flops.astype(np.float64))
        for figure in ("cost", "drop", "lost", "margin", "cost_error"):
            assert getattr(rule, figure) == pytest.approx(getattr(alone, figure), abs=1e-9), figure


def test_many_exits_are_searched_by_a_beam_that_finds_the_one_that_matters():
    """Of 13 exits only the fifth is any good early on: as good as the last, at a third of the cost."""
    rows = made_rows(600, exits=13)
    right = np.zeros((13, 600), bool)
    right[[4, 12]] = np.random.default_rng(0).random(600) < 0.9
    rules = search(rows.score, right, np.arange(1, 14))
    best = cheapest_within(rules, 0.002, 0)
    assert best.exits == (4,)
    assert best.cost == pytest.approx(5 / 13)
