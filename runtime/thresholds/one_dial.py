"""Rules with one dial: the same bar at every open exit, all bars tried in one pass over the rows.

Thresholds of five exits searched freely lost 0.76 points on CLINC150's test rows where 0.5 were allowed on 1,200 rows
of val; with one common bar the loss was at most 0.2, at a cost a tenth higher. What a single dial can't say, which
exits to ask at all, is tried as sets.
"""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
from offramp.runtime.arrays import Array, Floats, Ints

# With more exits than this, sets grow an exit at a time.
MOST_EXITS_FOR_ALL_SETS = 10


def exit_sets(exits: int) -> Iterator[tuple[int, ...]]:
    """Every set of early exits that may be open beside the last, the empty one first. exits: at most 10."""
    early = range(exits - 1)
    return itertools.chain.from_iterable(itertools.combinations(early, size) for size in range(exits))


def along(scores: Array, quantities: Mapping[str, Array], bars: Floats) -> tuple[dict[str, Floats], Ints]:
    """Sums over rows, under every bar at once, of what a row has at the exit that it leaves at.

    scores: (m, N) of the open early exits in order, m may be 0. quantities: by name (m + 1, N), of those exits and
    the last. bars: (K,) ascending, −inf lets everybody leave at the first.
    Returns the sums by name, (K,) each, and how many rows leave at each early exit, (m, K).

    A row leaves by exit j if the largest score up to there reaches the bar; Σ_i v_i is then telescoped over the exits.
    """
    sums = {name: np.full(len(bars), float(values[-1].sum())) for name, values in quantities.items()}
    gone = np.zeros((len(scores) + 1, len(bars)), np.int64)
    for j, highest in enumerate(np.maximum.accumulate(scores, axis=0) if len(scores) else ()):
        place = np.searchsorted(bars, highest, side="right")
        gone[j + 1] = _from_above(place, None, len(bars))
        for name, values in quantities.items():
            sums[name] += _from_above(place, values[j] - values[j + 1], len(bars))
    return sums, np.diff(gone, axis=0)


def _from_above(place: Ints, weights: Array | None, bars: int) -> Floats:
    """(K,) Σ of weights (or rows) whose place is beyond each bar's."""
    counts = np.bincount(place, weights, minlength=bars + 1)
    reached: Floats = counts[::-1].cumsum()[::-1][1:]
    return reached


def between_values(values: Array, steps: int) -> Floats:
    """Up to `steps` bars that no value sits on: halfway between neighbours, at even quantiles of the distinct ones.

    A score moves in its last bits with the rows beside it: a bar on a row's own score would flip that row.
    """
    distinct = np.unique(np.asarray(values, np.float64))
    if len(distinct) < 2:
        return np.zeros(0)
    upper = np.unique(np.linspace(1, len(distinct) - 1, steps).round().astype(np.int64))
    # Halves first: the sum of two scores may be beyond float64's largest.
    bars: Floats = distinct[upper - 1] / 2 + distinct[upper] / 2
    return bars


def between_rows(scores: Array, thresholds: tuple[float, ...]) -> tuple[float, ...]:
    """The same rule on these rows, each finite threshold halfway between the last that leaves and the next that stays.

    scores: (J, N). An exit where nobody leaves is closed; where everybody who comes leaves, the threshold lies as far
    below the lowest score as the next one lies above it.
    """
    playing = np.arange(scores.shape[1])
    moved: list[float] = []
    for s, bar in zip(scores[:-1], thresholds[:-1], strict=True):
        here = np.asarray(s[playing], np.float64)
        if not np.isfinite(bar):
            moved.append(bar)
            playing = playing[:0] if bar < 0 else playing
            continue
        leaves = here >= bar
        if not leaves.any():
            moved.append(float("inf"))
            continue
        lowest, below = float(here[leaves].min()), here[~leaves]
        if len(below):
            moved.append(lowest / 2 + float(below.max()) / 2)
        else:
            above = here[here > lowest]
            moved.append(lowest - (float(above.min()) - lowest if len(above) else 1.0) / 2)
        playing = playing[~leaves]
    return (*moved, thresholds[-1])
