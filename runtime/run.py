"""One call of predict: rows wait in front of each stage, run in batches, and leave or go on."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from offramp.runtime import cost
from offramp.runtime.bundle import Block, Exit, Manifest, Segment
from offramp.runtime.gate import Gate, State
from offramp.runtime.inputs import Arrays
from offramp.runtime.predictions import Predictions
from offramp.runtime.stages import Stage, row_bytes
from offramp.runtime.survivors import GONE, Ids, Survivors, gathering_pays


class RunGraph(Protocol):
    """Runs one graph of the bundle on the state in front of it; gives the outputs asked for, by name."""

    def __call__(self, graph: Block | Segment, state: Mapping[str, Any], outputs: Sequence[str]) -> Arrays: ...


class Run:
    """The queues of one call, one in front of each stage, emptied deepest-first whenever a batch is full."""

    def __init__(
        self,
        manifest: Manifest,
        stages: Sequence[Stage],
        gate: Gate,
        run_graph: RunGraph,
        arrays: Arrays,
        sizes: Mapping[str, int],
        flops: NDArray[np.int64],
        fetch: tuple[str, ...],
        batch_rows: int,
    ) -> None:
        """flops: (J,) what a row costs that leaves at each exit. fetch: what to bring beside the answers."""
        rows = sizes["batch"]
        self._manifest, self._stages, self._gate, self._run_graph = manifest, stages, gate, run_graph
        self._fetch, self._flops = fetch, flops
        self._limit = batch_rows if manifest.rows_independent else 1
        alone = {**sizes, "batch": 1}
        self._stage_flops = [cost.evaluate(stage.graph.flops, alone) for stage in stages]
        self._row_bytes = [row_bytes(manifest, stage, sizes) for stage in stages]
        self._queues = [Survivors(stage.waits) for stage in stages]
        if rows:
            self._queues[0].push(arrays, np.arange(rows))
        self._state: State | None = None
        self._ran = [0] * len(stages)  # rows, those that rode along included
        self.answer = Predictions(
            label=np.zeros(rows, np.int64),
            confidence=np.zeros(rows, np.float64),
            score=np.zeros(rows, np.float32),
            exit=np.zeros(rows, np.int32),
            abstain=np.zeros(rows, np.bool_),
            flops=np.zeros(rows, np.int64),
        )
        self._probabilities = np.zeros((rows, len(manifest.classes)), np.float32) if "probabilities" in fetch else None
        routed = "routing" in fetch or any("routing" in gate.needs(j) for j in range(len(manifest.exits)))
        self._routing = np.full((len(manifest.routing), rows), np.nan, np.float32) if routed else None

    def fetched(self) -> dict[str, Any]:
        kinds = {"probabilities": self._probabilities, "routing": self._routing}
        return {kind: kinds[kind] for kind in self._fetch}

    def executed(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """FLOPs really run, by block. A segment's are shared out over its blocks as theirs would be."""
        alone = {**sizes, "batch": 1}
        spent = [0] * len(self._manifest.blocks)
        for stage, flops, rows in zip(self._stages, self._stage_flops, self._ran, strict=True):
            first, last = stage.blocks
            parts = [cost.evaluate(block.flops, alone) for block in self._manifest.blocks[first : last + 1]]
            for k, part in enumerate(parts):
                spent[first + k] += round(rows * flops * part / sum(parts)) if sum(parts) else 0
        return tuple(spent)

    def all(self) -> None:
        while True:
            waiting = [k for k, queue in enumerate(self._queues) if len(queue)]
            if not waiting:
                return
            ready = [k for k in waiting if len(self._queues[k]) >= self._limit]
            # Full batches deepest first, so that little waits; then the rest from the front, so that it fills up.
            self._step(ready[-1] if ready else waiting[0])

    def _step(self, k: int) -> None:
        """Run stage k for the rows at the head of its queue, answer those that leave, queue the rest."""
        stage, manifest = self._stages[k], self._manifest
        outputs, j = stage.graph.outputs, stage.exit
        arrays, ids = self._queues[k].take(self._limit)
        here = ids != GONE
        wanted = [name for name in stage.passes if name in outputs]
        if j is not None:
            wanted += [manifest.exits[j].label, manifest.exits[j].score]
            if self._needs_logits(j):
                wanted.append(manifest.exits[j].logits)
        routing = [name for name in manifest.routing if name in outputs] if self._routing is not None else []
        made = self._run_graph(stage.graph, arrays, list(dict.fromkeys(wanted + routing)))
        self._ran[k] += len(ids)
        if self._routing is not None:
            for name in routing:
                self._routing[manifest.routing.index(name), ids[here]] = made[name][here]
        if j is not None:
            here &= ~self._answer(j, manifest.exits[j], made, ids, here)
        if k + 1 < len(self._stages) and here.any():
            self._pass_on(k + 1, {**arrays, **made}, ids, here)

    def _needs_logits(self, exit: int) -> bool:
        return self._probabilities is not None or bool(self._gate.needs(exit) & {"logits", "entropy"})

    def _answer(self, j: int, exit_: Exit, made: Arrays, ids: Ids, here: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Ask the gate about exit j and write down the answers of the rows that leave. Returns who does."""
        gate, answer = self._gate, self.answer
        label, score = made[exit_.label], made[exit_.score]
        aux = {"logits": made[exit_.logits]} if exit_.logits in made else {}
        if "routing" in gate.needs(j) and self._routing is not None:
            aux["routing"] = self._routing[: len(exit_.routing), ids]  # the layers run so far
        state = None if self._state is None else {name: values[ids] for name, values in self._state.items()}
        decision = gate.decide(j, label, score, aux, state)
        self._remember(decision.state, ids, here)
        leave = here & decision.leave
        rows = ids[leave]
        answer.label[rows] = label[leave]
        answer.confidence[rows] = decision.confidence[leave]
        answer.score[rows] = score[leave]
        answer.exit[rows] = j
        answer.abstain[rows] = decision.abstain[leave]
        answer.flops[rows] = self._flops[j]
        if self._probabilities is not None and len(rows):
            apply = gate.calibrators[j].apply
            picked = {name: values[..., leave] if name == "routing" else values[leave] for name, values in aux.items()}
            finite = ~np.isnan(score[leave])
            logits = picked.pop("logits")
            self._probabilities[rows] = np.nan
            self._probabilities[rows[finite]] = apply(
                logits[finite], {name: values[..., finite] for name, values in picked.items()}
            )
        return leave

    def _remember(self, state: State | None, ids: Ids, here: NDArray[np.bool_]) -> None:
        if state is None:
            return
        if self._state is None:
            rows = len(self.answer)
            self._state = {name: np.zeros((rows, *v.shape[1:]), v.dtype) for name, v in state.items()}
        for name, values in state.items():
            self._state[name][ids[here]] = values[here]

    def _pass_on(self, k: int, arrays: Arrays, ids: Ids, stays: NDArray[np.bool_]) -> None:
        live = int(stays.sum())
        gone = len(ids) - live
        if gone and gathering_pays(live, gone, self._row_bytes[k], self._stage_flops[k]):
            positions = np.flatnonzero(stays)
            self._queues[k].push(arrays, ids[positions], positions)
        else:
            self._queues[k].push(arrays, np.where(stays, ids, GONE))
