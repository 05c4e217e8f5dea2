"""Rows on ONNX Runtime, state in this process's memory."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import CASCADE_OUTPUTS, GATE_INPUTS, Block, Bundle, Segment
from offramp.runtime.errors import InputError
from offramp.runtime.execution.call import Again, AgainOf, Call, not_again
from offramp.runtime.execution.cpu.blocks import Blocks
from offramp.runtime.execution.cpu.one_graph import answer_cascade_graph
from offramp.runtime.execution.cpu.prepared import Prepared
from offramp.runtime.execution.cpu.session import CPU, Sessions
from offramp.runtime.execution.cpu.survivors import Scratch, gather_rows
from offramp.runtime.execution.route import Route
from offramp.runtime.execution.values import about_values, cannot_run, reason
from offramp.runtime.inputs import Arrays, made_up_inputs
from offramp.runtime.predictions import Predictions


class CpuExecutor:
    """An `Executor` over ONNX Runtime's sessions: through the cascade graph where it can, else block by block."""

    batch_rows = 128

    def __init__(
        self, bundle: Bundle, *, threads: int, providers: list[Any], spin_us: int = 0, cascade_graph: bool = True
    ) -> None:
        """threads: intra-op threads a session. providers: ONNX Runtime's execution providers.

        spin_us: see `Cascade.load`. cascade_graph: False has every call go from block to block, to compare the two.
        """
        self.bundle = bundle
        self._sessions = Sessions(bundle, threads=threads, providers=providers, spin_us=spin_us)
        classes = len(bundle.manifest.classes)
        ones, zeros = np.ones(classes, np.float32), np.zeros(classes, np.float32)
        self._gate_inputs = dict(zip(GATE_INPUTS, (ones, zeros, ones), strict=True))
        self._scratch = Scratch()
        # Control flow inside a graph runs on the host, so no other provider gains by it.
        names = [p[0] if isinstance(p, tuple) else p for p in providers]
        self.runs_cascade_graph = cascade_graph and bundle.manifest.cascade is not None and names == CPU

    @property
    def fingerprint(self) -> str:
        return self._sessions.fingerprint

    @property
    def opened(self) -> frozenset[str]:
        return self._sessions.opened

    def open(self, route: Route) -> None:
        graph = route.manifest.cascade
        if graph is not None and self._through_cascade_graph(route):
            self._sessions.get(graph.file)
            return
        for stage in route.stages:
            self._sessions.get(stage.graph.file)

    def _through_cascade_graph(self, route: Route) -> bool:
        return self.runs_cascade_graph and route.threshold_inputs is not None

    def answer(self, call: Call, again: Again) -> Predictions:
        thresholds = call.route.threshold_inputs
        calls = self._sessions.calls
        calls.begin()  # without `held`: its generator would cost a lone row two microseconds
        try:
            if thresholds is not None and self.runs_cascade_graph and not call.routed:
                return answer_cascade_graph(call, lambda inputs: self.run_cascade_graph(inputs, thresholds), again)
            return Blocks(call, self.run, self._scratch).answer(again)
        finally:
            calls.end()

    def held(self) -> AbstractContextManager[None]:
        return self._sessions.calls.held()

    def prepare(self, route: Route, limit: int, again: AgainOf) -> Prepared | None:
        graph, thresholds, step = route.manifest.cascade, route.threshold_inputs, route.steps()[-1]
        if route.needs_routing:
            return None
        if graph is not None and thresholds is not None and self.runs_cascade_graph:
            file, constants, takes = graph.file, thresholds, [i.name for i in route.manifest.inputs]
            outputs = list(CASCADE_OUTPUTS if route.needs_logits else CASCADE_OUTPUTS[:-1])
        elif len(route.stages) == 1:
            file, constants, takes = step.graph.file, self._gate_inputs, step.graph.inputs
            outputs = [step.label, step.score, *([] if step.logits is None else [step.logits])]
        else:
            return None
        return Prepared(route, self._sessions.ready, file, outputs, constants, takes=takes, limit=limit, again=again)

    def put(self, arrays: Mapping[str, NDArray[Any]]) -> Mapping[str, Any]:
        return arrays

    def run(self, graph: Block | Segment, state: Mapping[str, Any], outputs: Sequence[str]) -> Arrays:
        feed = self._gate_inputs.copy()
        for name in graph.inputs:
            feed[name] = state[name]
        return dict(zip(outputs, self._run(graph.file, feed, list(outputs)), strict=True))

    def run_cascade_graph(
        self, inputs: Mapping[str, NDArray[Any]], thresholds: Mapping[str, NDArray[Any]]
    ) -> list[NDArray[Any]]:
        graph = self.bundle.manifest.cascade
        if graph is None or not self.runs_cascade_graph:
            raise InputError("the cascade graph isn't run here: the bundle has none, or it runs on the CPU only.")
        return self._run(graph.file, {**thresholds, **inputs}, list(CASCADE_OUTPUTS))

    def _run(self, file: str, feed: Mapping[str, Any], outputs: list[str]) -> list[Any]:
        run = self._sessions.get(file)
        try:
            return run(outputs, feed)
        except Exception as error:
            if not about_values(error):
                raise
            raise cannot_run(file, reason(error)) from error

    def gather(
        self, parts: Sequence[tuple[Mapping[str, Any], NDArray[np.int64]]], axes: Mapping[str, int]
    ) -> Mapping[str, Any]:
        return gather_rows(parts, axes)

    def fetch(self, state: Mapping[str, Any]) -> Arrays:
        return dict(state)

    def warm_up(self, route: Route, sizes: Mapping[str, int], rows: int) -> None:
        """One row by itself, and the largest batch: nothing here is planned for a size in between."""
        self.open(route)
        for count in dict.fromkeys((1, rows)):
            asked = {"batch": count, **sizes}
            call = Call(route, made_up_inputs(route.manifest, asked), asked, limit=rows)
            self.answer(call, not_again)

    def close(self) -> None:
        self._sessions.close()
        self._scratch = Scratch()
