"""Bins: equal-width and right-closed, or equal-mass in the stable order."""

from math import ceil
from typing import Literal

import numpy as np
from offramp.runtime.arrays import Array, Floats, Ints
from offramp.runtime.errors import InputError

Binning = Literal["quantile", "fixed"]


def check_bins(bins: int) -> int:
    if isinstance(bins, bool) or int(bins) != bins or bins < 1:
        raise InputError(f"bins: expected a whole number of at least 1, got {bins!r}.")
    return int(bins)


def equal_width(values: Floats, bins: int) -> Ints:
    """Bin b of values in ((b − 1)/M, b/M], 0-based; 0 falls in the first, 1 in the last.

    A value that is an edge as float32 or float16 spells it (0.6 is 0.60000002 there) lies on that edge.
    """
    number = np.ceil(values * bins).astype(np.int64) - 1
    np.clip(number, 0, bins - 1, out=number)
    # values·M rounds: 0.7·10 = 7.000000000000001. The edges b/M decide.
    edges = np.arange(bins + 1) / bins
    number -= (number > 0) & (values <= edges[number])
    number += (number < bins - 1) & (values > edges[number + 1])
    for kind in (np.float32, np.float16):
        number -= (number > 0) & (values == edges.astype(kind).astype(np.float64)[number])
    return number


def equal_mass(values: Floats, bins: int) -> Ints:
    """Bin of each value when the stable order is cut like np.array_split: sizes differ by at most 1.

    With more bins than values each value has its own.
    """
    rows = len(values)
    number = np.empty(rows, np.int64)
    size, longer = divmod(rows, bins)
    sizes = np.full(bins, size)
    sizes[:longer] += 1
    number[np.argsort(values, kind="stable")] = np.repeat(np.arange(bins), sizes)
    return number


def quantile(values: Array, bins: int) -> Ints:
    """Bin j of the sorted (stable) ranks (j − 1)n/m < i ≤ jn/m, 0-based."""
    rows = len(values)
    number = np.empty(rows, np.int64)
    number[stable_order(values)] = np.repeat(np.arange(bins), quantile_sizes(rows, bins))
    return number


def quantile_sizes(rows: int, bins: int) -> Ints:
    """(m,) number of ranks in each quantile bin, in whole numbers: jn/m is never rounded."""
    edges = np.arange(bins + 1) * rows // bins
    sizes: Ints = np.diff(edges)
    return sizes


def stable_order(values: Array) -> Ints:
    """Indices that sort values ascending, equal ones in the order they came."""
    if values.dtype == np.float32 and len(values) < 1 << 32 and (values >= 0).all():
        # The bits of non-negative floats sort like the floats; with the row number below them numpy's
        # vectorised uint64 sort is stable by construction and several times faster than argsort.
        keys = (values + np.float32(0)).view(np.uint32).astype(np.uint64) << np.uint64(32)
        keys |= np.arange(len(values), dtype=np.uint64)
        keys.sort()
        return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return np.argsort(values, kind="stable")


def default_bins(rows: int) -> int:
    """⌈n^(1/3)⌉, the Truthful errors' default; at least 1."""
    return max(1, ceil(float(np.cbrt(rows)) - 1e-9))


def assign(values: Floats, bins: int | None, binning: Binning) -> tuple[Ints, int]:
    """Bin numbers and how many bins, for the outcome-independent binnings of the truthful errors."""
    m = default_bins(len(values)) if bins is None else check_bins(bins)
    if binning == "quantile":
        return quantile(values, m), m
    if binning == "fixed":
        return equal_width(values, m), m
    raise InputError(f'binning: expected "quantile" or "fixed", got {binning!r}.')
