"""One call of predict: rows wait in front of each stage, run in batches, and leave or go on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime import cost
from offramp.runtime.bundle import Block, Manifest, Segment
from offramp.runtime.gate import Gate, State
from offramp.runtime.inputs import Arrays
from offramp.runtime.predictions import Predictions
from offramp.runtime.stages import plan, row_bytes
from offramp.runtime.survivors import GONE, Ids, Scratch, Survivors, gathering_pays

RunGraph = Callable[[Block | Segment, Mapping[str, Any], list[str]], list[Any]]
"""Runs one graph of a bundle on the state in front of it; gives the values of the outputs asked for."""


@dataclass(frozen=True)
class Costs:
    """What follows from the axis sizes of a request, for one row.

    exits: int64 (J,), cumulative FLOPs of leaving at each exit, as the manifest's blocks state them.
    stages: FLOPs of each stage's graph. waiting: bytes of a row's state in front of each stage.
    blocks: each stage's FLOPs shared out over the blocks it covers, as (block, FLOPs).
    """

    exits: NDArray[np.int64]
    stages: tuple[int, ...]
    waiting: tuple[int, ...]
    blocks: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class Step:
    """A stage, ready to run: everything about it that doesn't change between calls.

    outputs: to fetch. label, score, logits: their names (logits None if they aren't fetched). layers: routing
    outputs with their layer's number. seen: layers run by this exit. following: {tensor: batch axis} of the
    state in front of the next stage.
    """

    graph: Block | Segment
    exit: int | None
    outputs: list[str]
    label: str
    score: str
    logits: str | None
    layers: tuple[tuple[str, int], ...]
    seen: int
    following: Mapping[str, int]


class Route:
    """What all calls at one operating point share: stages, what to ask of each, and what rows cost."""

    def __init__(self, manifest: Manifest, gate: Gate) -> None:
        self.manifest = manifest
        self.gate = gate
        self.stages = plan(manifest, gate.point.exits)
        self.needs_routing = any("routing" in gate.needs(j) for j in gate.point.exits)
        self._layer = {name: k for k, name in enumerate(manifest.routing)}
        self._steps = {
            (logits, routing): [self._step(k, logits, routing) for k in range(len(self.stages))]
            for logits in (False, True)
            for routing in (False, True)
        }
        # Requests come in few sizes; evaluating the expressions anew costs more than a small block's gate.
        self._costs = lru_cache(maxsize=1024)(self._evaluate)

    def _step(self, k: int, logits: bool, routing: bool) -> "Step":
        stage, manifest = self.stages[k], self.manifest
        outputs = [name for name in stage.passes if name in stage.graph.outputs]
        following = self.stages[k + 1].waits if k + 1 < len(self.stages) else {}
        exit_ = None if stage.exit is None else manifest.exits[stage.exit]
        if exit_ is not None:
            outputs += [exit_.label, exit_.score]
            if logits or self.gate.needs(stage.exit or 0) & {"logits", "entropy"}:
                outputs.append(exit_.logits)
        layers = [n for n in manifest.routing if n in stage.graph.outputs] if routing else []
        return Step(
            graph=stage.graph,
            exit=stage.exit,
            outputs=list(dict.fromkeys([*outputs, *layers])),
            label="" if exit_ is None else exit_.label,
            score="" if exit_ is None else exit_.score,
            logits=exit_.logits if exit_ is not None and exit_.logits in outputs else None,
            layers=tuple((name, self._layer[name]) for name in layers),
            seen=0 if exit_ is None else len(exit_.routing),
            following=following,
        )

    def steps(self, *, logits: bool, routing: bool) -> "list[Step]":
        """The stages with what is to be fetched of each."""
        return self._steps[logits, routing]

    def costs(self, sizes: Mapping[str, int]) -> Costs:
        return self._costs(tuple((axis, size) for axis, size in sizes.items() if axis != "batch"))

    def _evaluate(self, sizes: tuple[tuple[str, int], ...]) -> Costs:
        manifest, alone = self.manifest, {**dict(sizes), "batch": 1}
        by_block = [cost.evaluate(block.flops, alone) for block in manifest.blocks]
        spent = np.cumsum(by_block)
        exits = np.asarray([spent[e.block] for e in manifest.exits], np.int64)
        exits.flags.writeable = False  # every call of this size shares it
        stages = tuple(cost.evaluate(stage.graph.flops, alone) for stage in self.stages)
        shares = []
        for stage, flops in zip(self.stages, stages, strict=True):
            covered = range(stage.blocks[0], stage.blocks[1] + 1)
            nominal = sum(by_block[k] for k in covered)
            shares.append(tuple((k, round(flops * by_block[k] / nominal) if nominal else 0) for k in covered))
        return Costs(
            exits=exits,
            stages=stages,
            waiting=tuple(row_bytes(manifest, stage, alone) for stage in self.stages),
            blocks=tuple(shares),
        )


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
        batch_rows: int,
    ) -> None:
        """arrays, sizes: checked inputs. fetch: what to bring beside the answers. batch_rows: rows run at once."""
        rows = sizes["batch"]
        self._route, self._gate, self._run_graph, self._arrays, self._rows = route, route.gate, run_graph, arrays, rows
        self._costs = route.costs(sizes)
        self._limit = batch_rows if route.manifest.rows_independent else 1
        classes, layers = len(route.manifest.classes), len(route.manifest.routing)
        self._probabilities = np.zeros((rows, classes), np.float32) if "probabilities" in fetch else None
        routed = "routing" in fetch or route.needs_routing
        self._routing = np.full((layers, rows), np.nan, np.float32) if routed else None
        self._steps = route.steps(logits=self._probabilities is not None, routing=routed)
        self._ran = [0] * len(self._steps)  # rows, those that rode along included
        self._state: State | None = None
        self._label = np.zeros(rows, np.int64)
        self._confidence = np.zeros(rows, np.float64)
        self._score = np.zeros(rows, np.float32)
        self._exit = np.zeros(rows, np.int32)
        self._abstain = np.zeros(rows, np.bool_)

    def answer(self, fetch: tuple[str, ...], again: Callable[[str], Any]) -> Predictions:
        """Run everything. again: how to get what wasn't fetched."""
        if 0 < self._rows <= self._limit:
            self._straight_through()
        elif self._rows:
            self._through_queues()
        kinds = {"probabilities": self._probabilities, "routing": self._routing}
        return Predictions(
            label=self._label,
            confidence=self._confidence,
            score=self._score,
            exit=self._exit,
            abstain=self._abstain,
            flops=self._costs.exits[self._exit],
            executed=self._executed(),
            _fetched={kind: kinds[kind] for kind in fetch},
            _again=again,
        )

    def _executed(self) -> tuple[int, ...]:
        """FLOPs really run, by block. A segment's are shared out over its blocks as theirs would be."""
        spent = [0] * len(self._route.manifest.blocks)
        for rows, parts in zip(self._ran, self._costs.blocks, strict=True):
            for k, flops in parts:
                spent[k] += rows * flops
        return tuple(spent)

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
        queues = [Survivors(stage.waits) for stage in self._route.stages]
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
        rows, score = ids[leave], score[leave]
        self._label[rows] = np.where(np.isnan(score), -1, label[leave])
        self._confidence[rows] = decision.confidence[leave]
        self._score[rows] = score
        self._exit[rows] = j
        self._abstain[rows] = decision.abstain[leave]
        if self._probabilities is not None and step.logits is not None:
            self._keep_probabilities(j, made[step.logits], aux or {}, rows, leave)
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

    def _keep_probabilities(
        self, j: int, logits: NDArray[Any], aux: Arrays, rows: Ids, leave: NDArray[np.bool_]
    ) -> None:
        assert self._probabilities is not None
        unknown = np.isnan(self._score[rows])
        self._probabilities[rows[unknown]] = np.nan
        known = leave.copy()
        known[leave] = ~unknown
        given = {"routing": aux["routing"][:, known]} if "routing" in aux else {}
        self._probabilities[rows[~unknown]] = self._gate.calibrators[j].apply(logits[known], given)

    def _remember(self, state: State, ids: Ids, here: NDArray[np.bool_] | None) -> None:
        if self._state is None:
            self._state = {name: np.zeros((self._rows, *v.shape[1:]), v.dtype) for name, v in state.items()}
        for name, values in state.items():
            if here is None:
                self._state[name][ids] = values
            else:
                self._state[name][ids[here]] = values[here]
