"""Thresholds for a target: the best there are within it, and where there are none, the closest by name."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from made_rows import made_rows
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.bundles.time_model import TimeModel
from offramp.runtime.jobs.calibrating.abstention import Judged, abstention
from offramp.runtime.jobs.calibrating.choice import MARGIN
from offramp.runtime.jobs.calibrating.chooser import Chooser
from offramp.runtime.jobs.calibrating.guarantee import CANDIDATES, guarantee, planned
from offramp.runtime.jobs.calibrating.targets import AbstainRisk, Budget, Guarantee, MaxDrop, MaxMs, label_of
from offramp.runtime.thresholds import risk_bound
from scipy.stats import binom

TIMES = [0.5, 1.5, 2.0, 4.0]
FULL = (math.inf, math.inf, math.inf, -math.inf)


def chooser(seed, rows=150, certify=400, **options):
    return Chooser.of(
        made_rows(rows, seed=seed, **options),
        made_rows(certify, seed=seed + 1000, **options),
        TimeModel.given(TIMES, 4),
    )


def left_at(rows, thresholds):
    """Where each row leaves, asked one by one."""
    return [
        next(j for j, bar in enumerate(thresholds) if rows.score[j, i] >= bar or j == len(thresholds) - 1)
        for i in range(len(rows))
    ]


def figures(rows, thresholds):
    """Cost as a share of the full model's, accuracy lost, and milliseconds, row by row."""
    left = left_at(rows, thresholds)
    spent = sum(int(rows.flops[j, i]) for i, j in enumerate(left)) / rows.flops[-1].sum()
    right = sum(bool(rows.correct[j, i]) for i, j in enumerate(left))
    return spent, (int(rows.correct[-1].sum()) - right) / len(rows), sum(TIMES[j] for j in left) / len(rows)


def margin(rows, thresholds):
    left = left_at(rows, thresholds)
    differ = sum(rows.correct[-1, i] != rows.correct[j, i] for i, j in enumerate(left))
    return math.sqrt(differ + 1) / len(rows)


def surely(rows, thresholds):
    """The upper end of the cost, as a share of the full model's, at 95%, by the spread of its residual."""
    left = left_at(rows, thresholds)
    spent = np.array([rows.flops[j, i] for i, j in enumerate(left)]) / rows.flops[-1].mean()
    residual = spent - spent.mean() * rows.flops[-1] / rows.flops[-1].mean()
    return spent.mean() + MARGIN * residual.std() / math.sqrt(len(rows))


def apart(rows, one, other):
    """How much less accurate the first rule is than the second, in standard errors of the difference, row by row."""
    a, b = ([bool(rows.correct[j, i]) for i, j in enumerate(left_at(rows, bars))] for bars in (one, other))
    lost = np.subtract(b, a, dtype=float)
    return lost.sum() / math.sqrt((lost**2).sum() + 1)


def no_rule_beats(chosen, choice, within):
    """The choice is as accurate as the best within noise, costs no more, and no rule as simple is better in both."""
    rule = next(r for r in chosen.rules if r.thresholds == choice.thresholds)
    best = min(within, key=lambda r: (r.drop, r.cost))
    assert rule in within
    assert apart(chosen.propose, rule.thresholds, best.thresholds) <= 2
    assert rule.cost <= best.cost * 1.02
    assert rule.complexity <= best.complexity
    for other in within:
        if other.complexity <= rule.complexity:
            assert not (other.cost < rule.cost and other.drop <= rule.drop)
            assert not (other.cost <= rule.cost and other.drop < rule.drop)


@pytest.mark.parametrize("seed", range(4))
def test_a_budget_is_surely_kept_by_a_rule_that_no_simpler_one_beats(seed):
    chosen = chooser(seed)
    for share in (0.3, 0.5, 0.75, 1.0):
        choice = chosen.choose(Budget(share))
        cost, drop, _ = figures(chosen.propose, choice.thresholds)
        no_rule_beats(chosen, choice, [r for r in chosen.rules if r.cost + MARGIN * r.cost_error <= share])
        assert surely(chosen.propose, choice.thresholds) <= share + 1e-12
        assert choice.unmet is None
        assert choice.provenance["met"] is True
        assert choice.provenance["flops_fraction"] == pytest.approx(cost)
        assert choice.provenance["drop"] == pytest.approx(drop)


@pytest.mark.parametrize("seed", range(4))
def test_a_time_is_kept_by_a_rule_that_no_simpler_one_beats(seed):
    chosen = chooser(seed)
    for ms in (0.8, 1.5, 3.0):
        choice = chosen.choose(MaxMs(ms))
        spent = figures(chosen.propose, choice.thresholds)[2]
        within = [r for r in chosen.rules if figures(chosen.propose, r.thresholds)[2] <= ms + 1e-12]
        no_rule_beats(chosen, choice, within)
        assert choice.provenance["ms"] == pytest.approx(spent)
        assert spent <= ms + 1e-12
        assert choice.unmet is None


@pytest.mark.parametrize("seed", range(4))
def test_a_drop_is_kept_by_the_cheapest_rule_that_keeps_it_with_a_margin(seed):
    chosen = chooser(seed, rows=300)
    proposing = chosen.propose
    every = [
        (
            *figures(proposing, r.thresholds)[:2],
            margin(proposing, r.thresholds),
            figures(chosen.certify, r.thresholds)[1],
        )
        for r in chosen.rules
    ]
    for allowed in (0.03, 0.06, 0.2):
        choice = chosen.choose(MaxDrop(allowed))
        within = [
            c
            for c, d, m, elsewhere in every
            if max(elsewhere, min(max(d, 0.0) + MARGIN * m, d + (MARGIN + 1) * m)) <= allowed + 1e-12
        ]
        assert min(within) <= figures(proposing, choice.thresholds)[0] <= min(within) * 1.02 + 1e-12
        assert choice.unmet is None


def test_a_drop_that_other_rows_deny_isnt_taken_unless_those_are_kept_for_a_promise():
    lucky = labelled_as(made_rows(1200), right=(0.8, 0.8, 0.8, 0.8))
    others = labelled_as(made_rows(800, seed=1), right=(0.5, 0.5, 0.5, 0.8))
    choice = Chooser.of(lucky, others).choose(MaxDrop(0.05))
    assert figures(others, choice.thresholds)[1] <= 0.05
    assert figures(lucky, choice.thresholds)[0] > 0.8
    promised = Chooser.of(lucky, others, abstain=AbstainRisk(0.05)).choose(MaxDrop(0.05))
    assert figures(lucky, promised.thresholds)[0] < 0.5


def test_where_early_exits_know_better_a_drop_lets_rows_leave():
    """The last exit is right less often than the one in the middle, which costs half."""
    rows = made_rows(1200)
    rows = labelled_as(rows, right=(0.6, 0.8, 0.55, 0.5))
    choice = Chooser.of(rows, rows).choose(MaxDrop(0.005))
    cost, drop, _ = figures(rows, choice.thresholds)
    assert cost <= 0.5
    assert drop < 0


def labelled_as(rows, right, seed=0):
    """The same scores, with each exit right on this share of the rows whatever its score."""
    draw = np.random.default_rng(seed).random(len(rows))
    label = np.stack([np.where(draw < share, rows.truth, (rows.truth + 1) % rows.classes) for share in right])
    return replace(rows, label=label)


def test_an_exit_that_is_as_good_as_all_later_ones_answers_everybody():
    """Three exits: the second is as accurate as the last at a fifth of the cost, and scores say little."""
    rows = labelled_as(made_rows(1500, exits=3, flops=[80, 204, 1000]), right=(0.58, 0.645, 0.65))
    chosen = Chooser.of(rows, rows)
    choice = chosen.choose(Budget(0.4))
    assert choice.thresholds == (math.inf, -math.inf, -math.inf)
    assert choice.provenance["family"] == "everybody at 1"
    assert choice.provenance["flops_fraction"] == pytest.approx(0.204)


def test_no_threshold_sits_on_a_rows_score():
    chosen = chooser(0)
    scores = set(chosen.propose.score.astype(np.float64).ravel().tolist())
    assert len(chosen.rules) > 100
    assert not scores & {bar for rule in chosen.rules for bar in rule.thresholds if math.isfinite(bar)}


def test_rules_may_be_chosen_by_measured_time():
    """An exit that takes long though it has few FLOPs: cheap by the one measure, costly by the other."""
    rows = labelled_as(made_rows(1500, exits=3, flops=[100, 200, 1000]), right=(0.5, 0.645, 0.65))
    slow = TimeModel.given([1.0, 9.0, 10.0], 3)
    by_flops, by_time = (Chooser.of(rows, rows, slow, cost).choose(Budget(0.5)) for cost in ("flops", "ms"))
    assert by_flops.thresholds == (math.inf, -math.inf, -math.inf)
    assert by_time.thresholds[0] != math.inf
    assert by_time.provenance["ms_fraction"] <= 0.5
    with pytest.raises(InputError, match="cost: ms needs the milliseconds of each exit"):
        Chooser.of(rows, rows, cost="ms")
    with pytest.raises(InputError, match='cost: expected "flops" or "ms"'):
        Chooser.of(rows, rows, slow, "hours")


@pytest.mark.parametrize("seed", range(4))
def test_a_guarantee_passed_an_exact_test_on_the_certifying_rows(seed):
    chosen = chooser(seed, rows=300, certify=1500)
    choice = chosen.choose(Guarantee(0.05, 0.1))
    certify, left = chosen.certify, left_at(chosen.certify, choice.thresholds)
    lost = sum(bool(certify.correct[-1, i] and not certify.correct[j, i]) for i, j in enumerate(left))
    gained = sum(bool(certify.correct[j, i] and not certify.correct[-1, i]) for i, j in enumerate(left))
    assert choice.unmet is None
    assert (choice.provenance["lost"], choice.provenance["gained"]) == (lost, gained)
    assert choice.provenance["p_value"] <= 0.1
    assert choice.provenance["bound"] <= 0.05
    if "lost" in choice.provenance["method"]:
        assert choice.provenance["p_value"] == pytest.approx(binom.cdf(lost, len(certify), 0.05))
        gained = 0
    assert choice.provenance["loss"] == pytest.approx((lost - gained) / len(certify))
    assert choice.provenance["flops_fraction"] == pytest.approx(figures(certify, choice.thresholds)[0])
    assert choice.provenance["flops_fraction"] < 1
    assert choice.provenance["tested"] <= choice.provenance["candidates"] <= CANDIDATES


def test_what_a_guarantee_tests_is_fixed_before_a_certifying_row_is_seen():
    proposing = made_rows(300, seed=1)
    sure, unsure = (Chooser.of(proposing, made_rows(n, seed=9)) for n in (2000, 40))
    assert sure.rules == unsure.rules
    one, two = (planned(sure.rules, 800, Guarantee(0.05), part.propose) for part in (sure, unsure))
    assert one == two
    assert sum(one.shares) == pytest.approx(1.0)
    assert [rule.cost for rule in one.rules] == sorted((rule.cost for rule in one.rules), reverse=True)
    first, last = one.likely
    assert sum(one.shares[first:last]) >= 0.9 * sum(one.shares[:-1])


def test_without_proposing_rows_a_guarantee_is_the_binomial_test():
    chosen = chooser(1, rows=300, certify=1500)
    choice = guarantee(chosen.rules, chosen.certify, Guarantee(0.05, 0.1))
    assert "binomial on lost rows" in choice.provenance["method"]
    assert choice.provenance["p_value"] <= 0.1


@pytest.mark.parametrize("seed", range(3))
def test_what_exits_gain_counts_where_the_proposing_rows_say_it_helps(seed):
    # The last exit is wrong on rows that the first has right, and the other way round.
    def overthinking(rows, seed):
        rng = np.random.default_rng(seed)
        made = made_rows(rows, seed=seed, exits=2)
        truth = np.zeros(rows, np.int64)
        label = (rng.random((2, rows)) < [[0.06], [0.08]]).astype(np.int64)
        return replace(made, truth=truth, label=label)

    chosen = Chooser.of(overthinking(800, seed), overthinking(800, seed + 50))
    choice = chosen.choose(Guarantee(0.02))
    assert "signed" in choice.provenance["method"]
    assert choice.provenance["flops_fraction"] < 0.6
    alone = guarantee(chosen.rules, chosen.certify, Guarantee(0.02))
    assert alone.provenance["flops_fraction"] > choice.provenance["flops_fraction"]


# ---------------------------------------------------------------- what can't be kept


def named(message):
    """The closest that can be kept, as the message says it."""
    found = re.search(r"(?:costs|takes|smallest .*? is) ([\d.e-]+)(%| ms)", message)
    return float(found[1]) / (100 if found[2] == "%" else 1)


def test_a_budget_below_the_first_exit_names_its_cost_and_that_one_is_kept():
    chosen = chooser(0, flops=[210, 300, 600, 1000])
    choice = chosen.choose(Budget(0.2))
    assert "a budget of 20% of the FLOPs can't be kept: the cheapest rule costs 21% at 95% confidence" in choice.unmet
    assert choice.provenance["met"] is False
    assert choice.provenance["closest"] == choice.unmet
    assert figures(chosen.propose, choice.thresholds)[0] == pytest.approx(0.21)
    assert chosen.choose(Budget(named(choice.unmet))).unmet is None


def test_a_time_that_is_too_short_names_the_quickest_and_that_one_is_kept():
    chosen = chooser(0)
    choice = chosen.choose(MaxMs(0.1))
    assert "0.1 ms a row can't be kept: the quickest rule takes 0.5 ms" in choice.unmet
    assert choice.provenance["ms"] == pytest.approx(min(figures(chosen.propose, r.thresholds)[2] for r in chosen.rules))
    assert chosen.choose(MaxMs(named(choice.unmet))).unmet is None


@pytest.mark.parametrize("seed", range(4))
def test_a_drop_that_only_the_full_model_keeps_names_the_least_that_saves_and_that_one_is_kept(seed):
    chosen = chooser(seed)
    choice = chosen.choose(MaxDrop(0.001))
    assert choice.thresholds == FULL
    assert "a drop of at most 0.1% can be had only from the full model: from 150 rows" in choice.unmet
    least = named(choice.unmet)
    again = chosen.choose(MaxDrop(least))
    assert again.unmet is None
    assert again.provenance["flops_fraction"] < 1
    assert chosen.choose(MaxDrop(0.999 * least)).unmet is not None


def test_a_drop_that_the_certify_rows_deny_says_so_and_what_was_seen_there():
    """On the rows that choose, every exit knows as much; on certify, early ones lose 10 points."""
    propose = labelled_as(made_rows(1200), right=(0.8, 0.8, 0.8, 0.8))
    certify = labelled_as(made_rows(800, seed=1), right=(0.7, 0.7, 0.7, 0.8))
    said = Chooser.of(propose, certify).choose(MaxDrop(0.002)).unmet
    assert "rules that save more than 1.96% of the FLOPs keep it on the 1200 rows of fit and select" in said
    assert "on the 800 rows of certify, which decided nothing, they lose" in said
    assert "or more (standard error" in said
    assert "A larger drop would help, or more rows" in said
    kept = Chooser.of(propose, certify, abstain=AbstainRisk(0.05)).choose(MaxDrop(0.002))
    assert kept.unmet is None, "where certify is kept for a promise it isn't asked"


def right_above(rows, share):
    """The same scores: the first exit is right on the share of rows that it is surest of, the last on 80%."""
    sure = rows.score[0] >= np.quantile(rows.score[0], 1 - share)
    wrong = (rows.truth + 1) % rows.classes
    return replace(
        rows,
        label=np.stack([np.where(sure, rows.truth, wrong), np.where(sure | (rows.rows % 5 > 0), rows.truth, wrong)]),
    )


def test_where_only_a_sliver_can_be_saved_at_that_drop_the_message_says_that():
    """Leaving early costs nothing on 2% of rows and saves 1.8%; within 2% the full model is as cheap, and simpler."""
    rows = right_above(made_rows(1350, exits=2, flops=[100, 1000]), 0.02)
    said = Chooser.of(rows, rows, abstain=AbstainRisk(0.05)).choose(MaxDrop(0.0015)).unmet
    assert "only from the full model: what keeps it saves no more than 1.96% of the FLOPs, which isn't" in said
    assert "the smallest drop that saves more than 1.96% of the FLOPs is" in said
    assert named(said) > 0.0015
    rows = made_rows(1350, exits=2, flops=[985, 1000])
    said = Chooser.of(rows, rows).choose(MaxDrop(0.0015)).unmet
    assert said.endswith("only from the full model: no rule saves more than 1.96% of the FLOPs.")


@pytest.mark.parametrize("seed", range(40))
def test_no_drop_that_cannot_be_had_is_contradicted_by_the_numbers_of_its_message(seed):
    """What is said to be the smallest is more than was asked, as printed, and is kept when it is asked for."""
    rng = np.random.default_rng(seed)
    first = int(rng.integers(1, 10)) * 100 if seed % 4 else 985

    def drawn(seed):
        rows = made_rows(int(rng.integers(20, 1500)), seed=seed, exits=2, flops=[first, 1000])
        if seed % 2:
            return right_above(rows, rng.uniform(0, 0.05))
        return labelled_as(rows, right=sorted(rng.uniform(0.7, 0.85, 2)), seed=seed)

    propose, certify = drawn(2 * seed), drawn(2 * seed + 200 * (seed % 5)) if seed % 3 else drawn(2 * seed + 1)
    if seed % 3 == 2:
        propose = right_above(propose, rng.uniform(0, 0.05))
    chosen = Chooser.of(propose, certify, abstain=None if seed % 3 else AbstainRisk(0.05))
    for asked in (0.001, 1 / 300, 0.01, 0.03, float(rng.uniform(0.001, 0.1))):
        choice = chosen.choose(MaxDrop(asked))
        if choice.unmet is None:
            continue
        assert choice.thresholds == FULL[2:]
        said = re.search(r"at most ([\d.]+)% can", choice.unmet)[1]
        for shown in re.findall(r"(?:smallest .*? is|they lose) ([\d.]+)%", choice.unmet):
            assert float(shown) > float(said), choice.unmet
        if "smallest" in choice.unmet:
            again = chosen.choose(MaxDrop(named(choice.unmet)))
            assert again.unmet is None
            assert again.provenance["flops_fraction"] < 1
        else:
            assert re.search("no rule|any rule", choice.unmet)


@pytest.mark.parametrize("seed", [1, 3, 4])  # what exits gain carries 0.2% at seeds 0 and 2
def test_a_guarantee_that_no_rule_passes_is_the_full_model_and_names_the_least_that_can_be_promised(seed):
    chosen = chooser(seed)
    choice = chosen.choose(Guarantee(0.002))
    assert choice.thresholds == FULL
    assert choice.provenance["feasible"] is False
    assert "a drop of at most 0.2% can't be promised at delta 5% from 400 certifying rows" in choice.unmet
    assert 0.002 < named(choice.unmet) < 1


@pytest.mark.parametrize("seed", [1, 3, 4])  # what exits gain carries 0.2% at seeds 0 and 2
def test_the_least_that_can_be_promised_can_be(seed):
    chosen = chooser(seed)
    least = named(chosen.choose(Guarantee(0.002)).unmet) * (1 + 1e-5)
    assert chosen.choose(Guarantee(least)).unmet is None


def test_without_rows_to_certify_nothing_is_promised():
    proposing = made_rows(200)
    chosen = Chooser.of(proposing, proposing.take(np.arange(0)))
    choice = chosen.choose(Guarantee(0.3))
    assert choice.thresholds == FULL
    assert "from 0 certifying rows" in choice.unmet


def test_a_model_with_one_exit_has_nothing_to_choose():
    rows = made_rows(200, exits=1)
    chosen = Chooser.of(rows, rows, TimeModel.given([2.0], 1))
    for target in (Budget(0.5), MaxDrop(0.1), Guarantee(0.1), MaxMs(1.0)):
        choice = chosen.choose(target)
        assert choice.thresholds == (-math.inf,)
        assert choice.unmet
    assert chosen.choose(MaxMs(2.0)).unmet is None


def test_a_time_needs_times():
    rows = made_rows(100)
    with pytest.raises(InputError, match="max_ms: needs the milliseconds of each exit"):
        Chooser.of(rows, rows).choose(MaxMs(1.0))


# ---------------------------------------------------------------- abstention


def test_abstention_answers_as_much_as_its_share_of_delta_allows():
    rows = made_rows(1500, seed=3)
    odds, wrong = rows.score[-1].astype(np.float64), ~rows.correct[-1]
    alone, shared = (abstention(Judged.alone(odds, wrong), AbstainRisk(0.05, 0.1), share=s) for s in (1.0, 0.1))
    assert alone.unmet is None
    assert alone.provenance["level"] == 0.1
    assert shared.provenance["level"] == pytest.approx(0.01)
    assert shared.provenance["coverage"] <= alone.provenance["coverage"]
    kept = odds >= alone.threshold
    assert kept.mean() == pytest.approx(alone.provenance["coverage"])
    assert binom.cdf(wrong[kept].sum(), kept.sum(), 0.05) <= 0.1


@pytest.mark.parametrize("seed", range(6))
def test_a_risk_that_nobody_can_promise_is_not_promised_and_one_that_can_be_is_named(seed):
    rows, other = (made_rows(200, gap=0.3, seed=s) for s in (seed, seed + 100))
    certify, propose = (Judged.alone(r.score[-1], ~r.correct[-1]) for r in (rows, other))
    found = abstention(certify, AbstainRisk(0.001), propose)
    assert found.threshold == -math.inf
    assert abstention(certify, AbstainRisk(0.001), propose, abstain_all=True).threshold == math.inf
    assert found.provenance["feasible"] is False
    assert found.provenance["closest"] == found.unmet
    assert found.provenance["bound"] is None
    risk, coverage = re.search(r": ([\d.]+)% could be, answering ([\d.]+)%\.", found.unmet).groups()
    could = abstention(certify, AbstainRisk(float(risk) / 100), propose)
    assert could.unmet is None
    assert could.provenance["coverage"] == pytest.approx(float(coverage) / 100, abs=6e-4)


@pytest.mark.parametrize("seed", range(5))
def test_an_error_among_the_surest_rows_leaves_the_closest_risk_near_what_counting_says(seed):
    # 4% of the labels are noise: 2% can't be promised, and all rows together bear out little more than 4%.
    rng = np.random.default_rng(seed)
    propose, certify = (Judged.alone(rng.normal(size=n), rng.random(n) < 0.04) for n in (1350, 825))
    found = abstention(certify, AbstainRisk(0.02), propose)
    risk = float(re.search(r": ([\d.]+)% could be", found.unmet)[1]) / 100
    assert risk <= 1.25 * risk_bound(int(certify.wrong.sum()), 825, 0.05)


# ---------------------------------------------------------------- names and ranges


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (Budget(0.5), "budget-50%"),
        (Budget(0.5, "half"), "half"),
        (Budget(1 / 3), "budget-33.3333%"),
        (MaxMs(1.5), "max-ms-1.5"),
        (MaxDrop(0.005), "max-drop-0.5%"),
        (Guarantee(0.07), "guarantee-7%"),
    ],
)
def test_a_point_is_called_after_its_target_unless_it_has_a_name(target, name):
    assert label_of(target) == name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Budget(0.0), r"budget: expected a number in \(0, 1\], got 0.0"),
        (lambda: Budget(math.nan), "budget: expected"),
        (lambda: MaxMs(0.0), "max_ms: expected milliseconds above 0"),
        (lambda: MaxMs(math.inf), "max_ms: expected milliseconds above 0"),
        (lambda: MaxMs(math.nan), "max_ms: expected milliseconds above 0"),
        (lambda: MaxDrop(1.0), r"max_drop: expected a number in \(0, 1\)"),
        (lambda: Guarantee(0.1, 1.0), "delta: expected"),
        (lambda: AbstainRisk(0.1, 0.0), "delta: expected"),
    ],
)
def test_a_target_out_of_range_is_refused_by_its_name(make, message):
    with pytest.raises(InputError, match=message):
        make()
