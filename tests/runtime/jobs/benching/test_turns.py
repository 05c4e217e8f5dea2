"""Turns: everybody gets the same rows, nobody is always first, and a pace is kept; by a clock that nothing disturbs."""

import numpy as np
import pytest
from offramp.runtime.jobs.benching.turns import FEWEST_ROUNDS, Clock, middle, take_turns


class Hours:
    """A clock that goes on only when somebody works or sleeps."""

    def __init__(self):
        self.time, self.slept, self.calls = 0.0, [], []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.time += seconds

    def worker(self, name, seconds):
        def run(batch):
            self.calls.append((name, batch))
            self.time += seconds * batch

        return run

    @property
    def clock(self):
        return Clock(lambda: self.time, self.sleep)


def turns(hours, units, seconds, pace=None, **costs):
    runs = {name: hours.worker(name, cost) for name, cost in costs.items()}
    taken = take_turns(runs, units, seconds=seconds, pace=pace, clock=hours.clock)
    warm = 2 * min(2, len(units[0]))
    return taken, hours.calls[warm:]


def test_each_has_the_seconds_of_its_own_runs():
    taken, _ = turns(Hours(), [[1, 3]], 100, fast=0.5, slow=2.0)
    assert np.allclose(taken["fast"], 1.0), "the mean of a unit's batches"
    assert np.allclose(taken["slow"], 4.0)


def test_all_take_their_turn_at_the_same_batches_and_the_order_rotates():
    _, calls = turns(Hours(), [[1, 2], [3, 4]], 1, a=0.1, b=0.1)
    rounds = [calls[k : k + 4] for k in range(0, len(calls), 4)]
    for k, one in enumerate(rounds):
        unit = [[1, 2], [3, 4]][k % 2]
        assert sorted(one) == sorted([(name, batch) for name in "ab" for batch in unit])
        assert one[0][0] == "ab"[k % 2]


def test_it_stops_when_the_time_is_up_but_not_before_five_rounds():
    hours = Hours()
    taken, _ = turns(hours, [[1]], 100, a=1.0, b=1.0)
    assert len(taken["a"]) == 50
    assert len(turns(Hours(), [[1]], 0.0, a=1000.0)[0]["a"]) == FEWEST_ROUNDS


def test_a_paced_row_comes_when_it_is_due_and_the_turn_changes_with_each():
    hours = Hours()
    _, calls = turns(hours, [[1, 1]], 0.0, pace=1.0, a=0.25, b=0.25)
    assert np.allclose(hours.slept, [1.0, *[0.75] * (len(hours.slept) - 1)])
    assert [name for name, _ in calls[:6]] == ["a", "b", "b", "a", "a", "b"]


def test_who_is_late_is_not_made_up_for():
    hours = Hours()
    turns(hours, [[1]], 0.0, pace=1.0, slow=5.0)
    assert hours.slept[1:] == [0.0] * (len(hours.slept) - 1) or np.allclose(hours.slept[1:], 0.0)


def test_a_median_has_an_interval_around_it():
    values = np.random.default_rng(0).normal(10, 1, 200)
    found = middle(values)
    assert found.low < found.value == np.median(values) < found.high
    assert found.high - found.low < 1
    assert middle(np.full(5, 3.0)).low == pytest.approx(3.0)
