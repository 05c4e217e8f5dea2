import numpy as np
import pytest
from offramp.runtime import calibration
from offramp.runtime.errors import InputError
from offramp.runtime.online.fitting.recalibrator import Recalibrator
from offramp.runtime.online.trials import Trials
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
    assert (on.opened, on.on_trial, on.fitted_until) == (0, [], best.refit.after)
    with pytest.raises(InputError, match="number"):
        on.promote(1)


def test_candidates_are_numbered_and_the_oldest_makes_room():
    window, on = stream(1.7), trials(every=100, most=3, alpha=1e-300)  # so little that none is ever accepted
    seen = set()
    for end in range(100, 2001, 100):
        assert not [one for one in on.look(window.take(np.arange(end))) if one.decision.verdict == "accept"]
        assert len(on.on_trial) <= 3
        seen |= {one.trial.number for one in on.on_trial}
    numbers = [one.trial.number for one in on.on_trial]
    assert numbers == sorted(numbers)
    assert len(numbers) == 3
    assert seen == set(range(1, on.opened + 1))
    assert on.opened >= 5
    on.drop(numbers[0])
    assert [one.trial.number for one in on.on_trial] == numbers[1:]


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
