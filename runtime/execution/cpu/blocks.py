"""One call of predict from block to block: rows wait in front of each stage, run in batches, and leave or go on."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import Block, Segment
from offramp.runtime.execution.answers import Ids
from offramp.runtime.execution.call import Again, Call
from offramp.runtime.execution.cpu.survivors import GONE, BlockQueue, Scratch, gathering_pays
from offramp.runtime.execution.route import Step
from offramp.runtime.inputs import Arrays
from offramp.runtime.predictions import Predictions

RunBlock = Callable[[Block | Segment, Mapping[str, Any], list[str]], Arrays]
"""Runs one graph of a bundle on the state in front of it; gives the outputs asked for, by name."""


class Blocks:
    """One call: rows go from stage to stage, in one batch or through queues, and are answered where they leave."""

    def __init__(self, call: Call, run: RunBlock, scratch: Scratch) -> None:
        self._call, self._run, self._scratch = call, run, scratch
        self._steps = call.steps()

    def answer(self, again: Again) -> Predictions:
        """Run everything. again: how to get what wasn't fetched."""
        if 0 < self._call.rows <= self._call.limit:
            self._straight_through()
        elif self._call.rows:
            self._through_queues()
        return self._call.predictions(again)

    def _straight_through(self) -> None:
        """All rows fit in one batch: it goes from stage to stage, and queues would only cost time.

        Between two runs of ONNX Runtime nothing of Python is left in the processor's caches, so every line
        here costs several times what it does in a hot loop.
        """
        state, ids, riding = dict(self._call.arrays), np.arange(self._call.rows), False
        for k, step in enumerate(self._steps):
            self._call.go_on()
            made = self._run(step.graph, state, step.outputs)
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
                    name: self._scratch.gather(name, made[name] if name in made else state[name], positions, axis)
                    for name, axis in step.following.items()
                }
            else:
                state, ids, riding = {**state, **made}, np.where(stays, ids, GONE), True

    def _through_queues(self) -> None:
        """More rows than a batch takes: survivors of one batch wait for those of the next."""
        call = self._call
        queues = [BlockQueue(stage.waits) for stage in call.route.stages]
        queues[0].push(call.arrays, np.arange(call.rows))
        while True:
            waiting = [k for k, queue in enumerate(queues) if len(queue)]
            if not waiting:
                return
            ready = [k for k in waiting if len(queues[k]) >= call.limit]
            # Full batches deepest first, so that little waits; then the rest from the front, so that it fills up.
            k = ready[-1] if ready else waiting[0]
            state, ids = queues[k].take(call.limit)
            step = self._steps[k]
            call.go_on()
            made = self._run(step.graph, state, step.outputs)
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
        costs = self._call.costs
        return gathering_pays(live, gone, costs.waiting[k], costs.stages[k])

    def _settle(self, k: int, step: Step, made: Arrays, ids: Ids, riding: bool) -> NDArray[np.bool_] | None:
        """Ask the gate after a stage, and write down the answers of the rows that leave.

        riding: some ids are GONE. Returns which rows go on; None if all do.
        """
        call = self._call
        call.ran[k] += len(ids)
        here: NDArray[np.bool_] | None = ids != GONE if riding else None
        for name, layer in step.layers:
            self._keep_layer(layer, made[name], ids, here)
        j = step.exit
        if j is None:
            return here
        label, score, aux = made[step.label], made[step.score], None
        if step.logits is not None or call.routed:
            aux = call.aux(j, step.seen, None if step.logits is None else made[step.logits], ids)
        decision = call.gate.decide(j, label, score, aux)
        if not decision.anyone:
            return here
        leave = decision.leave if here is None else decision.leave & here
        if here is not None and not leave.any():
            return here
        rows = call.answers.keep(j, decision, leave, ids, label, score)
        if call.answers.probabilities is not None and aux is not None:
            call.answers.keep_probabilities(rows, leave, call.gate.calibrators[j], aux)
        return ~leave if here is None else here & ~leave

    def _keep_layer(self, layer: int, values: NDArray[Any], ids: Ids, here: NDArray[np.bool_] | None) -> None:
        assert self._call.routing is not None
        if here is None:
            self._call.routing[layer, ids] = values
        else:
            self._call.routing[layer, ids[here]] = values[here]
