"""What all calls at one operating point share: its stages, what to ask of each, and what rows cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.kernels.reference import rounded_up
from offramp.runtime import cost
from offramp.runtime.bundle import CASCADE_INPUTS, Block, CascadeGraph, Manifest, Segment
from offramp.runtime.execution.stages import plan, row_bytes
from offramp.runtime.gate import Gate


@dataclass(frozen=True)
class Costs:
    """What follows from the axis sizes of a request, for one row.

    exits: int64 (J,), cumulative FLOPs of leaving at each exit, as the manifest's blocks state them.
    stages: FLOPs of each stage's graph. waiting: bytes of a row's state in front of each stage.
    blocks: each stage's FLOPs shared out over the blocks it covers, as (block, FLOPs).
    alone: FLOPs really run, by block, if a lone row leaves behind each stage.
    """

    exits: NDArray[np.int64]
    stages: tuple[int, ...]
    waiting: tuple[int, ...]
    blocks: tuple[tuple[tuple[int, int], ...], ...]
    alone: tuple[tuple[int, ...], ...]

    def executed(self, ran: Sequence[int]) -> tuple[int, ...]:
        """FLOPs really run, by block, if `ran` rows went through each stage.

        A segment's are shared out over its blocks as theirs would be.
        """
        return _executed(self.blocks, ran)


def _executed(blocks: tuple[tuple[tuple[int, int], ...], ...], ran: Sequence[int]) -> tuple[int, ...]:
    spent = [0] * (blocks[-1][-1][0] + 1)
    for rows, parts in zip(ran, blocks, strict=True):
        for k, flops in parts:
            spent[k] += rows * flops
    return tuple(spent)


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


def threshold_inputs(graph: CascadeGraph, thresholds: Sequence[float]) -> dict[str, NDArray[Any]]:
    """What the cascade graph takes beside the model's inputs, for the thresholds of all exits but the last.

    (1, gates - 1): one row of thresholds, for however many rows.
    """
    bars = np.full((1, graph.gates - 1), np.inf, np.float32)
    for gate, threshold in zip(graph.exits[:-1], thresholds, strict=True):
        bars[0, gate] = rounded_up(threshold)
    (name,) = CASCADE_INPUTS
    return {name: bars}


def threshold_rows(routes: Sequence["Route"], of_row: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """As `threshold_inputs`, for a batch whose rows follow different routes over one bundle with a cascade graph.

    of_row: (N,), which of the routes each row follows. Every route can be said so, also one whose own calls run another
    graph. Gives (N, gates - 1), or (1, gates - 1) where there is but one route.
    """
    (name,) = CASCADE_INPUTS
    rows = [route.thresholds[name] for route in routes]
    return {name: rows[0] if len(rows) == 1 else np.concatenate(rows)[of_row]}


def gates_that_ran(
    graph: CascadeGraph, thresholds: Mapping[str, NDArray[Any]], left: NDArray[np.int32]
) -> tuple[tuple[int, int | None], ...]:
    """The gates that are in the cascade graph's EVERY_EXIT_OUTPUTS, as `Reached` takes them.

    thresholds: as the graph was given them: a gate ran for the rows that came to it if it was open to any of them.
    left: (N,) the gate where each row left; any where thresholds are for all rows.
    """
    (bars,) = thresholds.values()
    opened = bars < math.inf
    if len(bars) > 1:
        opened &= left[:, None] >= np.arange(graph.gates - 1)
    ran = [*np.atleast_1d(opened.any(axis=0)).tolist(), True]
    exits = {gate: exit for exit, gate in enumerate(graph.exits)}
    # Gate 0 is there even where it is closed.
    return tuple((k, exits.get(k) if ran[k] else None) for k in range(graph.gates) if ran[k] or k == 0)


class Route:
    """What all calls at one operating point share: stages, what to ask of each, and what rows cost.

    thresholds: its thresholds for the cascade graph, {} if there is none. threshold_inputs: the same, None where the
    route's own calls run something else. gates: the graph's gates that run with them, as `Reached` takes them.
    """

    def __init__(self, manifest: Manifest, gate: Gate) -> None:
        self.manifest = manifest
        self.gate = gate
        self.stages = plan(manifest, gate.point.exits)
        self.stage_of_exit = {stage.exit: k for k, stage in enumerate(self.stages) if stage.exit is not None}
        self.only_exit = np.array([len(manifest.exits) - 1], np.int32)  # where one graph is all that is run
        self.only_exit.flags.writeable = False
        self.needs_routing = any("routing" in gate.needs(j) for j in gate.point.exits)
        self.needs_logits = any(gate.needs(j) & {"logits", "entropy"} for j in gate.point.exits)
        self._layer = {name: k for k, name in enumerate(manifest.routing)}
        self._steps = {
            (logits, routing): [self._step(k, logits, routing) for k in range(len(self.stages))]
            for logits in (False, True)
            for routing in (False, True)
        }
        graph = manifest.cascade
        self.thresholds = {} if graph is None else threshold_inputs(graph, gate.point.thresholds[:-1])
        self.gates = () if graph is None else gates_that_ran(graph, self.thresholds, np.zeros(1, np.int32))
        # What is one graph anyway needs no gates.
        self.threshold_inputs = None if graph is None or len(self.stages) == 1 else self.thresholds
        # Requests come in few sizes; evaluating the expressions anew costs more than a small block's gate.
        self._costs = lru_cache(maxsize=1024)(self._evaluate)

    def out_of_reach(self) -> "Route":
        """The same stages and exits for a point out of every row's reach, which abstains on none."""
        whole = replace(self.gate.point.out_of_reach(), abstain_below=-math.inf)
        return Route(self.manifest, Gate(whole, len(self.manifest.exits)))

    def _step(self, k: int, logits: bool, routing: bool) -> Step:
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

    def exit_of_gate(self, gates: NDArray[np.int32]) -> NDArray[np.int32]:
        """The manifest's exits that gates of the cascade graph are. A repacked bundle has fewer of them."""
        graph = self.manifest.cascade
        assert graph is not None
        return gates if len(graph.exits) == graph.gates else np.searchsorted(graph.exits, gates).astype(np.int32)

    def steps(self, *, logits: bool = False, routing: bool = False) -> list[Step]:
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
        count = len(shares)
        return Costs(
            exits=exits,
            stages=stages,
            waiting=tuple(row_bytes(manifest, stage, alone) for stage in self.stages),
            blocks=tuple(shares),
            alone=tuple(_executed(tuple(shares), [1] * (k + 1) + [0] * (count - k - 1)) for k in range(count)),
        )
