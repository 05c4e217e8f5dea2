"""One of a bundle's graphs on a device, made ready for a batch of a certain size."""

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from offramp.runtime.bundle import Block, Bundle, Segment
from torch import Tensor

Tensors = dict[str, Tensor]

_MOST_PREPARED = 512


class Prepared(ABC):
    """A graph at one size, for one batch in flight.

    inputs: the tensors that must hold its inputs when it is launched; None: any tensors will do.
    out_of_range: a tensor () that says after a launch whether an index was out of range, if that can be.
    """

    inputs: Tensors | None = None
    out_of_range: Tensor | None = None

    @abstractmethod
    def launch(self, state: Mapping[str, Tensor]) -> Tensors:
        """Queue one run on the current stream; the outputs by name, there when the stream gets to them."""

    def run(self, state: Mapping[str, Tensor]) -> Tensors:
        """Launch on a state, copied to where the graph wants it if it isn't there yet."""
        if self.inputs is not None:
            for name, target in self.inputs.items():
                if state[name].data_ptr() != target.data_ptr():
                    target.copy_(state[name])
        return self.launch(state)


class Graphs(ABC):
    """A bundle's graphs on one device, opened when first needed. Lanes are the batches in flight, numbered from 0."""

    device: torch.device
    fingerprint: str

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._prepared: OrderedDict[Any, Prepared] = OrderedDict()
        self._lock = threading.Lock()

    @abstractmethod
    def open(self, graph: Block | Segment) -> None:
        """Read a graph, so that what is wrong with it is said before anything runs."""

    @property
    @abstractmethod
    def opened(self) -> frozenset[str]:
        """Files of the graphs that have been read."""

    @abstractmethod
    def stream(self, lane: int) -> Any:
        """The CUDA stream of a lane, None on CPU."""

    @abstractmethod
    def prepare(
        self, graph: Block | Segment, state: Tensors, outputs: tuple[str, ...], lane: int, *, warm: bool
    ) -> Prepared:
        """A graph for states of these shapes. warm: it will be used again and again, so make the most of it."""

    @abstractmethod
    def once(
        self, graph: Block | Segment, state: Tensors, gate: Tensors, outputs: tuple[str, ...], lane: int
    ) -> tuple[Tensors, Tensor | None]:
        """Run a graph as it is, its own gate included; the outputs and what `Prepared.out_of_range` says."""

    def prepared(
        self, graph: Block | Segment, state: Tensors, outputs: tuple[str, ...], lane: int, *, warm: bool = False
    ) -> Prepared:
        """As `prepare`, kept for the next batch of the same shapes; the least recently used go."""
        key = (graph.file, outputs, lane, tuple(tuple(state[name].shape) for name in graph.inputs))
        with self._lock:
            found = self._prepared.get(key)
            if found is not None:
                self._prepared.move_to_end(key)
        if found is None or (warm and found.inputs is None):
            found = self.prepare(graph, state, outputs, lane, warm=warm)
            with self._lock:
                self._prepared[key] = found
                while len(self._prepared) > _MOST_PREPARED:
                    self._prepared.popitem(last=False)
        return found

    @property
    def prepared_rows(self) -> frozenset[int]:
        """Batch sizes that something was made ready for."""
        return frozenset(shapes[0][0] for _, _, _, shapes in self._prepared)

    def landing(
        self, graph: Block | Segment, shapes: Mapping[str, tuple[int, ...]], outputs: tuple[str, ...], lane: int
    ) -> Tensors | None:
        """Where a state of these shapes should be gathered to, so that nothing has to be copied again."""
        with self._lock:
            found = self._prepared.get((graph.file, outputs, lane, tuple(shapes[name] for name in graph.inputs)))
        return None if found is None else found.inputs

    def close(self) -> None:
        """Let everything go. Batches that are under way finish."""
        with self._lock:
            self._prepared.clear()
