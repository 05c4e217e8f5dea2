"""Where a model is cut: which operations each block runs, and what it hands on.

Block j is the ancestors of exit j that no earlier exit needed. Between two blocks the cheapest set of
tensors is carried: a minimum cut that weighs the bytes of carrying a tensor against the work of computing
it again. Integers taken from shapes, and whatever has no axis that is plainly the batch, can't be carried
(rows leave, and they would be wrong), so they are always computed again.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx
from offramp.export.dims import Dim
from offramp.export.flops import at, flops, is_contraction
from offramp.export.graph import ModelGraph, Op
from offramp.export.outputs import KINDS, PER_EXIT
from offramp.export.probe import batch_axis, element_bytes
from offramp.runtime.cost import evaluate
from offramp.runtime.errors import ExportError

# A carried byte is written by one block, read and written when its row is gathered, read by the next
# block, and kept in memory while the row waits; a recomputed byte is written and read at once, in cache.
_CARRY_WEIGHT = 4
# FLOPs a CPU does in the time it moves a byte.
_FLOPS_PER_BYTE = 8
# A cut that would compute more than this share of the earlier blocks again isn't a cut.
_MAX_RECOMPUTED = 0.1
# Sequences and images are looked at no smaller than this: examples are often tiny.
_TYPICAL_SIZE = 64

_RANDOM = frozenset(
    ["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"]
)


@dataclass(frozen=True)
class BlockPlan:
    """What one block runs and exchanges. `recomputed` are operations of earlier blocks run again."""

    ops: list[Op]
    recomputed: list[Op]
    inputs: list[str]
    carried: list[str]
    auxiliary: list[str]


@dataclass(frozen=True)
class Plan:
    """Every block; the block of every logits and auxiliary output; what is alive across the cut after each."""

    blocks: list[BlockPlan]
    made_in: dict[str, int]
    carried: list[list[str]]


class Partition:
    """Cuts a model after each of its exits.

    sizes: axis sizes at which bytes are weighed against work.
    """

    def __init__(
        self,
        graph: ModelGraph,
        shapes: dict[str, list[Dim] | None],
        sizes: dict[str, int],
        banned: frozenset[str] | set[str] = frozenset(),
    ) -> None:
        self.graph = graph
        self.shapes = shapes
        self.sizes = {a: 1 if a == "batch" else max(n, _TYPICAL_SIZE) for a, n in sizes.items()}
        self._banned = banned  # values that must not be carried, whatever their shape
        self._block_of: dict[int, int] = {}  # op index -> block

    def plan(self) -> Plan:
        blocks = self._assign()
        made_in = self._assign_auxiliary(blocks)
        last = len(blocks) - 1
        carried: list[list[str]] = [[] for _ in blocks]  # across the cut after block j
        again: list[list[Op]] = [[] for _ in blocks]
        for j in range(last, 0, -1):
            needed = self._foreign(blocks[j], j)
            if j < last:
                needed |= {name for name in carried[j] if self._origin(name) < j}
            kept, repeated = self._cut(needed, j)
            carried[j - 1], again[j] = kept, repeated
        plans = []
        for j, ops in enumerate(blocks):
            run = sorted([*ops, *again[j]], key=lambda op: op.index)
            made = {name for op in run for name in op.outputs}
            inputs = self._inputs(run, made, j)
            plans.append(
                BlockPlan(
                    ops=run,
                    recomputed=sorted(again[j], key=lambda op: op.index),
                    inputs=inputs,
                    carried=[n for n in carried[j] if n in made] if j < last else [],
                    auxiliary=[n for n, block in made_in.items() if block == j],
                )
            )
        return Plan(plans, made_in, carried)

    def merge(self, plan: Plan, first: int, last: int) -> BlockPlan:
        """Blocks first…last as one: what the cuts between them repeated is gone, and so are the inner exits.

        Routing outputs belong to layers, not to exits, so those of the inner blocks stay.
        """
        outputs = self.graph.outputs
        own = [names[last] for kind in PER_EXIT if (names := getattr(outputs, kind))]
        here = [n for n in (*outputs.routing, *own) if first <= plan.made_in[n] <= last]
        there = set(plan.carried[first - 1]) if first else set()
        # What an earlier block computed and nobody carried is computed again here, as in block `first` itself.
        carried = [n for n in plan.carried[last] if n not in there]
        found: set[int] = set()
        waiting = [outputs.logits[last], *carried, *here]
        while waiting:
            name = waiting.pop()
            op = self.graph.producer.get(name)
            if op is None or name in there or op.index in found:
                continue
            found.add(op.index)
            waiting += self._needs(op)
        ops = [self.graph.ops[i] for i in sorted(found)]
        made = {name for op in ops for name in op.outputs}
        return BlockPlan(
            ops=ops,
            recomputed=[op for op in ops if self._block_of[op.index] < first],
            inputs=self._inputs(ops, made - there, first),
            carried=[n for n in carried if n in made],
            auxiliary=here,
        )

    def _assign(self) -> list[list[Op]]:
        blocks: list[list[Op]] = []
        for j, logits in enumerate(self.graph.outputs.logits):
            new = self.graph.ancestors([logits], stop=self._block_of.keys() | set())
            if not new:
                raise ExportError(
                    f"exit {j} ({logits!r}) computes nothing that an earlier exit hasn't: "
                    "list the exits from shallow to deep, each once."
                )
            self._block_of.update(dict.fromkeys(new, j))
            blocks.append([self.graph.ops[i] for i in sorted(new)])
        return blocks

    def _assign_auxiliary(self, blocks: list[list[Op]]) -> dict[str, int]:
        """Auxiliary outputs go to the earliest block that has all they need."""
        made_in = {name: j for j, name in enumerate(self.graph.outputs.logits)}
        for kind in KINDS[1:]:
            for k, name in enumerate(getattr(self.graph.outputs, kind)):
                everything = self.graph.ancestors([name])
                block = max((self._block_of[i] for i in everything if i in self._block_of), default=0)
                for i in everything - self._block_of.keys():
                    self._block_of[i] = block
                    blocks[block].append(self.graph.ops[i])
                blocks[block].sort(key=lambda op: op.index)
                if kind != "routing" and block > k:
                    raise ExportError(
                        f"{kind}[{k}] ({name!r}) needs block {block}, which runs only after exit {k}: "
                        "an exit's outputs may use no deeper layer than its logits."
                    )
                made_in[name] = block
        return made_in

    def _origin(self, name: str) -> int:
        """The block that first computes a value; -1 for an input of the model."""
        op = self.graph.producer.get(name)
        return -1 if op is None else self._block_of[op.index]

    def _from_shape(self, op: Op) -> bool:
        """Is this a Shape whose sizes any received tensor can tell?"""
        return op.proto.op_type == "Shape" and self.shapes.get(op.inputs[0]) is not None

    def _needs(self, op: Op) -> list[str]:
        """The values an op needs when it runs in a later block: no weights, nothing for the size of a tensor."""
        return [] if self._from_shape(op) else [n for n in op.inputs if n not in self.graph.weights]

    def _foreign(self, ops: Iterable[Op], block: int) -> set[str]:
        """Values that ops of a block take from earlier ones."""
        needed = set()
        for op in ops:
            for name in op.inputs if not self._from_shape(op) else ():
                if name not in self.graph.weights and self._origin(name) < block:
                    needed.add(name)
        return needed

    def _carry_cost(self, name: str) -> float | None:
        """The weighted bytes of carrying one row of a tensor; None if it can't be carried."""
        dims = self.shapes.get(name)
        if name in self.graph.inputs:
            dtype = self.graph.inputs[name][0]
        elif name in self.graph.dtypes:
            dtype = self.graph.dtypes[name]
        else:
            return None
        if dims is None or batch_axis(dims) is None or name in self._banned:
            return None
        return float(_CARRY_WEIGHT * element_bytes(dtype) * max(1, at(dims, self.sizes)))

    def _run_cost(self, op: Op) -> float | None:
        """The weighted work of running an op again for one row; None if it gives another answer each time."""
        if op.proto.op_type in _RANDOM:
            return None
        moved = 1
        for name in {*op.outputs, *self._needs(op)}:
            dims = self.shapes.get(name)
            if dims is not None and name in self.graph.dtypes:
                moved += element_bytes(self.graph.dtypes[name]) * at(dims, self.sizes)
        work = evaluate(str(flops([op], self.shapes)), self.sizes)
        return moved + work / _FLOPS_PER_BYTE

    def _cut(self, needed: set[str], block: int) -> tuple[list[str], list[Op]]:
        """The cheapest tensors to carry into `block` so that `needed` can be had there, and the ops to repeat."""
        network = nx.DiGraph()
        network.add_node("source")
        network.add_node("sink")
        waiting, seen = sorted(needed), set(needed)
        ops: dict[int, Op] = {}
        for name in sorted(needed):
            network.add_edge(("value", name), "sink")  # no capacity: infinite
        while waiting:
            name = waiting.pop()
            carry = self._carry_cost(name)
            op = self.graph.producer.get(name)
            value = ("value", name)
            limit = {} if carry is None else {"capacity": carry}
            run = None if op is None else self._run_cost(op)
            # What can be carried isn't multiplied or convolved again, however small: FLOPs stay what they were.
            fixed = (
                carry is not None
                and op is not None
                and (is_contraction(op) or (run is not None and run >= carry and len(op.outputs) == 1))
            )
            if op is None or run is None or fixed:
                network.add_edge("source", value, **limit)
                continue
            node = ("op", op.index)
            network.add_edge(node, value, **limit)
            if op.index in ops:
                continue
            ops[op.index] = op
            network.add_edge("source", node, capacity=run)
            for need in self._needs(op):
                network.add_edge(("value", need), node)
                if need not in seen:
                    seen.add(need)
                    waiting.append(need)
        if not needed:
            return [], []
        try:
            _, (_, far) = nx.minimum_cut(network, "source", "sink")
        except nx.NetworkXUnbounded:
            raise ExportError(self._stuck(needed, block)) from None
        repeated = [op for index, op in ops.items() if ("op", index) in far]
        kept = [
            name
            for name in sorted(seen)
            if ("value", name) in far
            and (self.graph.producer.get(name) is None or ("op", self.graph.producer[name].index) not in far)
        ]
        self._refuse_if_dear(repeated, block)
        return kept, repeated

    def _inputs(self, run: list[Op], made: set[str], block: int) -> list[str]:
        """What a block receives: inputs of the model and carried tensors that its ops really use."""
        wanted: dict[str, None] = {}
        axes: set[str] = set()
        for op in run:
            source = op.inputs[0] if self._from_shape(op) else ""
            if source and source not in made and (block != 0 or source in self.graph.producer):
                axes |= {axis for dim in self.shapes[op.inputs[0]] or [] for axis in dim.involved}
                continue
            for name in op.inputs:
                if name not in made and name not in self.graph.weights:
                    wanted[name] = None
        for name in self.graph.outputs.names:
            if self._origin(name) == -1 and block == 0 and name not in self.graph.weights:
                wanted[name] = None
        for axis in sorted(axes):
            if not any(d.plain == axis for name in wanted for d in self.shapes[name] or []):
                source = min(
                    (n for n, (_, shape) in self.graph.inputs.items() if axis in shape),
                    key=lambda n: self._carry_cost(n) or 0,
                )
                wanted[source] = None
        order = {name: k for k, name in enumerate([*self.graph.inputs, *self.graph.producer])}
        return sorted(wanted, key=order.__getitem__)

    def _refuse_if_dear(self, repeated: list[Op], block: int) -> None:
        heavy = [op for op in repeated if is_contraction(op)]
        again = evaluate(str(flops(heavy, self.shapes)), self.sizes)
        earlier = [op for op in self.graph.ops if self._block_of.get(op.index, block) < block]
        total = evaluate(str(flops(earlier, self.shapes)), self.sizes)
        if again > _MAX_RECOMPUTED * total:
            culprit = heavy[-1].outputs[0]
            raise ExportError(
                f"the cut before exit {block} would compute {again / total:.0%} of the earlier blocks again, because "
                f"{self._describe(culprit)} can't be carried: {self._why_not(culprit)}"
            )

    def _stuck(self, needed: set[str], block: int) -> str:
        stuck = [n for n in sorted(needed) if self._carry_cost(n) is None] or sorted(needed)
        return (
            f"the cut before exit {block} can't be made: {self._describe(stuck[0])} has no axis that is plainly the "
            "batch and can't be computed again. Keep the batch as an axis of its own where the model is cut."
        )

    def _why_not(self, name: str) -> str:
        if name in self._banned:
            return "a row of it isn't the same when others are left out."
        return (
            "no axis of it is plainly the batch. Keep the batch as an axis of its own where the model is cut: frames "
            "or windows that are folded into it, as [batch, frames, …]."
        )

    def _describe(self, name: str) -> str:
        dims = self.shapes.get(name)
        return f"{name!r} [{', '.join(map(str, dims))}]" if dims is not None else f"{name!r} (of unknown shape)"
