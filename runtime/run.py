"""One call of predict: rows wait in front of each stage, run in batches, and leave or go on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime import cost
from offramp.runtime.bundle import Block, Exit, Manifest, Segment
from offramp.runtime.gate import Gate, State
from offramp.runtime.inputs import Arrays
from offramp.runtime.predictions import Predictions
from offramp.runtime.stages import Stage, plan, row_bytes
from offramp.runtime.survivors import GONE, Ids, Survivors, gather, gathering_pays

RunGraph = Callable[[Block | Segment, Mapping[str, Any], Sequence[str]], Arrays]
"""Runs one graph of a bundle on the state in front of it; gives the outputs asked for, by name."""


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


class Route:
    """What all calls at one operating point share: stages, what to ask of each, and what rows cost."""

    def __init__(self, manifest: Manifest, gate: Gate) -> None:
        self.manifest = manifest
        self.gate = gate
        self.stages = plan(manifest, gate.point.exits)
        self.needs_routing = any("routing" in gate.needs(j) for j in gate.point.exits)
        self._asks = [[self._outputs(stage, logits) for logits in (False, True)] for stage in self.stages]
        self.routing = [[n for n in manifest.routing if n in stage.graph.outputs] for stage in self.stages]
        self._layer = {name: k for k, name in enumerate(manifest.routing)}
        # Requests come in few sizes; evaluating the expressions anew costs more than a small block's gate.
        self._costs = lru_cache(maxsize=1024)(self._evaluate)

    def _outputs(self, stage: Stage, logits: bool) -> list[str]:
        wanted = [name for name in stage.passes if name in stage.graph.outputs]
        if stage.exit is not None:
            exit_ = self.manifest.exits[stage.exit]
            wanted += [exit_.label, exit_.score]
            if logits or self.gate.needs(stage.exit) & {"logits", "entropy"}:
                wanted.append(exit_.logits)
        return list(dict.fromkeys(wanted))

    def outputs(self, k: int, *, logits: bool, routing: bool) -> list[str]:
        """The outputs to fetch of stage k."""
        asked = self._asks[k][logits]
        return [*asked, *(n for n in self.routing[k] if n not in asked)] if routing else asked

    def layer(self, routing: str) -> int:
        return self._layer[routing]

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


class Run:
    """The queues of one call, one in front of each stage, emptied deepest-first whenever a batch is full."""

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
        manifest, rows = route.manifest, sizes["batch"]
        self._route, self._gate, self._run_graph, self._fetch = route, route.gate, run_graph, fetch
        self._costs = route.costs(sizes)
        self._limit = batch_rows if manifest.rows_independent else 1
        self._arrays, self._rows = arrays, rows
        self._state: State | None = None
        self._ran = [0] * len(route.stages)  # rows, those that rode along included
        self.answer = Predictions(
            label=np.zeros(rows, np.int64),
            confidence=np.zeros(rows, np.float64),
            score=np.zeros(rows, np.float32),
            exit=np.zeros(rows, np.int32),
            abstain=np.zeros(rows, np.bool_),
            flops=np.zeros(rows, np.int64),
        )
        self._probabilities = np.zeros((rows, len(manifest.classes)), np.float32) if "probabilities" in fetch else None
        routed = "routing" in fetch or route.needs_routing
        self._routing = np.full((len(manifest.routing), rows), np.nan, np.float32) if routed else None

    def fetched(self) -> dict[str, Any]:
        kinds = {"probabilities": self._probabilities, "routing": self._routing}
        return {kind: kinds[kind] for kind in self._fetch}

    def executed(self) -> tuple[int, ...]:
        """FLOPs really run, by block. A segment's are shared out over its blocks as theirs would be."""
        spent = [0] * len(self._route.manifest.blocks)
        for rows, parts in zip(self._ran, self._costs.blocks, strict=True):
            for k, flops in parts:
                spent[k] += rows * flops
        return tuple(spent)

    def all(self) -> None:
        if 0 < self._rows <= self._limit:
            self._straight_through()
        elif self._rows:
            self._through_queues()

    def _straight_through(self) -> None:
        """All rows fit in one batch: it goes from stage to stage, and queues would only cost time."""
        state, ids, riding = self._arrays, np.arange(self._rows), False
        for k in range(len(self._route.stages)):
            made, stays, live = self._run_stage(k, state, ids, riding)
            if not live:
                return
            if stays is None:
                state = {**state, **made}
            elif self._pays(k + 1, live, len(ids) - live):
                positions = np.flatnonzero(stays)
                ids, riding = ids[positions], False
                following = self._route.stages[k + 1].waits
                source = {name: made[name] if name in made else state[name] for name in following}
                state = {name: gather(source[name], positions, axis) for name, axis in following.items()}
            else:
                state, ids, riding = {**state, **made}, np.where(stays, ids, GONE), True

    def _through_queues(self) -> None:
        """More rows than a batch takes: survivors of one batch wait for those of the next."""
        self._queues = [Survivors(stage.waits) for stage in self._route.stages]
        self._queues[0].push(self._arrays, np.arange(self._rows))
        while True:
            waiting = [k for k, queue in enumerate(self._queues) if len(queue)]
            if not waiting:
                return
            ready = [k for k in waiting if len(self._queues[k]) >= self._limit]
            # Full batches deepest first, so that little waits; then the rest from the front, so that it fills up.
            k = ready[-1] if ready else waiting[0]
            state, ids = self._queues[k].take(self._limit)
            made, stays, live = self._run_stage(k, state, ids, bool((ids == GONE).any()))
            if live:
                self._pass_on(k + 1, {**state, **made}, ids, stays, live)

    def _run_stage(self, k: int, state: Arrays, ids: Ids, riding: bool) -> tuple[Arrays, NDArray[np.bool_] | None, int]:
        """Run stage k and answer the rows that leave. riding: some ids are GONE.

        Returns the stage's outputs, which rows stay (None: all of them), and how many do.
        """
        stage, keeps_routing = self._route.stages[k], self._routing is not None
        asked = self._route.outputs(k, logits=self._probabilities is not None, routing=keeps_routing)
        made = self._run_graph(stage.graph, state, asked)
        self._ran[k] += len(ids)
        if keeps_routing:
            self._keep_routing(k, made, ids)
        here = ids != GONE if riding else None
        if stage.exit is not None:
            leave = self._answer(stage.exit, made, ids, here)
            if leave is not None:
                here = ~leave if here is None else here & ~leave
        return made, here, len(ids) if here is None else int(np.count_nonzero(here))

    def _keep_routing(self, k: int, made: Arrays, ids: Ids) -> None:
        assert self._routing is not None
        here = ids != GONE
        for name in self._route.routing[k]:
            self._routing[self._route.layer(name), ids[here]] = made[name][here]

    def _answer(self, j: int, made: Arrays, ids: Ids, here: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
        """Ask the gate about exit j and write down the answers of the rows that leave. Returns who does, if any."""
        exit_, answer = self._route.manifest.exits[j], self.answer
        label, score = made[exit_.label], made[exit_.score]
        aux = self._aux(j, exit_, made, ids)
        state = None if self._state is None else {name: values[ids] for name, values in self._state.items()}
        decision = self._gate.decide(j, label, score, aux, state)
        if decision.state is not None:
            self._remember(decision.state, ids, here)
        leave = decision.leave if here is None else decision.leave & here
        if not leave.any():
            return None
        rows = ids[leave]
        answer.label[rows] = label[leave]
        answer.confidence[rows] = decision.confidence[leave]
        answer.score[rows] = score[leave]
        answer.exit[rows] = j
        answer.abstain[rows] = decision.abstain[leave]
        answer.flops[rows] = self._costs.exits[j]
        if self._probabilities is not None:
            self._keep_probabilities(j, made[exit_.logits], score, aux, rows, leave)
        return leave

    def _aux(self, j: int, exit_: Exit, made: Arrays, ids: Ids) -> Arrays:
        aux = {"logits": made[exit_.logits]} if exit_.logits in made else {}
        if self._routing is not None and "routing" in self._gate.needs(j):
            aux["routing"] = self._routing[: len(exit_.routing), ids]  # the layers run so far
        return aux

    def _keep_probabilities(
        self, j: int, logits: NDArray[Any], score: NDArray[Any], aux: Arrays, rows: Ids, leave: NDArray[np.bool_]
    ) -> None:
        assert self._probabilities is not None
        self._probabilities[rows] = np.nan
        known = leave & ~np.isnan(score)
        given = {"routing": aux["routing"][:, known]} if "routing" in aux else {}
        self._probabilities[rows[known[leave]]] = self._gate.calibrators[j].apply(logits[known], given)

    def _remember(self, state: State, ids: Ids, here: NDArray[np.bool_] | None) -> None:
        if self._state is None:
            rows = len(self.answer)
            self._state = {name: np.zeros((rows, *v.shape[1:]), v.dtype) for name, v in state.items()}
        for name, values in state.items():
            if here is None:
                self._state[name][ids] = values
            else:
                self._state[name][ids[here]] = values[here]

    def _pass_on(self, k: int, arrays: Arrays, ids: Ids, stays: NDArray[np.bool_] | None, live: int) -> None:
        if stays is None:
            self._queues[k].push(arrays, ids)
        elif self._pays(k, live, len(ids) - live):
            positions = np.flatnonzero(stays)
            self._queues[k].push(arrays, ids[positions], positions)
        else:
            self._queues[k].push(arrays, np.where(stays, ids, GONE))

    def _pays(self, k: int, live: int, gone: int) -> bool:
        return gathering_pays(live, gone, self._costs.waiting[k], self._costs.stages[k])
