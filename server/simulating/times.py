"""What a batch takes, from what batches took."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from offramp.runtime.arrays import Floats


@dataclass(frozen=True)
class Timed:
    """A batch that has run several times. flops: of its rows, as far as they went, at the batch's sizes."""

    rows: int
    flops: float
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class BatchTimes:
    """Seconds of a batch: a straight line in its FLOPs at each number of rows, and a straight line between those.

    rows: (R,) that were timed, rising. start, slope: (R,) seconds, and seconds a FLOP. jitter: what batches took, each
    as much as its line says: the same batch never takes the same time twice, and a p99 is made of that.
    """

    rows: Floats
    start: Floats
    slope: Floats
    jitter: Floats

    def seconds(self, rows: int, flops: float) -> float:
        """Of a batch that nothing disturbs. Beyond the largest that was timed, as many times that as it has rows."""
        lines = self._lines
        last = len(lines) - 1
        if rows >= lines[last][0]:
            most, start, slope = lines[last]
            return start * rows / most + slope * flops
        k = 0
        while lines[k + 1][0] <= rows:
            k += 1
        (low, start, slope), (high, start_, slope_) = lines[k], lines[k + 1]
        share = max(0.0, (rows - low) / (high - low))
        return start + slope * flops + share * (start_ - start + (slope_ - slope) * flops)

    @cached_property
    def _lines(self) -> list[tuple[float, float, float]]:
        return list(zip(self.rows.tolist(), self.start.tolist(), self.slope.tolist(), strict=True))


def fit(timed: Sequence[Timed]) -> BatchTimes:
    """From batches that were timed, several of each number of rows."""
    counts = sorted({one.rows for one in timed})
    lines, jitter = [], []
    for count in counts:
        those = [one for one in timed if one.rows == count]
        flops = np.array([one.flops for one in those])
        # What disturbs one run is jitter; the line is of those that weren't.
        seconds = np.array([min(one.seconds) for one in those])
        spread = flops - flops.mean()
        slope = float(spread @ seconds / (spread @ spread)) if flops.std() > 0.02 * flops.mean() else 0.0
        # More FLOPs don't take less time, and no batch takes less than nothing.
        slope = min(max(slope, 0.0), float(seconds.mean() / flops.mean()) if flops.mean() else 0.0)
        start = float(seconds.mean() - slope * flops.mean())
        lines.append((float(count), start, slope))
        jitter.append((np.array([one.seconds for one in those]) / (start + slope * flops)[:, None]).ravel())
    rows, start_, slope_ = np.array(lines).T
    return BatchTimes(rows, start_, slope_, np.concatenate(jitter))
