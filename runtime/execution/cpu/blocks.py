"""One call of predict: rows wait in front of each stage, run in batches, and leave or go on."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import Block, Segment
from offramp.runtime.execution.answers import Answers
from offramp.runtime.execution.cpu.survivors import GONE, BlockQueue, Ids, Scratch, gathering_pays
from offramp.runtime.execution.route import Route, Step
from offramp.runtime.gate import State
from offramp.runtime.inputs import Arrays
from offramp.runtime.predictions import Predictions

RunGraph = Callable[[Block | Segment, Mapping[str, Any], list[str]], list[Any]]
"""Runs one graph of a bundle on the state in front of it; gives the values of the outputs asked for."""


_scratch = Scratch()


class Run:
    """One call: rows go from stage to stage, in one batch or through queues, and are answered where they leave."""

    def __init__(
        self,
        route: Route,
        run_graph: RunGraph,
        arrays: Arrays,
        sizes: Mapping[str, int],
        fetch: tuple[str, ...],
        limit: int,
    ) -> None:
        """arrays, sizes: checked inputs. fetch: what to bring beside the answers. limit: rows run at once."""
        rows = sizes["batch"]
        self._route, self._gate, self._run_graph, self._arrays, self._rows = route, route.gate, run_graph, arrays, rows
        self._costs = route.costs(sizes)
        self._limit = limit
        self._answers = Answers(rows, len(route.manifest.classes) if "probabilities" in fetch else None)
        layers = len(route.manifest.routing)
        routed = "routing" in fetch or route.needs_routing
        self._routing = np.full((layers, rows), np.nan, np.float32) if routed else None
        self._steps = route.steps(logits=self._answers.probabilities is not None, routing=routed)
        self._ran = [0] * len(self._steps)  # rows, those that rode along included
        self._state: State | None = None

    def answer(self, fetch: tuple[str, ...], again: Callable[[str], Any]) -> Predictions:
        """Run everything. again: how to get what wasn't fetched."""
        if 0 < self._rows <= self._limit:
            self._straight_through()
        elif self._rows:
            self._through_queues()
        kinds = {"probabilities": self._answers.probabilities, "routing": self._routing}
        return self._answers.predictions(self._costs, self._ran, {kind: kinds[kind] for kind in fetch}, again)

    def _straight_through(self) -> None:
        """All rows fit in one batch: it goes from stage to stage, and queues would only cost time.

        Between two runs of ONNX Runtime nothing of Python is left in the processor's caches, so every line
        here costs several times what it does in a hot loop.
        """
        state, ids, riding = dict(self._arrays), np.arange(self._rows), False
        for k, step in enumerate(self._steps):
            made = dict(zip(step.outputs, self._run_graph(step.graph, state, step.outputs), strict=True))
            stays = self._settle(k, step, made, ids, riding)
            if stays is None:  # nobody left
                state = {name: made[name] if name in made else state[name] for name in step.following}
                continue
            live = int(np.count_nonzero(stays))
            if not live:
                return
            if self._pays(k + 1, live, len(ids) - live):
                positions = np.flatnonzero(stays)
                ids, riding = ids[positions], False
                state = {
                    name: _scratch.gather(name, made[name] if name in made else state[name], positions, axis)
                    for name, axis in step.following.items()
                }
            else:
                state, ids, riding = {**state, **made}, np.where(stays, ids, GONE), True

    def _through_queues(self) -> None:
        """More rows than a batch takes: survivors of one batch wait for those of the next."""
        queues = [BlockQueue(stage.waits) for stage in self._route.stages]
        queues[0].push(self._arrays, np.arange(self._rows))
        while True:
            waiting = [k for k, queue in enumerate(queues) if len(queue)]
            if not waiting:
                return
            ready = [k for k in waiting if len(queues[k]) >= self._limit]
            # Full batches deepest first, so that little waits; then the rest from the front, so that it fills up.
            k = ready[-1] if ready else waiting[0]
            state, ids = queues[k].take(self._limit)
            step = self._steps[k]
            made = dict(zip(step.outputs, self._run_graph(step.graph, state, step.outputs), strict=True))
            stays = self._settle(k, step, made, ids, bool((ids == GONE).any()))
            if stays is None:
                queues[k + 1].push({**state, **made}, ids)
            elif live := int(np.count_nonzero(stays)):
                if self._pays(k + 1, live, len(ids) - live):
                    positions = np.flatnonzero(stays)
                    queues[k + 1].push({**state, **made}, ids[positions], positions)
                else:
                    queues[k + 1].push({**state, **made}, np.where(stays, ids, GONE))

    def _pays(self, k: int, live: int, gone: int) -> bool:
        return gathering_pays(live, gone, self._costs.waiting[k], self._costs.stages[k])

    def _settle(self, k: int, step: Step, made: Arrays, ids: Ids, riding: bool) -> NDArray[np.bool_] | None:
        """Ask the gate after a stage, and write down the answers of the rows that leave.

        riding: some ids are GONE. Returns which rows go on; None if all do.
        """
        self._ran[k] += len(ids)
        here: NDArray[np.bool_] | None = ids != GONE if riding else None
        for name, layer in step.layers:
            self._keep_layer(layer, made[name], ids, here)
        j = step.exit
        if j is None:
            return here
        label, score = made[step.label], made[step.score]
        aux = self._aux(step, made, ids) if step.logits is not None or self._routing is not None else None
        state = None if self._state is None else {name: values[ids] for name, values in self._state.items()}
        decision = self._gate.decide(j, label, score, aux, state)
        if decision.state is not None:
            self._remember(decision.state, ids, here)
        if not decision.anyone:
            return here
        leave = decision.leave if here is None else decision.leave & here
        if here is not None and not leave.any():
            return here
        rows = self._answers.keep(j, decision, leave, ids, label, score)
        if self._answers.probabilities is not None and aux is not None:
            self._answers.keep_probabilities(rows, leave, self._gate.calibrators[j], aux)
        return ~leave if here is None else here & ~leave

    def _aux(self, step: Step, made: Arrays, ids: Ids) -> Arrays:
        aux = {"logits": made[step.logits]} if step.logits is not None else {}
        if self._routing is not None and step.exit is not None and "routing" in self._gate.needs(step.exit):
            aux["routing"] = self._routing[: step.seen, ids]  # the layers run so far
        return aux

    def _keep_layer(self, layer: int, values: NDArray[Any], ids: Ids, here: NDArray[np.bool_] | None) -> None:
        assert self._routing is not None
        if here is None:
            self._routing[layer, ids] = values
        else:
            self._routing[layer, ids[here]] = values[here]

    def _remember(self, state: State, ids: Ids, here: NDArray[np.bool_] | None) -> None:
        if self._state is None:
            self._state = {name: np.zeros((self._rows, *v.shape[1:]), v.dtype) for name, v in state.items()}
        for name, values in state.items():
            if here is None:
                self._state[name][ids] = values
            else:
                self._state[name][ids[here]] = values[here]
