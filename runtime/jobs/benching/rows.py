"""Rows of the user's data as batches: some at random, the same ones for everybody who takes a turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from offramp.runtime.arrays import Bools, Ints
from offramp.runtime.bundle import Bundle, Manifest
from offramp.runtime.errors import InputError
from offramp.runtime.inputs import Arrays, check_inputs
from offramp.runtime.jobs.data.sources import Chunk, open_data

# Enough for four batches of 128, and for an accuracy to within two points or three.
MOST_ROWS = 512
# Rows further back are left unread: they may be millions, and texts.
REACH = 20_000
# Batches of one row are timed so many at a time: how long one takes depends on where it leaves.
ROWS_TOGETHER = 8

Unit = list[Arrays]
"""Batches that are timed together."""


@dataclass(frozen=True)
class Pool:
    """Rows of one shape. inputs: by name. labels: (N,), −1 where unknown, None without labels."""

    inputs: Arrays
    labels: Ints | None
    rows: int


@dataclass(frozen=True)
class Picked:
    """Some of the data's rows, as the model takes them. of: rows in the data; reach: those that were read."""

    pools: tuple[Pool, ...]
    of: int
    reach: int

    def __len__(self) -> int:
        return sum(pool.rows for pool in self.pools)


def pick(
    bundle: Bundle, data: str | Path, *, most: int = MOST_ROWS, allow_nonfinite: bool = False, seed: int = 0
) -> Picked:
    """At most so many rows at random, of the first 20,000. data: what `open_data` takes. Raises InputError."""
    sources = open_data(data, bundle)
    total = sum(source.rows for source in sources)
    if not total:
        raise InputError(f"{data}: has no rows.")
    reach = min(total, REACH)
    wanted = np.zeros(reach, np.bool_)
    wanted[np.random.default_rng(seed).choice(reach, min(most, reach), replace=False)] = True
    found: dict[tuple[tuple[int, ...], ...], list[tuple[Arrays, Ints | None]]] = {}
    begin = 0
    for source in sources:
        start = 0
        for chunk in source.chunks(0, 128):
            if begin + start >= reach:
                break
            here = np.zeros(chunk.rows, np.bool_)
            of_these = wanted[begin + start : begin + start + chunk.rows]
            here[: len(of_these)] = of_these
            for arrays, labels in _chosen(chunk, here, bundle.manifest):
                try:
                    checked, _ = check_inputs(arrays, bundle.manifest, allow_nonfinite=allow_nonfinite)
                except InputError as error:
                    raise InputError(f"{source.name}: {error}") from error
                shape = tuple(_without_batch(checked, bundle.manifest))
                found.setdefault(shape, []).append((dict(checked), labels))
            start += chunk.rows
        begin += source.rows
    return Picked(tuple(_pool(parts, bundle.manifest) for parts in found.values()), total, reach)


def units(picked: Picked, manifest: Manifest, batch: int, *, most: int, seed: int = 0) -> tuple[list[Unit], bool]:
    """At most so many units of batches of this size, in random order, and whether rows had to be repeated in them.

    Rows of different shapes don't share a batch. A batch is filled by repeating rows only where no shape has as many.
    """
    rng = np.random.default_rng(seed)
    largest = max(pool.rows for pool in picked.pools)
    repeated = largest < batch
    cuts: list[tuple[Pool, Ints]] = []
    for pool in picked.pools:
        order = rng.permutation(pool.rows)
        if repeated and pool.rows == largest:
            order = np.resize(order, batch)
        cuts += [(pool, order[k : k + batch]) for k in range(0, len(order) - batch + 1, batch)]
    together = min(ROWS_TOGETHER if batch == 1 else 1, len(cuts))
    shuffled = [cuts[k] for k in rng.permutation(len(cuts))]
    groups = [shuffled[k : k + together] for k in range(0, len(shuffled) - together + 1, together)][:most]
    return [[_take(pool.inputs, at, manifest) for pool, at in group] for group in groups], repeated


def _chosen(chunk: Chunk, here: Bools, manifest: Manifest) -> list[tuple[Arrays, Ints | None]]:
    chosen = []
    for positions, inputs in chunk.parts:
        at = np.flatnonzero(here[positions])
        if len(at):
            labels = None if chunk.labels is None else chunk.labels[positions[at]]
            chosen.append((_take(inputs, at, manifest), labels))
    return chosen


def _take(inputs: Arrays, at: Ints, manifest: Manifest) -> Arrays:
    return {i.name: np.ascontiguousarray(np.take(inputs[i.name], at, axis=i.batch_axis)) for i in manifest.inputs}


def _without_batch(inputs: Arrays, manifest: Manifest) -> list[tuple[int, ...]]:
    return [tuple(np.delete(inputs[i.name].shape, i.batch_axis).tolist()) for i in manifest.inputs]


def _pool(parts: Sequence[tuple[Arrays, Ints | None]], manifest: Manifest) -> Pool:
    inputs = {
        i.name: np.concatenate([arrays[i.name] for arrays, _ in parts], axis=i.batch_axis) for i in manifest.inputs
    }
    labels = [each for _, each in parts if each is not None]
    first = manifest.inputs[0]
    return Pool(inputs, np.concatenate(labels) if labels else None, inputs[first.name].shape[first.batch_axis])
