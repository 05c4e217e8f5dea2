"""The lanes that batches go through on a device."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from offramp.kernels.compact import Report
from offramp.runtime.execution.calls import Calls
from offramp.runtime.execution.device.graphs import Graphs
from torch import Tensor

IN_FLIGHT = 2
"""Batches on a device at once: while the host hears how many rows of one go on, the device works on the other."""


def to_host(tensor: Tensor) -> Tensor:
    """A copy on its way to the host, there once an event behind it has come."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class Lane:
    """What one batch in flight has for itself: a stream, reports, and pinned memory that its inputs pass through."""

    def __init__(self, number: int, graphs: Graphs) -> None:
        self.number = number
        self.stream = graphs.stream(number)
        self.device = graphs.device
        self._reports: dict[int, Report] = {}
        self._kept: dict[tuple[str, tuple[int, ...], torch.dtype], tuple[Tensor, Tensor]] = {}
        self._flags: Tensor | None = None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Everything inside is queued on this lane's stream."""
        if self.stream is None:
            yield
        else:
            with torch.cuda.stream(self.stream):
                yield

    def wait(self) -> None:
        """Until everything queued on this lane has been done."""
        if self.stream is not None:
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.stream)
            event.synchronize()

    def report(self, rows: int) -> Report:
        if rows not in self._reports:
            self._reports[rows] = Report(rows, self.device)
        return self._reports[rows]

    def upload(self, name: str, values: Any, rows: int, axis: int) -> Tensor:
        """An array on the device, its last row repeated up to `rows`, in memory that is this lane's for that shape."""
        host = torch.from_numpy(np.require(values, requirements="W"))  # torch warns of read-only arrays
        shape = (*host.shape[:axis], rows, *host.shape[axis + 1 :])
        key = (name, shape, host.dtype)
        if key not in self._kept:
            pinned = torch.empty(shape, dtype=host.dtype, pin_memory=self.stream is not None)
            # On CPU the tensor that is computed on is the staging itself.
            there = pinned if self.stream is None else torch.empty(shape, dtype=host.dtype, device=self.device)
            self._kept[key] = pinned, there
        pinned, there = self._kept[key]
        held = host.shape[axis]
        pinned.narrow(axis, 0, held).copy_(host)
        if held < rows:
            pinned.narrow(axis, held, rows - held).copy_(host.narrow(axis, held - 1, 1))
        if there is not pinned:
            there.copy_(pinned, non_blocking=True)
        return there

    def live(self, rows: int, bucket: int) -> Tensor | None:
        """Flags of the rows of a bucket that are real; None if all are."""
        if rows == bucket:
            return None
        if self._flags is None or len(self._flags) < 2 * bucket:
            self._flags = torch.cat([torch.ones(2 * bucket), torch.zeros(2 * bucket)]).bool().to(self.device)
        middle = len(self._flags) // 2
        return self._flags[middle - rows : middle - rows + bucket]


class Lanes:
    """The lanes of one device, taken by calls and given back."""

    def __init__(self, graphs: Graphs, calls: Calls) -> None:
        self._calls = calls
        self._closed = False
        self._free: queue.Queue[Lane] = queue.Queue()
        for number in range(IN_FLIGHT):
            self._free.put(Lane(number, graphs))

    @contextmanager
    def taken(self, wanted: int) -> Iterator[list[Lane]]:
        """One lane, waited for if need be, and another if it is wanted and free just now."""
        if self._closed or self._calls.forked:
            raise self._calls.refusal()
        taken = [self._free.get()]
        try:
            while len(taken) < min(wanted, IN_FLIGHT):
                try:
                    taken.append(self._free.get_nowait())
                except queue.Empty:
                    break
            yield taken
        finally:
            for lane in taken:
                self._free.put(lane)

    def close(self) -> None:
        self._closed = True
