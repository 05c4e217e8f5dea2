"""What was measured, to be drawn from: whole distributions, for means say nothing of a p99."""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from offramp.runtime.arrays import Floats

_LEAST = 1e-6  # seconds: what takes less is nothing
_AHEAD = 12  # samples that the one most alike is looked for among: as many as one moment's are


class Series:
    """Values in the order in which they were seen."""

    def __init__(self, times: Sequence[float], values: Sequence[float], keys: Sequence[float] = ()) -> None:
        """times: (n,) of each, rising, at least one. keys: (n,) what the values may depend on, if on anything."""
        self.times, self.values, self.keys = list(times), list(values), list(keys)

    def __len__(self) -> int:
        return len(self.values)


class Moment:
    """Some of the time that was recorded, gone through again: what comes next is what came next.

    Slow moments are slow for all, and one piece of work that is late is followed by others: drawn one by one, samples
    would lose that, and with it half of a p99 near the capacity.
    """

    def __init__(self, start: float) -> None:
        """start: in the series' time."""
        self._start = start
        self._at: dict[int, int] = {}  # by the series

    def next(self, series: Series, key: float = 0.0) -> float:
        """The next of its values; of series with keys the one of the next few that is most alike."""
        at = self._at.get(id(series))
        if at is None:
            at = bisect.bisect_left(series.times, self._start)
        count = len(series.values)
        if at >= count:
            at = 0
        self._at[id(series)] = at + 1
        if not series.keys:
            return series.values[at]
        keys, last = series.keys, min(at + _AHEAD, count)
        return series.values[min(range(max(0, last - _AHEAD), last), key=lambda k: abs(keys[k] - key))]


@dataclass(frozen=True)
class BatchLine:
    """Seconds of a batch: so many by itself, so many a row, so many a FLOP; none of them below 0."""

    own: float
    row: float
    flop: float

    def seconds(self, rows: float, flops: float) -> float:
        return self.own + self.row * rows + self.flop * flops


def fit_line(rows: Floats, flops: Floats, seconds: Floats) -> BatchLine:
    """The line that is off by the least share of what batches took. rows, flops, seconds: (n,), n at least 1."""
    columns = np.stack([np.ones_like(rows), rows, flops], axis=1)
    scale = np.maximum(columns.mean(0), 1e-300)
    best, least = np.array([seconds.mean(), 0.0, 0.0]), np.inf
    # Rows cost nothing less than nothing: of all subsets of the three the best whose parts are positive.
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
        scaled = (columns / scale)[:, chosen]
        found, guess = np.zeros(len(chosen)), seconds
        for _ in range(4):  # shares of the line rather than of single batches, which would favour the short ones
            found = np.linalg.lstsq(scaled / guess[:, None], seconds / guess, rcond=1e-9)[0]
            guess = np.maximum(scaled @ found, 1e-3 * seconds.mean())
        error = float(np.mean(((scaled @ found - seconds) / guess) ** 2))
        if (found >= 0).all() and error < least * (1 - 1e-6):
            best, least = np.zeros(3), error
            best[list(chosen)] = found / scale[list(chosen)]
    return BatchLine(*best.tolist())


@dataclass(frozen=True)
class Level:
    """What was seen at one load.

    rate: requests a second. seconds: for which it was looked at, which the series' times are of. onward, back: what a
    request's way to the engine took, and that of its answer. batches: how many times as long as its line says a batch
    took, with that as their key, by how many lanes were busy with it among them. woken, turned: what a lane took to
    begin a batch, if it slept when rows came, and if rows waited when it had done another. latencies: (n,) seconds of
    requests as their client saw them, at a server without a record; none of a closed loop.
    """

    rate: float
    seconds: float
    onward: Series
    back: Series
    batches: tuple[Series, ...]
    woken: Series
    turned: Series
    latencies: Floats = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True)
class PointTimes:
    """What was measured at an operating point.

    carried: requests a second on 64 connections. graph: whether rows went through the cascade graph. lines: by stage.
    levels: at least one, their rates rising.
    """

    carried: float
    graph: bool
    lines: tuple[BatchLine, ...]
    levels: tuple[Level, ...]

    def at(self, rate: float) -> Level:
        """What would be seen at a load, by the two whose rates are nearest; beyond those that were measured the last.

        The nearer one's samples in their order, each moved to what has the same rank at the load between: what waits
        for others grows with a load in proportion to what it is, so quantiles are interpolated by their logarithms.
        """
        levels = self.levels
        rates = [level.rate for level in levels]
        if rate <= rates[0] or rate >= rates[-1]:
            return levels[0 if rate <= rates[0] else -1]
        k = bisect.bisect_right(rates, rate) - 1
        share = (rate - rates[k]) / (rates[k + 1] - rates[k])
        near, far = (levels[k], levels[k + 1]) if share < 0.5 else (levels[k + 1], levels[k])
        share = min(share, 1 - share)

        def between(one: Series, other: Series) -> Series:
            return Series(one.times, _moved(one.values, other.values, share).tolist(), one.keys)

        return Level(
            rate,
            near.seconds,
            between(near.onward, far.onward),
            between(near.back, far.back),
            tuple(map(between, near.batches, far.batches)),
            between(near.woken, far.woken),
            between(near.turned, far.turned),
        )


def _moved(values: Sequence[float], others: Sequence[float], share: float) -> Floats:
    """Values, moved by a share of the way to those that have the same rank among others."""
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = (np.arange(len(values)) + 0.5) / len(values)
    logs = (np.log(np.maximum(each, _LEAST)) for each in (values, np.quantile(others, ranks)))
    return np.asarray(np.exp(np.average(list(logs), axis=0, weights=[1 - share, share])))
