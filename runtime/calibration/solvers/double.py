"""Fits see float64 whatever the logits' precision, so that equal numbers give equal parameters."""

from collections.abc import Callable

import numpy as np
from offramp.runtime import arrays
from offramp.runtime.arrays import Array, Floats


def in_double(formula: Callable[[Array], Array], z: Array) -> Floats:
    """(N,) float64 `formula` of (N, C) logits, block by block: no float64 copy of all of them."""
    out = np.empty(len(z))

    def work(rows: slice) -> None:
        out[rows] = formula(z[rows].astype(np.float64))

    arrays.for_each_block(work, *z.shape)
    return out
