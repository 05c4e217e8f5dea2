"""Fair timing: everybody takes a turn at the same rows in each round, and ratios are formed within it."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from offramp.runtime.arrays import Array, Floats
from offramp.runtime.jobs.benching.rows import Unit

FEWEST_ROUNDS, MOST_ROUNDS = 5, 400
_RESAMPLES = 2000
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Middle:
    """A median over rounds with its 95% interval, by resampling the rounds."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Clock:
    """now: seconds. sleep: for so many."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], object] = time.sleep


def take_turns(
    runs: Mapping[Name, Callable[[Mapping[str, Any]], object]],
    units: Sequence[Unit],
    *,
    seconds: float,
    pace: float | None = None,
    clock: Clock | None = None,
    progress: Callable[[], None] | None = None,
) -> dict[Name, Floats]:
    """Seconds a batch, by name, one a round: each round is one unit, at which all take their turn.

    The order is rotated from round to round. A unit's batches are averaged. seconds: about how long
    this may take, though there are five rounds at least. pace: seconds between the starts of two batches, so that
    caches and threads go cold in between; the turns then change after each batch. progress: called after each
    round.
    """
    clock = clock or Clock()
    order = list(runs)
    for name in order:  # what is made at the first run isn't what serving pays
        for batch in units[0][:2]:
            runs[name](batch)
    taken: dict[Name, list[float]] = {name: [] for name in order}
    started = due = clock.now()
    turn = 0
    for done in range(MOST_ROUNDS):
        unit = units[done % len(units)]
        spent = dict.fromkeys(order, 0.0)
        # Paced, all meet a row one after the other; else each goes through the whole unit, as a busy server would.
        for batches in [[batch] for batch in unit] if pace else [unit]:
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                for batch in batches:
                    if pace:
                        due = max(due + pace, clock.now())
                        clock.sleep(max(0.0, due - clock.now()))
                    before = clock.now()
                    runs[name](batch)
                    spent[name] += clock.now() - before
            turn += 1
        for name in order:
            taken[name].append(spent[name] / len(unit))
        if progress is not None:
            progress()
        if done + 1 >= FEWEST_ROUNDS and clock.now() - started >= seconds:
            break
    return {name: np.array(each) for name, each in taken.items()}


def middle(values: Array, seed: int = 0) -> Middle:
    """The median of (rounds,) values."""
    picks = np.random.default_rng(seed).integers(0, len(values), (_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[picks], axis=1), [0.025, 0.975])
    return Middle(float(np.median(values)), float(low), float(high))
