"""Since when labelled rows have been alike: what was before a change says nothing about what is now."""

import math

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime.arrays import Floats

_DELTA = 0.01
_LEAST = 30  # rows on either side of a change: fewer have no variance to speak of


def alike_since(*series: ArrayLike) -> int:
    """The first of the newest rows that are alike in every series; 0 where no change is seen.

    series: (n,) each, oldest row first, of values no more than 1 apart: what came minus what was expected, say.

    A window whose two parts, split anywhere, have means farther apart than the bound of ADWIN (Bifet & Gavaldà, SDM
    2007, section 3.3) is cut, where the split is most significant; and what is left is looked at again:
        |mean_0 − mean_1| ≥ √(2σ²L/m) + 2L/(3m), 1/m = 1/n_0 + 1/n_1, L = ln(2n/δ), δ = .01,
    σ² the pooled variance within the parts. A false cut forgets rows that would have done no harm, and no more.
    """
    values = [np.asarray(one, np.float64) for one in series]
    start = 0
    while cut := max(_cut(one[start:]) for one in values):
        start += cut
    return start


def _cut(r: Floats) -> int:
    n = len(r)
    if n < 2 * _LEAST:
        return 0
    first = np.arange(_LEAST, n - _LEAST + 1)
    second = n - first
    sums = np.cumsum(r)[first - 1]
    whole, whole_squares = float(r.sum()), float((r**2).sum())
    gap = sums / first - (whole - sums) / second
    within = np.maximum(whole_squares - sums**2 / first - (whole - sums) ** 2 / second, 0.0) / n
    m = first * second / n
    level = math.log(2 * n / _DELTA)
    bound = np.sqrt(2 * within * level / m) + 2 * level / (3 * m)
    if not (np.abs(gap) >= bound).any():
        return 0
    return int(first[np.argmax(np.abs(gap) / bound)])
