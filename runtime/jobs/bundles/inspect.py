"""What a bundle is made of: blocks, segments, carried tensors, costs, sizes, and times on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from offramp.runtime import cost
from offramp.runtime.bundle import Block, Bundle, Manifest, Segment
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.bundles.timing import Timings


@dataclass(frozen=True)
class Part:
    """A block or segment at given axis sizes. flops, handed_on: of one row. seconds: None if not measured."""

    file: str
    blocks: tuple[int, int]
    exit: str
    flops: int
    handed_on: int
    params: int
    nodes: int
    recomputed: int
    file_bytes: int
    carried: tuple[str, ...]
    seconds: tuple[float, ...] | None


@dataclass(frozen=True)
class Carried:
    """A tensor of the carried state. bytes: of one row."""

    name: str
    dtype: str
    shape: str
    batch_axis: int
    pad: str
    bytes: int


@dataclass(frozen=True)
class InsideCascade:
    """The cascade graph. seconds: what each block takes inside it, gate included, in order."""

    file: str
    file_bytes: int
    seconds: tuple[tuple[float, ...], ...] | None


@dataclass(frozen=True)
class Inspection:
    """Everything `offramp inspect` shows."""

    name: str
    version: str
    classes: int
    exits: tuple[str, ...]
    sizes: Mapping[str, int]
    blocks: tuple[Part, ...]
    segments: tuple[Part, ...]
    cascade_graph: InsideCascade | None
    carried: tuple[Carried, ...]
    files: Mapping[str, int]
    rows: tuple[int, ...]


def inspect(
    bundle: Bundle, sizes: Mapping[str, int], timings: Timings | None = None, inside: Timings | None = None
) -> Inspection:
    """Describe a bundle at these axis sizes (all but the batch), with times if they were measured.

    timings: of its graphs by themselves. inside: of its blocks in the cascade graph.
    """
    if not isinstance(bundle, Bundle):
        raise InputError(f"bundle is {bundle!r}, expected an opened one: read_bundle(path).")
    manifest = bundle.manifest
    return Inspection(
        name=manifest.name,
        version=manifest.version,
        classes=len(manifest.classes),
        exits=tuple(e.name for e in manifest.exits),
        sizes=dict(sizes),
        blocks=tuple(_part(manifest, block, (k, k), sizes, timings) for k, block in enumerate(manifest.blocks)),
        segments=tuple(_part(manifest, s, (s.first, s.last), sizes, timings) for s in manifest.segments),
        cascade_graph=_inside_cascade(manifest, inside),
        carried=tuple(_carried(manifest, name, sizes) for name in manifest.tensors),
        files={name: entry.bytes for name, entry in manifest.files.items()},
        rows=timings.rows if timings is not None else (),
    )


def _part(
    manifest: Manifest,
    graph: Block | Segment,
    blocks: tuple[int, int],
    sizes: Mapping[str, int],
    timings: Timings | None,
) -> Part:
    alone = {**sizes, "batch": 1}
    return Part(
        file=graph.file,
        blocks=blocks,
        exit="" if graph.exit is None else manifest.exits[graph.exit].name,
        flops=cost.evaluate(graph.flops, alone),
        handed_on=cost.evaluate(graph.bytes, alone),
        params=graph.params,
        nodes=graph.nodes,
        recomputed=graph.recomputed,
        file_bytes=manifest.files[graph.file].bytes,
        carried=tuple(name for name in graph.outputs if name in manifest.tensors),
        seconds=timings.seconds.get(graph.file) if timings is not None else None,
    )


def _inside_cascade(manifest: Manifest, inside: Timings | None) -> InsideCascade | None:
    if manifest.cascade is None:
        return None
    file = manifest.cascade.file
    seconds = None if inside is None else tuple(inside.seconds[block.file] for block in manifest.blocks)
    return InsideCascade(file, manifest.files[file].bytes, seconds)


def _carried(manifest: Manifest, name: str, sizes: Mapping[str, int]) -> Carried:
    tensor, alone = manifest.tensors[name], {**sizes, "batch": 1}
    elements = prod(d if isinstance(d, int) else cost.evaluate(d, alone) for d in tensor.shape)
    return Carried(
        name=name,
        dtype=tensor.dtype,
        shape=f"[{', '.join(map(str, tensor.shape))}]",
        batch_axis=tensor.batch_axis,
        pad="-" if tensor.pad is None else str(tensor.pad),
        bytes=elements * np.dtype(tensor.dtype).itemsize,
    )
