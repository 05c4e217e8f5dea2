"""One of a bundle's graphs on a device, made ready for a batch of a certain size."""

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from offramp.runtime.bundle import Block, Bundle, Segment
from offramp.runtime.errors import BundleError, InputError, RuntimeUnavailable
from offramp.runtime.execution.device.torch.program import Program, Tensors, Weights, read_program
from torch import Tensor

# Capturing costs as much as some dozens of runs: shapes that weren't warmed up are captured when they keep coming.
_SIGHTINGS = 3
_MOST_PREPARED = 512
_capturing = threading.Lock()  # two captures at once would see each other's allocations


class Prepared(ABC):
    """A graph at one size, for one batch in flight.

    inputs: the tensors that must hold its inputs when it is launched; None: any tensors will do. astray: a tensor ()
    that says after a launch whether an index was out of range, if that can be.
    """

    inputs: Tensors | None = None
    astray: Tensor | None = None

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
        """Run a graph as it is, its own gate included; the outputs and what `Prepared.astray` says."""

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


class _Eager(Prepared):
    """A program run operation by operation."""

    def __init__(self, program: Program, outputs: tuple[str, ...]) -> None:
        self._program, self._outputs = program, outputs

    def launch(self, state: Mapping[str, Tensor]) -> Tensors:
        made, self.astray = self._program.run(state, self._outputs)
        return made


class _Captured(Prepared):
    """A program as one CUDA graph: on small batches launching its operations costs more than they do."""

    def __init__(self, program: Program, state: Tensors, outputs: tuple[str, ...], stream: Any, pool: Any) -> None:
        """pool: memory shared with other captures, None for its own."""
        self.inputs = {name: state[name] for name in program.inputs if name in state}
        with _capturing, torch.cuda.stream(stream):
            program.run(self.inputs, outputs)  # what is lazy in torch and cuBLAS happens here
            self._graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph(): that waits for the whole device first.
            shared = {} if pool is None else {"pool": pool}
            self._graph.capture_begin(**shared, capture_error_mode="thread_local")
            try:
                self._made, self.astray = program.run(self.inputs, outputs)
            finally:
                self._graph.capture_end()

    def launch(self, state: Mapping[str, Tensor]) -> Tensors:
        self._graph.replay()
        return self._made


class _Sighted(_Eager):
    """Run operation by operation until it has come often enough to be worth capturing."""

    def __init__(self, program: Program, outputs: tuple[str, ...], capture: Callable[[], Prepared]) -> None:
        super().__init__(program, outputs)
        self._capture, self._left = capture, _SIGHTINGS
        self._captured: Prepared | None = None

    def run(self, state: Mapping[str, Tensor]) -> Tensors:
        if self._captured is None:
            self._left -= 1
            if self._left > 0:
                return self.launch(state)
            self._captured = self._capture()
            self.inputs = self._captured.inputs
        made: Tensors = self._captured.run(state)
        self.astray = self._captured.astray
        return made


class TorchGraphs(Graphs):
    """Graphs as torch programs: on a CUDA GPU without onnxruntime-gpu, and on CPU, where the same code is tested."""

    def __init__(self, bundle: Bundle, device: torch.device) -> None:
        super().__init__(bundle)
        try:
            import onnx  # noqa: F401
        except ImportError as error:
            raise RuntimeUnavailable(
                'the torch executor reads ONNX graphs. Run: pip install "offramp[torch]"'
            ) from error
        self.device = device
        self.fingerprint = f"torch {torch.__version__} {device}"
        self._weights = Weights(device)
        self._programs: dict[str, Program] = {}
        self._streams: dict[int, Any] = {}
        self._pools: dict[int, Any] = {}

    def open(self, graph: Block | Segment) -> None:
        self._program(graph)

    def _program(self, graph: Block | Segment) -> Program:
        found = self._programs.get(graph.file)
        if found is None:
            found = self._programs[graph.file] = read_program(self._bundle.file(graph.file), self._weights, self.device)
            lacking = set(graph.outputs) - set(found.outputs)
            if lacking:
                raise BundleError(
                    f"{found.path}: lacks the output {sorted(lacking)[0]!r}. Restore it, or export again."
                )
        return found

    def stream(self, lane: int) -> Any:
        if self.device.type != "cuda":
            return None
        if lane not in self._streams:
            self._streams[lane] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._pools[lane] = torch.cuda.graph_pool_handle()
        return self._streams[lane]

    def prepare(
        self, graph: Block | Segment, state: Tensors, outputs: tuple[str, ...], lane: int, *, warm: bool
    ) -> Prepared:
        program, stream = self._program(graph), self.stream(lane)
        if stream is None:
            return _Eager(program, outputs)
        given = {name: state[name] for name in graph.inputs}

        if warm:
            # Captures of a lane share memory for what they need inside. That's safe only in the order of warming up, a
            # bucket's graphs one after the other: each finds the outputs of those before it alive and keeps off them.
            return _Captured(program, given, outputs, stream, self._pools[lane])
        return _Sighted(program, outputs, lambda: _Captured(program, given, outputs, stream, None))

    def once(
        self, graph: Block | Segment, state: Tensors, gate: Tensors, outputs: tuple[str, ...], lane: int
    ) -> tuple[Tensors, Tensor | None]:
        return self._program(graph).run({**gate, **state}, outputs)

    def close(self) -> None:
        super().close()
        self._programs = {}


def astray_error(graph: Block | Segment) -> InputError:
    """What a caller is told whose values point outside a table."""
    return InputError(
        f"{graph.file} can't run on these values (an index is out of range): "
        "for instance an id outside the vocabulary, or a row longer than the model takes."
    )
