"""Which graphs an operating point runs: the fewest that its exits need."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from offramp.runtime import cost
from offramp.runtime.bundle import Block, Manifest, Segment


@dataclass(frozen=True)
class Stage:
    """One graph of a cascade, with the exit it ends in.

    blocks: the first and last block it covers. exit: the exit that is asked after it, None if none is.
    waits: {tensor: batch axis} of the state in front of it. passes: names of the state behind it.
    """

    graph: Block | Segment
    blocks: tuple[int, int]
    exit: int | None
    waits: Mapping[str, int]
    passes: tuple[str, ...]


def plan(manifest: Manifest, open_exits: Iterable[int]) -> tuple[Stage, ...]:
    """The stages of a cascade that leaves at the given exits only; the last exit is always open.

    Between two open exits the fewest graphs are taken, segments where the bundle has them.
    """
    last_block = len(manifest.blocks) - 1
    stops = sorted({manifest.exits[j].block for j in open_exits} | {last_block})
    spans: list[tuple[int, int]] = []
    first = 0
    for stop in stops:
        spans += _fewest(manifest, first, stop)
        first = stop + 1
    exits = {manifest.exits[j].block: j for j in range(len(manifest.exits)) if manifest.exits[j].block in stops}
    axes = _batch_axes(manifest)
    graphs = [_graph(manifest, span) for span in spans]
    stages = []
    for k, (span, graph) in enumerate(zip(spans, graphs, strict=True)):
        stages.append(
            Stage(
                graph=graph,
                blocks=span,
                exit=exits.get(span[1]),
                waits={name: axes[name] for name in _alive(manifest, graphs, k)},
                passes=tuple(_alive(manifest, graphs, k + 1)),
            )
        )
    return tuple(stages)


def _batch_axes(manifest: Manifest) -> dict[str, int]:
    return {i.name: i.batch_axis for i in manifest.inputs} | {n: t.batch_axis for n, t in manifest.tensors.items()}


def _alive(manifest: Manifest, graphs: list[Block | Segment], k: int) -> list[str]:
    """Tensors that graphs k and later take from what is there before k, in order of first use."""
    made = {name for graph in graphs[:k] for name in graph.outputs} | {i.name for i in manifest.inputs}
    return list(dict.fromkeys(name for graph in graphs[k:] for name in graph.inputs if name in made))


def _graph(manifest: Manifest, span: tuple[int, int]) -> Block | Segment:
    if span[0] == span[1]:
        return manifest.blocks[span[0]]
    return next(s for s in manifest.segments if (s.first, s.last) == span)


def _fewest(manifest: Manifest, first: int, last: int) -> list[tuple[int, int]]:
    """The fewest spans that cover blocks first…last, each a block or a segment of the bundle."""
    there = {(s.first, s.last) for s in manifest.segments} | {(k, k) for k in range(len(manifest.blocks))}
    best: dict[int, list[tuple[int, int]]] = {first: []}  # blocks covered up to (not including) -> spans
    for end in range(first + 1, last + 2):
        ways = [
            [*best[start], (start, end - 1)]
            for start in range(first, end)
            if start in best and (start, end - 1) in there
        ]
        best[end] = min(ways, key=len)
    return best[last + 1]


def row_bytes(manifest: Manifest, stage: Stage, sizes: Mapping[str, int]) -> int:
    """Bytes of one row's state waiting in front of a stage, at these axis sizes."""
    shapes = {i.name: (i.dtype, i.shape) for i in manifest.inputs} | {
        name: (tensor.dtype, tensor.shape) for name, tensor in manifest.tensors.items()
    }
    alone = {**sizes, "batch": 1}
    total = 0
    for name in stage.waits:
        dtype, shape = shapes[name]
        elements = prod(d if isinstance(d, int) else cost.evaluate(d, alone) for d in shape)
        total += elements * np.dtype(dtype).itemsize
    return total
