"""Rows of several requests as one batch: shorter ones are filled up where the bundle says that this changes nothing."""

import bisect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import Manifest
from offramp.runtime.inputs import Arrays
from offramp.server.scheduling.job import Rows

# Sizes that lengths are filled up to. A third of a row's cost at most is spent on its neighbour's length.
_STEPS = sorted({*range(1, 5), *(round(base * 2**k) for k in range(1, 24) for base in (2, 2.5, 3, 3.5))})


class Padding:
    """Which lengths of a bundle's rows may share a batch."""

    def __init__(self, manifest: Manifest) -> None:
        self._inputs = manifest.inputs
        self._axes = manifest.axes[1:]
        self._numbers = {axis: k for k, axis in enumerate(self._axes)}
        long = [i.pad for i in manifest.inputs if set(i.shape) & set(self._axes)]
        carried = [
            t.pad for t in manifest.tensors.values() if any(axis in str(d) for d in t.shape for axis in self._axes)
        ]
        self.allowed = bool(long) and None not in long and None not in carried
        self._longest = [0] * len(self._axes)

    def sizes(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The axes' sizes in their order, the batch apart."""
        return tuple(sizes[axis] for axis in self._axes)

    def named(self, sizes: Sequence[int]) -> dict[str, int]:
        return dict(zip(self._axes, sizes, strict=True))

    def padded(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """What rows of these sizes may be filled up to; themselves where that isn't allowed.

        Never more than what has been seen: a model may have no more places than its longest row.
        """
        if not self.allowed:
            return sizes
        for k, size in enumerate(sizes):
            self._longest[k] = max(self._longest[k], size)
        return tuple(min(_step(size), most) for size, most in zip(sizes, self._longest, strict=True))

    def gather(self, parts: Sequence[Rows], sizes: tuple[int, ...]) -> Arrays:
        """Rows of several requests' inputs as one batch of these sizes, part after part."""
        if len(parts) == 1 and parts[0].sizes == sizes and parts[0].at is None:
            return dict(parts[0].state)
        count = sum(map(len, parts))
        full = all(part.sizes == sizes for part in parts)
        made: Arrays = {}
        for given in self._inputs:
            axis = given.batch_axis
            shape = [count if k == axis else d if isinstance(d, int) else sizes[self._numbers[d]]
                     for k, d in enumerate(given.shape)]  # fmt: skip
            out = np.empty(shape, given.dtype) if full else np.full(shape, given.pad or 0, given.dtype)
            start = 0
            for part in parts:
                stop = start + len(part)
                array: NDArray[Any] = part.state[given.name]
                rows = array if part.at is None else np.take(array, part.at, axis=axis)
                place = (slice(start, stop), *map(slice, rows.shape[1:])) if not axis else tuple(
                    slice(start, stop) if k == axis else slice(size) for k, size in enumerate(rows.shape)
                )  # fmt: skip
                out[place] = rows
                start = stop
            made[given.name] = out
        return made


def _has_axis(shape: Sequence[int | str], axes: Sequence[str]) -> bool:
    """Whether any of the axes is in a shape, be it in an expression."""
    return any(isinstance(d, str) and re.search(rf"\b{axis}\b", d) for d in shape for axis in axes)


def _step(size: int) -> int:
    """The next of the steps, or the size itself beyond the last."""
    at = bisect.bisect_left(_STEPS, size)
    return _STEPS[at] if at < len(_STEPS) else size
