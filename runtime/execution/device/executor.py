"""Rows on a GPU, or through the same code on a CPU: state stays on the device."""

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from offramp.runtime.bundle import GATE_INPUTS, Block, Bundle, Segment
from offramp.runtime.errors import InputError, RuntimeUnavailable
from offramp.runtime.execution.call import Again, AgainOf, Call, Keep, not_again
from offramp.runtime.execution.calls import Calls
from offramp.runtime.execution.device.buckets import buckets
from offramp.runtime.execution.device.flow import Flow
from offramp.runtime.execution.device.graphs import Graphs, Tensors
from offramp.runtime.execution.device.lanes import IN_FLIGHT, Lanes, to_host
from offramp.runtime.execution.device.torch.graphs import TorchGraphs
from offramp.runtime.execution.route import Route
from offramp.runtime.execution.values import OUT_OF_RANGE, cannot_run
from offramp.runtime.inputs import Arrays, made_up_inputs
from offramp.runtime.predictions import Predictions


class DeviceExecutor:
    """An `Executor` whose state is tensors of one device: `answer` keeps batches in flight, `run` waits for its own."""

    batch_rows = 1024
    runs_cascade_graph = False  # control flow inside a graph runs on the host, so blocks are graphs of their own here
    gives_every_exit = False

    def __init__(self, bundle: Bundle, graphs: Graphs) -> None:
        self.graphs = graphs
        self._calls = Calls(self._let_go)
        self._lanes = Lanes(graphs, self._calls)
        classes = len(bundle.manifest.classes)
        ones, zeros = torch.ones(classes, device=graphs.device), torch.zeros(classes, device=graphs.device)
        self._gate_inputs = dict(zip(GATE_INPUTS, (ones, zeros, ones), strict=True))
        self._constants: dict[bytes, torch.Tensor] = {}

    @property
    def fingerprint(self) -> str:
        return self.graphs.fingerprint

    @property
    def opened(self) -> frozenset[str]:
        return self.graphs.opened

    def open(self, route: Route, *, every_exit: bool = False) -> None:
        for stage in route.stages:
            self.graphs.open(stage.graph)

    def answer(self, call: Call, again: Again) -> Predictions:
        with self.held():
            return Flow(call, self.graphs, self._lanes, self._constant).answer(again)

    def held(self) -> AbstractContextManager[None]:
        return self._calls.held()

    def fills(self, call: Call) -> bool:
        return False

    def prepare(self, route: Route, limit: int, again: AgainOf, keep: Keep | None = None) -> None:
        return None

    def _constant(self, values: NDArray[np.float32]) -> torch.Tensor:
        """Numbers that stay the same, copied to the device once."""
        key = values.tobytes()
        if key not in self._constants:
            self._constants[key] = torch.from_numpy(values.copy()).to(self.graphs.device)
        return self._constants[key]

    def put(self, arrays: Mapping[str, NDArray[Any]]) -> Tensors:
        # torch warns of arrays that are read-only, as mapped ones are.
        return {
            name: torch.from_numpy(np.require(array, requirements=("C", "W"))).to(self.graphs.device)
            for name, array in arrays.items()
        }

    def run(self, graph: Block | Segment, state: Mapping[str, Any], outputs: Sequence[str]) -> Tensors:
        with self._lanes.taken(1) as (lane,), lane.current():
            feed = {name: state[name].to(lane.device) for name in graph.inputs}
            made, outside = self.graphs.once(graph, feed, self._gate_inputs, tuple(outputs), lane.number)
            flag = None if outside is None else to_host(outside)
            lane.wait()  # whoever uses it next may be on another stream
        if flag is not None and bool(flag.numpy()):
            raise cannot_run(graph.file, OUT_OF_RANGE)
        return made

    def run_cascade_graph(
        self, inputs: Mapping[str, NDArray[Any]], thresholds: Mapping[str, NDArray[Any]], *, every_exit: bool = False
    ) -> list[NDArray[Any]]:
        raise InputError("the cascade graph isn't run on a device: its blocks are.")

    def gather(self, parts: Sequence[tuple[Mapping[str, Any], NDArray[np.int64]]], axes: Mapping[str, int]) -> Tensors:
        with self._lanes.taken(1) as (lane,), lane.current():
            made = {}
            for name, axis in axes.items():
                rows = [s[name].index_select(axis, torch.from_numpy(at).to(s[name].device)) for s, at in parts]
                made[name] = torch.cat(rows, axis)
            lane.wait()
        return made

    def fetch(self, state: Mapping[str, Any]) -> Arrays:
        with self._lanes.taken(1) as (lane,), lane.current():
            there = {name: to_host(tensor) for name, tensor in state.items()}
            lane.wait()
        return {name: tensor.numpy() for name, tensor in there.items()}

    def warm_up(self, route: Route, sizes: Mapping[str, int], rows: int, *, every_exit: bool = False) -> None:
        """Every graph at every bucket, on every lane, so that nothing is planned or captured while serving.

        Other sizes run as well; they are captured once they have come three times.
        """
        most = rows if route.manifest.rows_independent else 1
        for size in reversed(buckets(most)):
            asked = {"batch": IN_FLIGHT * size, **sizes}
            call = Call(route, made_up_inputs(route.manifest, asked), asked, limit=size)
            Flow(call, self.graphs, self._lanes, self._constant, warm=True).answer(not_again)

    def close(self) -> None:
        self._calls.close()

    def _let_go(self) -> None:
        self._lanes.close()
        self.graphs.close()
        self._constants.clear()


def open_device(bundle: Bundle, device: str, providers: Sequence[Any] | None) -> DeviceExecutor:
    """The best there is for a device.

    device: "cuda" or "cuda:N": ONNX Runtime's TensorRT (only if `providers` asks for it) or CUDA provider, else torch.
    "torch:cpu", "torch:cuda" or "torch:cuda:N": torch in any case. Raises RuntimeUnavailable with what is missing, and
    InputError for `providers` that would run everything on the CPU.
    """
    asked = device.removeprefix("torch:")
    place = torch.device(asked)
    first = providers[0] if providers else None
    if place.type == "cuda" and (first[0] if isinstance(first, tuple) else first) == "CPUExecutionProvider":
        raise InputError(
            f"device is {device!r}, but providers is {list(providers or ())!r}, whose first runs it all on the CPU. "
            "Use device='cpu', or leave providers out."
        )
    available = _onnxruntime_providers()
    if place.type == "cuda" and not torch.cuda.is_available():
        built = "is built for CPU only" if "+cpu" in torch.__version__ else "sees no GPU"
        raise RuntimeUnavailable(
            f"device is {device!r}, but no CUDA GPU can be used here: torch {torch.__version__} {built}, "
            f"and ONNX Runtime has {available or 'no providers'}. Use device='cpu'."
        )
    if asked == "cuda":
        place = torch.device("cuda", torch.cuda.current_device())
    if not device.startswith("torch:") and (providers is not None or "CUDAExecutionProvider" in available):
        from offramp.runtime.execution.device.ort_graphs import OrtGraphs  # needs an ONNX Runtime, torch doesn't

        wanted = providers or ["CUDAExecutionProvider", "CPUExecutionProvider"]
        return DeviceExecutor(bundle, OrtGraphs(bundle, place, wanted))
    return DeviceExecutor(bundle, TorchGraphs(bundle, place))


def _onnxruntime_providers() -> list[str]:
    if importlib.util.find_spec("onnxruntime") is None:
        return []
    import onnxruntime

    return list(onnxruntime.get_available_providers())
