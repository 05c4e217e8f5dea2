"""Rows on their way between two blocks, gathered only when a batch is formed and only when that pays."""

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.execution.answers import Ids
from offramp.runtime.inputs import Arrays

# Below, malloc has the memory at hand; above, keeping it would cost more than the page faults.
_SMALLEST_SCRATCH, _LARGEST_SCRATCH = 1 << 16, 1 << 26

GONE = -1
"""Id of a row that has been answered and only rides along in an array that wasn't worth copying."""

# What a CPU computes in the time it copies one byte, about: 10 GFLOP/s a thread against 10 GB/s read and written.
_FLOPS_PER_COPIED_BYTE = 2.0


def gathering_pays(live: int, gone: int, row_bytes: int, row_flops: int) -> bool:
    """Is copying the live rows out cheaper than computing the gone ones along with them?"""
    return gone > 0 and gone * row_flops > live * row_bytes * _FLOPS_PER_COPIED_BYTE


class Scratch(threading.local):
    """Memory that gathered rows are copied into, a thread's own, used again and again.

    A fresh array of a megabyte is a fresh mapping, and its page faults cost as much as the copy. Two buffers
    a tensor take turns, since a tensor that is only passed on is gathered from where it was gathered to.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], NDArray[np.uint8]] = {}
        self._turn: dict[str, int] = {}

    def gather(self, name: str, array: NDArray[Any], positions: Ids, axis: int) -> NDArray[Any]:
        """The rows at ascending positions, valid until `name` is gathered the second time from now.

        Consecutive rows along the first axis are a view.
        """
        if axis == 0 and _is_run(positions):
            return array[positions[0] : positions[-1] + 1]
        shape = (*array.shape[:axis], len(positions), *array.shape[axis + 1 :])
        size = math.prod(shape) * array.itemsize
        if not _SMALLEST_SCRATCH <= size <= _LARGEST_SCRATCH:
            return np.take(array, positions, axis=axis, mode="clip")
        turn = self._turn[name] = 1 - self._turn.get(name, 0)
        buffer = self._buffers.get((name, turn))
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name, turn] = np.empty(size + size // 4, np.uint8)
        out = buffer[:size].view(array.dtype).reshape(shape)
        # mode="clip" skips numpy's second pass that checks bounds, and lets it write straight into `out`.
        return np.take(array, positions, axis=axis, out=out, mode="clip")


@dataclass
class _Waiting:
    """Arrays of one earlier block run, and which of their rows wait. positions None: all of them, in order."""

    arrays: Arrays
    positions: Ids | None
    ids: Ids  # one a waiting row; GONE only where positions is None

    def __len__(self) -> int:
        return len(self.ids)


class BlockQueue:
    """The queue in front of one block. Rows keep their order of arrival."""

    def __init__(self, batch_axes: Mapping[str, int]) -> None:
        self._axes = batch_axes
        self._sources: deque[_Waiting] = deque()
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def push(self, arrays: Arrays, ids: Ids, positions: Ids | None = None) -> None:
        """Queue rows of `arrays`: those at `positions`, or all of them (then an id may be GONE).

        The arrays are referred to, not copied; only those this block's queue knows an axis of are kept.
        """
        kept = {name: arrays[name] for name in self._axes}
        self._sources.append(_Waiting(kept, positions, ids))
        self._rows += len(ids)

    def take(self, limit: int) -> tuple[Arrays, Ids]:
        """Up to `limit` rows, removed from the queue: their arrays and ids."""
        first = self._sources[0]
        if first.positions is None and len(first) <= limit and (len(self._sources) == 1 or len(first) == limit):
            self._sources.popleft()
            self._rows -= len(first)
            return first.arrays, first.ids  # a whole array as it is: nothing is copied
        parts: list[_Waiting] = []
        room = limit
        while self._sources and room:
            source = self._sources.popleft()
            part, rest = _split(source, room)
            if rest is not None:
                self._sources.appendleft(rest)
            parts.append(part)
            room -= len(part)
            self._rows -= len(part)
        live = [_live(part) for part in parts]
        rows = gather_rows([(part.arrays, part.positions) for part in live], self._axes)
        return rows, np.concatenate([part.ids for part in live])


def _split(source: _Waiting, room: int) -> tuple[_Waiting, _Waiting | None]:
    if len(source) <= room:
        return source, None
    positions = np.arange(len(source)) if source.positions is None else source.positions
    return (
        _Waiting(source.arrays, positions[:room], source.ids[:room]),
        _Waiting(source.arrays, positions[room:], source.ids[room:]),
    )


def _live(part: _Waiting) -> _Waiting:
    """Once rows are copied anyway, those that are gone are left behind."""
    alive = part.ids != GONE
    if alive.all():
        return part
    positions = np.arange(len(part)) if part.positions is None else part.positions
    return _Waiting(part.arrays, positions[alive], part.ids[alive])


def gather_rows(parts: Sequence[tuple[Mapping[str, NDArray[Any]], Ids | None]], axes: Mapping[str, int]) -> Arrays:
    """Rows of several batches as one, part after part.

    parts: arrays by name, and the positions of the rows to take; None takes all of them. axes: {tensor: batch axis}.
    """
    return {name: _gathered([(arrays[name], at) for arrays, at in parts], axis) for name, axis in axes.items()}


def _gathered(parts: list[tuple[NDArray[Any], Ids | None]], axis: int) -> NDArray[Any]:
    first, positions = parts[0]
    if len(parts) == 1 and positions is not None and _is_run(positions) and axis == 0:
        return first[positions[0] : positions[-1] + 1]  # consecutive rows are a view
    counts = [array.shape[axis] if at is None else len(at) for array, at in parts]
    out = np.empty((*first.shape[:axis], sum(counts), *first.shape[axis + 1 :]), first.dtype)
    start = 0
    for (array, at), count in zip(parts, counts, strict=True):
        target = out[(slice(None),) * axis + (slice(start, start + count),)]
        if at is None:
            target[...] = array
        else:
            # mode="clip" skips the bounds check's second pass and lets numpy write straight into out.
            np.take(array, at, axis=axis, out=target, mode="clip")
        start += count
    return out


def _is_run(positions: Ids) -> bool:
    """Whether they follow on each other. Those of several requests may come in any order: first and last don't tell."""
    count = len(positions)
    if not count or int(positions[-1] - positions[0]) + 1 != count:
        return False
    return count < 3 or bool((positions[1:] - positions[:-1] == 1).all())
