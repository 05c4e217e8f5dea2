"""Graphs in ONNX Runtime on a GPU: tensors stay where they are, and everything is queued on one stream.

ONNX Runtime runs a session's kernels on a stream of its own unless it is given one; then neither side sees the
other's work. Here its CUDA provider gets ours as `user_compute_stream`, torch and Triton queue on the same one, and
`disable_synchronize_execution_providers` keeps a run from waiting at its end: order comes from the stream alone.
The stream is fixed when a session is made, so lanes share it: a second stream would take a second copy of the weights.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from offramp.runtime import cost
from offramp.runtime.bundle import GATE_INPUTS, Block, Bundle, Segment
from offramp.runtime.errors import BundleError, RuntimeUnavailable
from offramp.runtime.execution.cpu.session import keep_in_children, onnxruntime
from offramp.runtime.execution.device.graphs import Graphs, Prepared, Tensors
from offramp.runtime.execution.values import about_values, cannot_run, reason
from torch import Tensor

_ELEMENTS = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(int16)": torch.int16,
    "tensor(int8)": torch.int8,
    "tensor(uint8)": torch.uint8,
    "tensor(bool)": torch.bool,
}
_NUMPY = {kind: np.dtype(str(kind).removeprefix("torch.")) for kind in _ELEMENTS.values()}
_STREAMED = ("CUDAExecutionProvider", "TensorrtExecutionProvider")


class OrtGraphs(Graphs):
    """Graphs in sessions that run on torch's memory. With the CPU provider it runs too, and is tested so."""

    def __init__(self, bundle: Bundle, device: torch.device, providers: Sequence[Any]) -> None:
        super().__init__(bundle)
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._providers = [self._on_our_stream(provider) for provider in providers]
        self._names = [p if isinstance(p, str) else p[0] for p in self._providers]
        self.fingerprint = f"onnxruntime {onnxruntime().__version__} {self._names} {device}"
        self.captures = any(
            not isinstance(p, str) and str(p[1].get("enable_cuda_graph", "0")) in ("1", "True") for p in self._providers
        )
        self._sessions: dict[str, Any] = {}
        classes = len(bundle.manifest.classes)
        ones, zeros = torch.ones(classes, device=device), torch.zeros(classes, device=device)
        self.gate = dict(zip(GATE_INPUTS, (ones, zeros, ones), strict=True))
        self.running = threading.Lock()  # runs of one session on a stream that is ours mustn't overlap on the host
        self._next_capture = 1
        keep_in_children(self)

    def _on_our_stream(self, provider: Any) -> Any:
        name, options = (provider, {}) if isinstance(provider, str) else (provider[0], dict(provider[1]))
        if name not in _STREAMED or self._stream is None:
            return provider
        options.setdefault("device_id", str(self.device.index or 0))
        return name, {**options, "user_compute_stream": str(self._stream.cuda_stream)}

    def open(self, graph: Block | Segment) -> None:
        self.session(graph)

    def session(self, graph: Block | Segment) -> Any:
        found = self._sessions.get(graph.file)
        if found is None:
            ort = onnxruntime()
            options = ort.SessionOptions()
            options.log_severity_level = 4  # failures are raised; its copy on stderr adds nothing
            path = self._bundle.file(graph.file)
            try:
                found = ort.InferenceSession(str(path), options, providers=self._providers)
            except Exception as error:
                raise BundleError(f"{self._bundle.path / graph.file}: ONNX Runtime can't load it: {error}") from error
            unused = [name for name in self._names if name not in found.get_providers()]
            if unused:  # it goes on without them, on the CPU in the end
                raise RuntimeUnavailable(
                    f"ONNX Runtime can't use {', '.join(unused)} here, only {found.get_providers()}: "
                    "is there a GPU, and do its driver, CUDA and cuDNN fit this onnxruntime-gpu?"
                )
            self._sessions[graph.file] = found
        return found

    def stream(self, lane: int) -> Any:
        return self._stream

    @property
    def opened(self) -> frozenset[str]:
        return frozenset(self._sessions)

    def prepare(
        self, graph: Block | Segment, state: Tensors, outputs: tuple[str, ...], lane: int, *, warm: bool
    ) -> Prepared:
        capture = -1
        if warm and self.captures:
            capture, self._next_capture = self._next_capture, self._next_capture + 1
        return _Bound(self, graph, {name: state[name] for name in graph.inputs}, outputs, capture)

    def once(
        self, graph: Block | Segment, state: Tensors, gate: Tensors, outputs: tuple[str, ...], lane: int
    ) -> tuple[Tensors, Tensor | None]:
        session = self.session(graph)
        binding = session.io_binding()
        for name, tensor in {**gate, **state}.items():
            binding.bind_input(name, *_place(tensor))
        for name in outputs:
            binding.bind_output(name, "cpu")  # of a shape that only the graph knows, features say
        with self.running, _understood(graph):
            session.run_with_iobinding(binding)
        return {n: torch.from_numpy(v) for n, v in zip(outputs, binding.copy_outputs_to_cpu(), strict=True)}, None

    def allocate(self, graph: Block | Segment, state: Tensors, outputs: Sequence[str]) -> Tensors:
        """Tensors for a graph's outputs, sized by the manifest at this state's axes."""
        manifest = self._bundle.manifest
        known = {i.name: i.shape for i in manifest.inputs} | {n: t.shape for n, t in manifest.tensors.items()}
        axes: dict[str, int] = {}
        for name in graph.inputs:
            named = zip(known[name], state[name].shape, strict=True)
            axes |= {axis: size for axis, size in named if isinstance(axis, str) and axis in manifest.axes}
        kinds = {o.name: _ELEMENTS[o.type] for o in self.session(graph).get_outputs() if o.type in _ELEMENTS}
        exit_ = None if graph.exit is None else manifest.exits[graph.exit]
        made: Tensors = {}
        for name in outputs:
            if name in manifest.tensors:
                shape = [d if isinstance(d, int) else cost.evaluate(d, axes) for d in manifest.tensors[name].shape]
            elif exit_ is not None and name == exit_.logits:
                shape = [axes["batch"], len(manifest.classes)]
            else:  # label, score, routing: a number a row
                shape = [axes["batch"]]
            made[name] = torch.empty(shape, dtype=kinds[name], device=self.device)
        return made


class _Bound(Prepared):
    """A session bound to certain tensors: its inputs, and outputs that are there before it runs."""

    def __init__(
        self, graphs: OrtGraphs, graph: Block | Segment, state: Tensors, outputs: tuple[str, ...], capture: int
    ) -> None:
        ort = onnxruntime()
        self.inputs = state
        self._graphs, self._graph = graphs, graph
        self._session = graphs.session(graph)
        self._made = graphs.allocate(graph, state, outputs)
        self._binding = self._session.io_binding()
        for name, tensor in {**state, **graphs.gate}.items():
            self._binding.bind_input(name, *_place(tensor))
        for name, tensor in self._made.items():
            self._binding.bind_output(name, *_place(tensor))
        self._options = ort.RunOptions()
        self._options.only_execute_path_to_fetches = True  # the gate's seventeen nodes aren't asked for
        if graphs.device.type == "cuda":
            self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        if graphs.captures:
            self._options.add_run_config_entry("gpu_graph_id", str(capture))

    def launch(self, state: Mapping[str, Tensor]) -> Tensors:
        with self._graphs.running, _understood(self._graph):
            self._session.run_with_iobinding(self._binding, self._options)
        return self._made


@contextmanager
def _understood(graph: Block | Segment) -> Iterator[None]:
    """What ONNX Runtime says of a caller's values, as our own error."""
    try:
        yield
    except Exception as error:
        if not about_values(error):
            raise
        raise cannot_run(graph.file, reason(error)) from error


def _place(tensor: Tensor) -> tuple[str, int, Any, list[int], int]:
    """How a binding is told where a tensor lies."""
    device = tensor.device
    return device.type, device.index or 0, _NUMPY[tensor.dtype], list(tensor.shape), tensor.data_ptr()
