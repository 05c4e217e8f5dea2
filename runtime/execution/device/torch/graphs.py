"""A bundle's graphs as torch programs: on a GPU without onnxruntime-gpu, and on CPU, where the same code is tested."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from offramp.runtime.bundle import Block, Bundle, Segment
from offramp.runtime.errors import BundleError, RuntimeUnavailable
from offramp.runtime.execution.device.graphs import Graphs, Prepared, Tensors
from offramp.runtime.execution.device.torch.program import Program, Weights, read_program
from torch import Tensor

# Capturing costs as much as some dozens of runs: shapes that weren't warmed up are captured when they keep coming.
_SIGHTINGS = 3
_capturing = threading.Lock()  # two captures at once would see each other's allocations


class _Eager(Prepared):
    """A program run operation by operation."""

    def __init__(self, program: Program, outputs: tuple[str, ...]) -> None:
        self._program, self._outputs = program, outputs

    def launch(self, state: Mapping[str, Tensor]) -> Tensors:
        made, self.out_of_range = self._program.run(state, self._outputs)
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
                self._made, self.out_of_range = program.run(self.inputs, outputs)
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
        self.out_of_range = self._captured.out_of_range
        return made


class TorchGraphs(Graphs):
    """Graphs as torch programs: on a CUDA GPU without onnxruntime-gpu, and on CPU, where the same code is tested."""

    def __init__(self, bundle: Bundle, device: torch.device) -> None:
        super().__init__(bundle)
        try:
            import onnx  # noqa: F401
        except ImportError as error:
            raise RuntimeUnavailable("the torch executor reads ONNX graphs. Run: pip install onnx") from error
        self.device = device
        self.fingerprint = f"torch {torch.__version__} {device}"
        self._weights = Weights(device)
        self._programs: dict[str, Program] = {}
        self._streams: dict[int, Any] = {}
        self._pools: dict[int, Any] = {}

    def open(self, graph: Block | Segment) -> None:
        self.program(graph)

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(self._programs.values())

    @property
    def opened(self) -> frozenset[str]:
        return frozenset(self._programs)

    def program(self, graph: Block | Segment) -> Program:
        """A graph as a program, read when first asked for. Raises BundleError."""
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
        program, stream = self.program(graph), self.stream(lane)
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
        return self.program(graph).run({**gate, **state}, outputs)

    def close(self) -> None:
        super().close()
        self._programs = {}
