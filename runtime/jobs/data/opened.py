"""Records, opened once and handed on: a folder's, what a cascade has just recorded, or a user's own logits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from offramp.runtime import scores
from offramp.runtime.bundle import Manifest
from offramp.runtime.errors import InputError
from offramp.runtime.predictions import Records
from offramp.runtime.records import load_npy, read_arrays, read_index

ASSUMED = "exits counted"
"""Provenance of costs that nobody gave."""


@dataclass(frozen=True)
class OpenedRecords:
    """Records with where they come from. Files are mapped: opening them again would read nothing new.

    described: for provenance. notes: what had to be assumed. folder: None for records in memory. manifest: digest
    of the one they were recorded with, "" where that isn't known.
    """

    records: Records
    described: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    folder: Path | None = None
    manifest: str = ""

    @property
    def name(self) -> str:
        """What errors call them."""
        return "records" if self.folder is None else str(self.folder)


Openable = str | Path | Records | OpenedRecords


def open_records(records: Openable, manifest: Manifest | None = None) -> OpenedRecords:
    """Open a folder of records, once; records in memory, and opened ones, are taken as they are.

    manifest: of the bundle they must be of. Records that are too old to say which routing an exit has seen are
    told by it. Raises InputError naming the file that can't be read, or what doesn't fit.
    """
    opened = _open(records)
    if manifest is not None:
        _check_fits(opened, manifest)
        opened = _told_by(manifest, opened)
    _check_routing(opened)
    return opened


def _open(records: Openable) -> OpenedRecords:
    if isinstance(records, OpenedRecords):
        return records
    if isinstance(records, Records):
        return OpenedRecords(records)
    index = read_index(records)
    folder = Path(records)
    return OpenedRecords(read_arrays(folder, index), dict(index.source), folder=folder, manifest=index.manifest)


def _check_fits(opened: OpenedRecords, manifest: Manifest) -> None:
    if opened.manifest and opened.manifest != manifest.digest:
        raise InputError(f"{opened.name}: recorded from another bundle than this one. Record again with this one.")
    logits = opened.records.logits
    if len(logits) != len(manifest.exits):
        raise InputError(f"records have {len(logits)} exits, the bundle has {len(manifest.exits)}.")
    classes = int(logits[0].shape[1])
    if classes != len(manifest.classes):
        raise InputError(f"records have {classes} classes, the bundle has {len(manifest.classes)}.")


def _told_by(manifest: Manifest, opened: OpenedRecords) -> OpenedRecords:
    """With the routing that each exit has seen, where the records don't say it and surely are this bundle's."""
    records = opened.records
    # A folder of no bundle may be anybody's; of records in memory the caller says whose they are.
    theirs = opened.manifest == manifest.digest or opened.folder is None
    if not theirs or records.routing is None or records.routing_seen is not None:
        return opened
    return replace(opened, records=replace(records, routing_seen=manifest.routing_seen))


def _check_routing(opened: OpenedRecords) -> None:
    routing, seen = opened.records.routing, opened.records.routing_seen
    if seen is None:
        return
    layers = 0 if routing is None else len(routing)
    if len(seen) != len(opened.records.logits) or any(not 0 <= k < layers for one in seen for k in one):
        raise InputError(f"{opened.name}: routing_seen doesn't fit its {layers} layers of routing. Record again.")


def own_logits(
    logits: Sequence[str | Path | NDArray[Any]], labels: str | Path | ArrayLike, flops: ArrayLike | None = None
) -> OpenedRecords:
    """Records from a user's own arrays: (N, C) logits an exit (arrays or .npy files, memory-mapped), labels.

    flops: (J,) cumulative cost of leaving at each exit, in any unit, or (J, N); default 1, 2, … J, which
    counts exits. Raises InputError naming the file or array that doesn't fit.
    """
    if not logits:
        raise InputError("logits: expected at least one array, one an exit.")
    arrays = [_array(one, f"logits[{j}]") for j, one in enumerate(logits)]
    shape = arrays[0].shape
    for j, (one, given) in enumerate(zip(arrays, logits, strict=True)):
        name = f"logits[{j}]" if isinstance(given, np.ndarray) else str(given)
        if one.ndim != 2 or not one.shape[1] or one.dtype.kind != "f":
            raise InputError(f"{name}: expected floats of shape (rows, classes), got {one.dtype} {one.shape}.")
        if one.shape != shape:
            raise InputError(f"{name}: has the shape {one.shape}, the first exit's is {shape}.")
    truth = np.asarray(_array(labels, "labels") if isinstance(labels, str | Path) else labels)
    if truth.shape[:1] != shape[:1]:
        raise InputError(f"labels: expected {shape[0]} rows, as logits have, got {truth.shape}.")
    cost = np.arange(1, len(arrays) + 1) if flops is None else np.asarray(flops, np.float64)
    if cost.shape not in ((len(arrays),), (len(arrays), shape[0])):
        raise InputError(f"flops: expected {len(arrays)} numbers, one an exit, got shape {cost.shape}.")
    if not np.isfinite(cost).all() or (cost < 0).any() or (np.diff(cost, axis=0) < 0).any():
        raise InputError("flops: expected the cumulative cost of leaving at each exit: finite, and never falling.")
    # In whatever unit they are given; only their ratios are used.
    spent: NDArray[Any] = np.broadcast_to(cost[:, None], (len(arrays), shape[0])) if cost.ndim == 1 else cost
    records = Records(
        logits=tuple(arrays),
        score=np.stack([scores.log_odds(one).astype(np.float32) for one in arrays]),
        label=np.stack([scores.top_label(one) for one in arrays]),
        flops=spent,
        truth=truth,
    )
    named = [None if isinstance(one, np.ndarray) else Path(one).name for one in logits]
    if flops is not None:
        return OpenedRecords(records, described={"logits": named, "flops": "given"})
    costs = ", ".join(map(str, range(1, len(arrays) + 1)))
    note = f"costs {costs} assumed: give --flops, the cost of leaving at each exit, for shares of what the model costs."
    return OpenedRecords(records, described={"logits": named, "flops": ASSUMED}, notes=(note,))


def _array(given: str | Path | NDArray[Any], name: str) -> NDArray[Any]:
    if isinstance(given, np.ndarray):
        return given
    try:
        return load_npy(given)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
