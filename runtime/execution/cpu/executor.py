"""Rows on ONNX Runtime, state in this process's memory."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import CASCADE_OUTPUTS, EVERY_EXIT_OUTPUTS, GATE_INPUTS, Block, Bundle, Segment
from offramp.runtime.errors import InputError
from offramp.runtime.execution.call import Again, AgainOf, Call, Keep, not_again
from offramp.runtime.execution.cpu.blocks import Blocks
from offramp.runtime.execution.cpu.one_graph import answer_cascade_graph
from offramp.runtime.execution.cpu.prepared import Prepared
from offramp.runtime.execution.cpu.session import CPU, Sessions
from offramp.runtime.execution.cpu.survivors import Scratch, gather_rows
from offramp.runtime.execution.route import Route
from offramp.runtime.execution.values import about_values, cannot_run, reason
from offramp.runtime.inputs import Arrays, made_up_inputs
from offramp.runtime.predictions import Predictions, Seen


class CpuExecutor:
    """An `Executor` over ONNX Runtime's sessions: through the cascade graph where it can, else block by block."""

    batch_rows = 128

    def __init__(
        self,
        bundle: Bundle,
        *,
        threads: int,
        providers: list[Any],
        spin_us: int = 0,
        cascade_graph: bool = True,
        packed: bool = True,
    ) -> None:
        """threads: intra-op threads a session. providers: ONNX Runtime's execution providers.

        spin_us: see `Cascade.load`. cascade_graph: False has every call go from block to block, to compare the two.
        packed: False holds the weights once, for a few runs in little memory.
        """
        self.bundle = bundle
        self._sessions = Sessions(bundle, threads=threads, providers=providers, spin_us=spin_us, packed=packed)
        classes = len(bundle.manifest.classes)
        ones, zeros = np.ones(classes, np.float32), np.zeros(classes, np.float32)
        self._gate_inputs = dict(zip(GATE_INPUTS, (ones, zeros, ones), strict=True))
        self._scratch = Scratch()
        # Control flow inside a graph runs on the host, so no other provider gains by it.
        names = [p[0] if isinstance(p, tuple) else p for p in providers]
        cascade = bundle.manifest.cascade
        self.runs_cascade_graph = cascade_graph and cascade is not None and names == CPU
        self.gives_every_exit = self.runs_cascade_graph and cascade is not None and cascade.every_exit is not None

    @property
    def fingerprint(self) -> str:
        return self._sessions.fingerprint

    @property
    def opened(self) -> frozenset[str]:
        return self._sessions.opened

    def open(self, route: Route, *, every_exit: bool = False) -> None:
        through = self.gives_every_exit if every_exit else self.runs_cascade_graph
        if through and route.threshold_inputs is not None:
            self._sessions.get(self._cascade_file(every_exit))
            return
        for stage in route.stages:
            self._sessions.get(stage.graph.file)

    def _cascade_file(self, every_exit: bool) -> str:
        graph = self.bundle.manifest.cascade
        if graph is None or not self.runs_cascade_graph:
            raise InputError("the cascade graph isn't run here: the bundle has none, or it runs on the CPU only.")
        if not every_exit:
            return graph.file
        if graph.every_exit is None:
            raise InputError("the bundle's cascade graph doesn't say what every exit said: export the model again.")
        return graph.every_exit

    def answer(self, call: Call, again: Again) -> Predictions:
        thresholds, every_exit = call.route.threshold_inputs, call.seen is not None
        calls = self._sessions.calls
        calls.begin()  # without `held`: its generator would cost a lone row two microseconds
        try:
            if thresholds is not None and self.runs_cascade_graph and not call.routed:
                run = partial(self.run_cascade_graph, thresholds=thresholds, every_exit=every_exit)
                return answer_cascade_graph(call, run, again)
            return Blocks(call, self.run, self._scratch).answer(again)
        finally:
            calls.end()

    def held(self) -> AbstractContextManager[None]:
        return self._sessions.calls.held()

    def fills(self, call: Call) -> bool:
        return self.gives_every_exit and call.route.threshold_inputs is not None and not call.routed

    def prepare(self, route: Route, limit: int, again: AgainOf, keep: Keep | None = None) -> Prepared | None:
        thresholds, every_exit = route.threshold_inputs, keep is not None
        step = route.steps(logits=every_exit)[-1]
        if route.needs_routing:
            return None
        if thresholds is not None and (self.gives_every_exit if every_exit else self.runs_cascade_graph):
            file, constants = self._cascade_file(every_exit), thresholds
            takes = [i.name for i in route.manifest.inputs]
            outputs = list(CASCADE_OUTPUTS if route.needs_logits else CASCADE_OUTPUTS[:-1])
            outputs += EVERY_EXIT_OUTPUTS if every_exit else ()
        elif len(route.stages) == 1:
            file, constants, takes = step.graph.file, self._gate_inputs, step.graph.inputs
            outputs = [step.label, step.score, *([] if step.logits is None else [step.logits])]
        else:
            return None
        return Prepared(
            route, self._sessions.ready, file, outputs, constants, takes=takes, limit=limit, again=again, keep=keep
        )

    def put(self, arrays: Mapping[str, NDArray[Any]]) -> Mapping[str, Any]:
        return arrays

    def run(self, graph: Block | Segment, state: Mapping[str, Any], outputs: Sequence[str]) -> Arrays:
        feed = self._gate_inputs.copy()
        for name in graph.inputs:
            feed[name] = state[name]
        return dict(zip(outputs, self._run(graph.file, feed, list(outputs)), strict=True))

    def run_cascade_graph(
        self, inputs: Mapping[str, NDArray[Any]], thresholds: Mapping[str, NDArray[Any]], *, every_exit: bool = False
    ) -> list[NDArray[Any]]:
        outputs = [*CASCADE_OUTPUTS, *EVERY_EXIT_OUTPUTS] if every_exit else list(CASCADE_OUTPUTS)
        return self._run(self._cascade_file(every_exit), {**thresholds, **inputs}, outputs)

    def _run(self, file: str, feed: Mapping[str, Any], outputs: list[str]) -> list[Any]:
        run = self._sessions.get(file)
        try:
            return run(outputs, feed)
        except Exception as error:
            if not about_values(error):
                raise
            raise cannot_run(file, reason(error), feed) from error

    def gather(
        self, parts: Sequence[tuple[Mapping[str, Any], NDArray[np.int64]]], axes: Mapping[str, int]
    ) -> Mapping[str, Any]:
        return gather_rows(parts, axes)

    def fetch(self, state: Mapping[str, Any]) -> Arrays:
        return dict(state)

    def warm_up(self, route: Route, sizes: Mapping[str, int], rows: int, *, every_exit: bool = False) -> None:
        """One row by itself, and the largest batch: nothing here is planned for a size in between."""
        self.open(route, every_exit=every_exit)
        for count in dict.fromkeys((1, rows)):
            asked = {"batch": count, **sizes}
            seen = Seen(len(route.manifest.exits), count) if every_exit and self.gives_every_exit else None
            call = Call(route, made_up_inputs(route.manifest, asked), asked, limit=rows, seen=seen)
            self.answer(call, not_again)

    def close(self) -> None:
        self._sessions.close()
        self._scratch = Scratch()
