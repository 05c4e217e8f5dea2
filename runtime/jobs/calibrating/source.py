"""Where calibration's rows come from: a folder of records, or a user's own logits with no bundle at all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from offramp.runtime import scores
from offramp.runtime.bundle import Manifest
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.auditing.audit import routing_seen
from offramp.runtime.predictions import Records
from offramp.runtime.records import Index, read_index, read_records

ASSUMED = "exits counted"
"""Provenance of costs that nobody gave."""


@dataclass(frozen=True)
class Source:
    """What calibration starts from.

    layers: routing layers each exit has seen. described: for provenance. notes: what had to be assumed.
    """

    records: Records
    layers: Sequence[int] | None = None
    described: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()


def source_of(records: str | Path | Records | Source, manifest: Manifest | None = None) -> Source:
    """Records of a folder, of a bundle or of no bundle, checked against the manifest."""
    if isinstance(records, Source):
        source, index = records, None
    elif isinstance(records, Records):
        source, index = Source(records), None
    else:
        index = read_index(records)
        layers = None
        if index.routing:
            layers = [len(seen) for seen in routing_seen(index, manifest, records)]
        source = Source(read_records(records), layers, dict(index.source))
    if manifest is not None:
        _check_fits(source.records, index, manifest, records)
    return source


def _check_fits(records: Records, index: Index | None, manifest: Manifest, where: Any) -> None:
    if index is not None and index.manifest and index.manifest != manifest.digest:
        raise InputError(f"{where}: recorded from another bundle than this one. Record again with this one.")
    if len(records.logits) != len(manifest.exits):
        raise InputError(f"records have {len(records.logits)} exits, the bundle has {len(manifest.exits)}.")
    classes = int(records.logits[0].shape[1])
    if classes != len(manifest.classes):
        raise InputError(f"records have {classes} classes, the bundle has {len(manifest.classes)}.")


def own_logits(
    logits: Sequence[str | Path | NDArray[Any]], labels: str | Path | ArrayLike, flops: ArrayLike | None = None
) -> Source:
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
        return Source(records, described={"logits": named, "flops": "given"})
    costs = ", ".join(map(str, range(1, len(arrays) + 1)))
    note = f"costs {costs} assumed: give --flops, the cost of leaving at each exit, for shares of what the model costs."
    return Source(records, described={"logits": named, "flops": ASSUMED}, notes=(note,))


def _array(given: str | Path | NDArray[Any], name: str) -> NDArray[Any]:
    if isinstance(given, np.ndarray):
        return given
    try:
        array: NDArray[Any] = np.load(given, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{given}: can't be read as {name} ({error}).") from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"{given}: expected a .npy file with one array.")
    return array
