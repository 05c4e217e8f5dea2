from dataclasses import asdict

import numpy as np
import pytest
from offramp.runtime import calibration, scores
from offramp.runtime.errors import InputError
from offramp.runtime.online.fitting.recalibrator import Recalibrator
from offramp.runtime.online.guard import keeps_order
from offramp.runtime.online.trials import Trials, turns_of
from offramp.runtime.online.window import Memory
from offramp.runtime.points import OperatingPoint
from served_rows import made_up, served

BARS = (1.5, 1.5, -np.inf)


def in_force():
    logits, label = made_up(4000, seed=1)
    left = served(logits, label, BARS).exit
    return OperatingPoint(BARS, calibrators=calibration.fit_exits("rank_preserving_power", logits, label, left))


def trials(**options):
    return Trials(Recalibrator(memory=Memory(rows=1000)), in_force(), fitted_until=-1.0, **options)


def stream(sharp, seed=2, rows=3000):
    return served(*made_up(rows, sharp=sharp, seed=seed), BARS)


def test_a_drift_is_followed_and_the_new_one_begins_with_an_alpha_of_its_own():
    window, on = stream(1.7), trials()
    start = on.incumbent
    for end in range(100, 3001, 100):
        found = on.look(window.take(np.arange(end)))
        good = [one for one in found if one.decision.verdict == "accept"]
        if good:
            break
    assert good
    best = good[-1]
    assert best.decision.after < window.time[end - 1]
    assert on.promote(best.trial.number) is best.refit.point
    assert on.incumbent != start
    assert (on.opened, on.turns, on.on_trial, on.fitted_until) == (0, {}, [], best.refit.after)
    with pytest.raises(InputError, match="number"):
        on.promote(1)


def test_a_drift_is_followed_in_the_same_order_where_no_row_could_judge_another():
    logits, label = made_up(4000, seed=1)
    left = served(logits, label, BARS).exit
    start = OperatingPoint(BARS, calibrators=calibration.fit_exits("cwmcs", logits, label, left))
    on = Trials(Recalibrator("cwmcs", memory=Memory(rows=1000)), start, fitted_until=-1.0)
    window = served(*made_up(3000, sharp=1.7, seed=2), BARS, shadow=0.0)  # no early leaver is run to the end
    accepted = []
    for end in range(100, 3001, 100):
        good = [one for one in on.look(window.take(np.arange(end))) if one.decision.verdict == "accept"]
        if good:
            accepted.append(on.promote(good[-1].trial.number))
    assert accepted
    assert all(keeps_order(start, one) for one in accepted)
    later = served(*made_up(3000, sharp=1.7, seed=3), BARS)
    gaps = [abs(scores.sigmoid(later.log_odds(one)).mean() - later.correct.mean()) for one in (start, accepted[-1])]
    assert gaps[1] < gaps[0] / 3


def test_each_kind_of_candidate_has_places_of_its_own():
    on = Trials(Recalibrator("cwmcs", memory=Memory(rows=1000)), in_force(), -1.0, most=2, alpha=1e-300)
    window = stream(1.7)
    for end in range(100, 1501, 100):
        on.look(window.take(np.arange(end)))
    kept = [keeps_order(on.incumbent, one.refit.point) for one in on.on_trial]
    assert sorted(kept) == [False, False, True, True]
    for one in on.spendings:
        assert sum(each.purse == one.purse for each in on.spendings if each.number <= one.number) == one.turn
    assert {one.trial.alpha for one in on.on_trial} == {0.5e-300}
    again = turns_of([asdict(one) for one in on.spendings])
    assert again == on.turns
    assert set(again) == {"same order", "other order"}


def test_no_alpha_is_spent_twice_after_another_method_or_by_another_version():
    old = turns_of([{"number": 3}, {"number": 3, "verdict": "refuse"}, {"selections": 2}])
    assert old == {"any": 3}
    for method, turn, alpha in (("cwmcs", 4, 0.025), ("rank_preserving", 4, 0.05)):
        on = Trials(Recalibrator(method, memory=Memory(rows=1000)), in_force(), -1.0, turns=dict(old))
        on.look(stream(1.7))
        assert {one.turn for one in on.spendings} == {turn}
        assert {one.trial.alpha for one in on.on_trial} == {alpha}
        assert min(one.number for one in on.spendings) == 4
    on = Trials(Recalibrator(memory=Memory(rows=1000)), in_force(), -1.0, turns={"same order": 2, "other order": 7})
    on.look(stream(1.7))
    assert [(one.number, one.turn) for one in on.spendings] == [(10, 8)]


def test_candidates_are_numbered_and_the_oldest_makes_room():
    logits, label = made_up(4000, seed=2)
    sharp = np.where(np.arange(4000) // 200 % 2, 2.5, 0.4)[None, :, None]  # now this way, now the other
    window = served((logits * sharp).astype(np.float32), label, BARS)
    recalibrator = Recalibrator(memory=Memory(rows=150, adaptive=False))
    on = Trials(recalibrator, in_force(), -1.0, every=100, most=3, alpha=1e-300)  # so little that none is ever accepted
    seen = set()
    for end in range(100, 4001, 100):
        assert not [one for one in on.look(window.take(np.arange(end))) if one.decision.verdict == "accept"]
        assert len(on.on_trial) <= 3
        seen |= {one.trial.number for one in on.on_trial}
    numbers = [one.trial.number for one in on.on_trial]
    assert numbers == sorted(numbers)
    assert len(numbers) == 3
    assert seen == set(range(1, on.opened + 1))
    assert on.opened >= 4
    on.drop(numbers[0])
    assert [one.trial.number for one in on.on_trial] == numbers[1:]


def test_a_candidate_like_one_that_is_on_trial_costs_nothing():
    window, on = stream(1.7), trials(every=100, alpha=1e-300)
    for end in range(500, 3001, 100):
        on.look(window.take(np.arange(end)))
    assert on.opened == 1
    assert on.on_trial[0].decision.rows > 2000


def test_a_candidate_that_its_own_rows_hardly_speak_for_costs_nothing():
    window, on = stream(1.0, seed=1, rows=4000), trials(every=200)  # the very rows that the incumbent was fitted on
    for end in range(200, 4001, 200):
        on.look(window.take(np.arange(end)))
    assert on.opened <= 5  # of 20 occasions


def test_a_calm_stream_changes_nothing():
    for seed in range(3):
        window, on = stream(1.0, seed=10 + seed), trials()
        for end in range(250, 3001, 250):
            assert not [one for one in on.look(window.take(np.arange(end))) if one.decision.verdict == "accept"]


def test_mistakes_are_named():
    with pytest.raises(InputError, match="every"):
        trials(every=0)
