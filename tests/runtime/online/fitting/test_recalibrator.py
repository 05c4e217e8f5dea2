import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from offramp.runtime import calibration, scores
from offramp.runtime.errors import InputError
from offramp.runtime.online.fitting import recalibrator
from offramp.runtime.online.fitting.recalibrator import Recalibrator
from offramp.runtime.online.guard import keeps_order
from offramp.runtime.online.leaving import hold_drop, hold_risk, hold_shares
from offramp.runtime.online.window import Memory
from offramp.runtime.points import OperatingPoint
from offramp.runtime.thresholds import leave_at
from served_rows import made_up, served

BARS = (2.0, 2.0, -np.inf)
POINT = OperatingPoint(BARS, abstain_below=-1.0)
WHOLE = Memory(half_life=np.inf, adaptive=False)
OFFLINE = {
    "rank_preserving": calibration.RankPreservingPower,
    "rank_preserving_isotonic": calibration.RankPreservingIsotonic,
    "temperature": calibration.Temperature,
    "cwmcs": lambda: calibration.CwMCS(sure=0.0),
}


def skewed(rows=5000, seed=0):
    """Over-confident where class 0 is predicted."""
    logits, label = made_up(rows, sharp=1.3, seed=seed)
    moved = (logits[-1].argmax(axis=1) == 0) & (np.random.default_rng(seed).random(rows) < 0.3)
    return logits, np.where(moved, 1, label)


@pytest.mark.parametrize("method", OFFLINE)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_refit_is_the_offline_fit_on_the_rows_that_reach_each_exit(method, weighted):
    logits, label = skewed()
    asked = np.where(np.arange(5000) % 2, 0.5, 1.0) if weighted else None
    window = served(logits, label, BARS, labelled=0.8, shadow=0.5, asked=asked)
    found = Recalibrator(method, memory=WHOLE).refit(window, POINT)
    assert found.point.thresholds == BARS
    assert found.after == window.time[window.known][-1]
    for j, made in enumerate(found.point.calibrators):
        rows = window.known & (window.exit >= j)
        assert found.rows[j] == rows.sum()
        plain = OFFLINE[method]().fit(logits[j][rows], label[rows], weights=window.weights[rows])
        assert type(made) is type(plain)
        given = {"score": window.score[j, rows], "logits": logits[j][rows]}
        assert made.confidence(given) == pytest.approx(
            plain.confidence(given), abs=0.015 if method == "cwmcs" else 2e-3
        )


def test_cwmcs_comes_with_a_candidate_that_keeps_the_order_of_rows():
    logits, label = skewed()
    window = served(logits, label, BARS, shadow=0.5)
    cwmcs = Recalibrator("cwmcs", memory=WHOLE)
    incumbent = cwmcs.refit(window, POINT).point
    drifted = served(1.5 * logits, label, BARS, shadow=0.5)
    (moved, full) = [refit.point for refit, _ in cwmcs.candidates(drifted, incumbent)]
    assert full == cwmcs.refit(drifted, incumbent).point
    assert keeps_order(incumbent, moved)
    assert not keeps_order(incumbent, full)
    assert moved.thresholds == incumbent.thresholds
    check_powered(moved, incumbent, 1.5 * logits, label, drifted)


def check_powered(moved, incumbent, logits, label, window):
    """Each of its calibrators is a power of the incumbent's, as fitted offline on the rows that reach the exit."""
    for j in range(3):
        rows = np.flatnonzero(window.known & (window.exit >= j))
        plain = calibration.Powered(incumbent.calibrator(j)).fit(logits[j][rows], label[rows])
        given = {"logits": logits[j][rows]}
        assert moved.calibrator(j).confidence(given) == pytest.approx(plain.confidence(given), abs=2e-3)


@pytest.mark.parametrize("offline", ["cwmcs", "temperature", "platt", "vector", "rank_preserving_isotonic"])
def test_whatever_the_offline_job_chose_a_rank_preserving_refit_keeps_its_order(offline):
    logits, label = skewed()
    left = served(logits, label, BARS).exit
    incumbent = OperatingPoint(BARS, calibrators=calibration.fit_exits(offline, logits, label, left))
    drifted = served(1.5 * logits, label, BARS, shadow=0.5)
    found = Recalibrator(memory=WHOLE).refit(drifted, incumbent).point
    if offline in ("vector", "rank_preserving_isotonic"):  # one moves labels, the other has the raw score's order
        assert {type(one) for one in found.calibrators} == {calibration.RankPreservingPower}
    else:
        assert keeps_order(incumbent, found)
        check_powered(found, incumbent, 1.5 * logits, label, drifted)


def test_the_same_from_ten_thousand_gathered_scores():
    random = np.random.default_rng(0)
    score = random.normal(2, 2, 10_000)
    correct = random.random(10_000) < scores.sigmoid(score) ** 2
    plain = calibration.RankPreservingPower().fit_scores(score, correct, 10)
    few = recalibrator.gathered(score, correct, np.ones(10_000))
    assert len(few[0]) <= 2 * recalibrator.CELLS
    assert few[2].sum() == pytest.approx(10_000)
    assert calibration.RankPreservingPower().fit_scores(*few[:2], 10, weights=few[2]).alpha_ == pytest.approx(
        plain.alpha_, rel=1e-3
    )


def test_an_exit_with_few_rows_borrows_what_it_lacks_or_stays_as_it_was():
    logits, label = made_up(1000)
    bars = (0.0, 3.0, -np.inf)
    window = served(logits, label, bars)
    reached = [window.exit >= j for j in range(3)]
    counts = [int(rows.sum()) for rows in reached]
    assert counts[1] < 200
    point = OperatingPoint(bars, calibrators=calibration.fit_exits("identity", logits, label, np.full(1000, 2)))
    found = Recalibrator(least=200, memory=WHOLE).refit(window, point)
    assert found.rows == (1000, sum(counts), sum(counts))
    for j in (1, 2):
        score = np.concatenate([window.score[k, reached[k]] for k in range(3)])
        right = np.concatenate([window.tops[k, reached[k]] == label[reached[k]] for k in range(3)])
        borrowed = (200 - counts[j]) / (sum(counts) - counts[j])
        weights = np.concatenate([np.full(counts[k], 1.0 if k == j else borrowed) for k in range(3)])
        assert weights.sum() == pytest.approx(200)
        plain = calibration.RankPreservingPower().fit_scores(score, right, window.classes, weights=weights)
        assert found.point.calibrators[j].alpha_ == pytest.approx(plain.alpha_, rel=1e-3)
    assert found.point.calibrators[1] != found.point.calibrators[2]
    kept = Recalibrator(least=1500, memory=WHOLE).refit(window, point)
    assert kept is None
    deep = Recalibrator(least=1001 + counts[1], memory=WHOLE).refit(window, point)
    assert deep.rows[2] == sum(counts)
    assert Recalibrator(memory=Memory(least=2000)).refit(window, point) is None


def test_what_is_old_counts_less():
    before, after = made_up(2000, sharp=1.0, seed=1), made_up(2000, sharp=2.0, seed=2)
    window = served(np.concatenate([before[0], after[0]], axis=1), np.concatenate([before[1], after[1]]), BARS)
    temperatures = [
        Recalibrator("temperature", memory=memory).refit(window, POINT).point.calibrators[0].temperature_
        for memory in (WHOLE, replace(WHOLE, half_life=150), replace(WHOLE, rows=2000))
    ]
    assert temperatures[0] + 0.5 < temperatures[1]
    assert temperatures[1] == pytest.approx(temperatures[2], abs=0.3)


@pytest.mark.parametrize("method", OFFLINE)
def test_what_was_before_a_change_is_left_out_as_soon_as_it_is_seen(method):
    before, after = made_up(3000, sharp=1.0, seed=1), made_up(1000, sharp=3.0, seed=2)
    window = served(np.concatenate([before[0], after[0]], axis=1), np.concatenate([before[1], after[1]]), BARS)
    found = Recalibrator(method).refit(window, POINT)
    # A parameter a class wants rows more than it wants them new.
    assert found.rows[0] == (4000 if method == "cwmcs" else pytest.approx(1000, abs=100))
    assert Recalibrator(method, memory=Memory(adaptive=False)).refit(window, POINT).rows[0] == 4000


def test_a_client_that_lies_about_one_class_moves_it_little():
    logits, label = made_up(6000)
    window = served(logits, label, BARS)
    random = np.random.default_rng(0)
    key = random.integers(0, 5, 6000)
    liar = (window.served == 0) & (random.random(6000) < 0.9)
    lied = replace(window, key=np.where(liar, 9, key), label=np.where(liar, 1, label))
    honest, free, held = (
        Recalibrator("cwmcs", share=share).refit(rows, POINT).point.calibrators[2].temperatures_[0]
        for rows, share in ((window, 1.0), (lied, 1.0), (lied, 0.25))
    )
    assert free > 1.5 * honest
    assert held < honest + 0.5 * (free - honest)
    assert Recalibrator(share=0.25).refit(lied, POINT).capped > 0.1


def test_mistakes_are_named():
    with pytest.raises(InputError, match="method"):
        Recalibrator("platt")
    with pytest.raises(InputError, match="least"):
        Recalibrator(least=0)
    with pytest.raises(InputError, match="exits"):
        Recalibrator().refit(served(*made_up(500), BARS), OperatingPoint((-np.inf,)))


# ---------------------------------------------------------------- abstention and exits


def test_the_promised_risk_is_kept_by_the_new_version_at_its_own_level():
    logits, label = made_up(6000, sharp=1.5)
    window = served(logits, label, BARS)
    candidate = Recalibrator().refit(window.take(np.arange(3000)), POINT).point
    judged = window.take(np.arange(3000, 6000))
    found = [
        recalibrator.abstention(judged, POINT, candidate, risk=0.3, delta=0.05, version=version) for version in (1, 9)
    ]
    assert found[0].feasible
    assert found[0].threshold <= found[1].threshold
    assert found[1].level == pytest.approx(0.05 * 6 / np.pi**2 / 81)
    kept = judged.log_odds(candidate) >= found[0].threshold
    assert (~judged.correct)[kept].mean() == pytest.approx(found[0].risk)
    never = recalibrator.abstention(judged, POINT, candidate, risk=1e-6, delta=0.05, version=1)
    assert never.threshold == np.inf


def test_thinned_rows_stand_for_equally_many():
    weights = np.repeat([1.0, 4.0], 20_000)
    kept = recalibrator.evenly(weights)
    assert kept[20_000:].all()
    assert kept[:20_000].mean() == pytest.approx(0.25, abs=0.02)
    assert recalibrator.evenly(np.ones(5)).all()


def test_shares_are_held_although_early_leavers_are_seldom_seen_to_the_end():
    logits, label = made_up(20_000, seed=4)
    window = served(logits, label, BARS, shadow=0.2)
    bars = hold_shares(window, [0.5, 0.3, 0.2])
    score = np.stack([scores.log_odds(z) for z in logits])
    shares = np.bincount(leave_at(score, bars)) / 20_000
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.02)
    assert hold_shares(window, [0.0, 0.0, 1.0]) == (np.inf, np.inf, -np.inf)
    with pytest.raises(InputError, match="shares"):
        hold_shares(window, [0.5, 0.6])


def test_thresholds_for_a_drop_and_for_a_promise():
    logits, label = made_up(8000, seed=4)
    window = served(logits, label, BARS, shadow=0.5)
    flops = [1.0, 2.0, 3.0]
    drop = hold_drop(window, flops, 0.02)
    assert drop.saves
    score, right = np.stack([scores.log_odds(z) for z in logits]), logits.argmax(axis=2) == label
    lost = right[-1].mean() - right[leave_at(score, drop.thresholds), np.arange(8000)].mean()
    assert lost < 0.04
    risk = hold_risk(window, flops, 0.05, 0.1)
    assert risk.feasible
    assert risk.bound <= 0.05
    with pytest.raises(InputError, match="all exits known"):
        hold_drop(window.take(~window.complete), flops, 0.02)


def test_a_server_without_scipy_can_do_all_of_it():
    code = (
        "import sys\nsys.modules['scipy'] = None\nimport numpy as np\n"
        "from served_rows import made_up, served\n"
        "from offramp.runtime.online import alarms, contest, gauges, guard, leaving, trials\n"
        "from offramp.runtime.online.fitting import recalibrator\n"
        "from offramp.runtime.points import OperatingPoint\n"
        "bars = (2.0, 2.0, -np.inf)\nwindow, point = served(*made_up(3000), bars), OperatingPoint(bars)\n"
        "for method in recalibrator.METHODS:\n"
        "    made = recalibrator.Recalibrator(method).refit(window, point).point\n"
        "    recalibrator.abstention(window, point, made, risk=0.3, delta=0.05, version=1)\n"
        "    gauges.measure(window, made)\n"
        "    guard.judge(guard.open_trial(window, point, made, after=0.0), window, point, made)\n"
        "alarms.Alarms.of(window).update(window)\n"
        "target = {'kind': 'guarantee', 'epsilon': .05, 'delta': .05}\n"
        "kept = {'target': target, contest.KEEPS_PROMISE: {'risk': .4, 'delta': .05}}\n"
        "point = OperatingPoint(bars, provenance=kept)\n"
        "leaving.rederive(window, point, [1., 2., 3.], leaving.Aim.of('risk', point, 1))\n"
        "print('done')"
    )
    support = str(Path(__file__).parents[3] / "support")
    environment = {**os.environ, "PYTHONPATH": support}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.strip() == "done", done.stderr
