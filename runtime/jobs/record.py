"""The record job: every exit of a bundle, on data, into a folder of records."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from offramp.runtime.bundle import Manifest
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError
from offramp.runtime.files import check_new_folder, new_folder, sha256_of_file
from offramp.runtime.jobs.data import read_shard, row_slices, shards
from offramp.runtime.records import INDEX, SCHEMA, Index, RecordsWriter

Progress = Callable[[int, int], None]
_STEP_ROWS = 512


def record(
    cascade: Cascade,
    data: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Run every exit of the cascade's bundle on a data source and write the records to the folder `out`.

    data: a .npz, .npy or Parquet file with columns named as the model's inputs, and `labels`; or a folder
        of such shards. progress: called with rows done and rows in all.
    The folder appears when it's whole. Raises InputError naming the file and column at fault.
    """
    check_new_folder(Path(out), marker=INDEX, replace=overwrite, keep=Path(data))
    files = shards(data)
    manifest = cascade.manifest
    total, done, labelled = 0, 0, False
    for number, file in enumerate(files):  # a first pass to count and check: nothing is run on bad data
        shard = read_shard(file, manifest)
        total += _rows(shard.inputs, manifest)
        if number and labelled != (shard.labels is not None):
            raise InputError(f"{file}: {'lacks' if labelled else 'has'} labels, unlike {files[0]}.")
        labelled = shard.labels is not None
    if not total:
        raise InputError(f"{data}: has no rows.")
    with new_folder(Path(out), marker=INDEX, replace=overwrite, keep=Path(data)) as folder:
        writer: RecordsWriter | None = None
        for file in files:
            shard = read_shard(file, manifest)
            count = _rows(shard.inputs, manifest)
            for part in row_slices(count, _STEP_ROWS) if count else [slice(0, 0)]:
                rows = np.arange(part.start, part.stop)
                inputs = {i.name: np.take(shard.inputs[i.name], rows, axis=i.batch_axis) for i in manifest.inputs}
                made = cascade.record(inputs, allow_nonfinite=allow_nonfinite)
                made = replace(made, labels=shard.labels[part] if shard.labels is not None else None)
                if writer is None:
                    source = {str(f.name): sha256_of_file(f) for f in files}
                    writer = RecordsWriter(folder, _index(made, manifest, total, {"files": source}))
                writer.append(made)
                done += part.stop - part.start
                if progress is not None:
                    progress(done, total)
        assert writer is not None
        writer.close()
    return Path(out)


def _rows(inputs: dict[str, Any], manifest: Manifest) -> int:
    first = manifest.inputs[0]
    array = inputs[first.name]
    if array.ndim != len(first.shape):
        raise InputError(f"column {first.name!r} has the shape {array.shape}, expected {first.shape}.")
    return int(array.shape[first.batch_axis])


def _index(first: Any, manifest: Manifest, rows: int, source: dict[str, Any]) -> Index:
    return Index(
        schema=SCHEMA,
        manifest=manifest.digest,
        exits=len(manifest.exits),
        rows=rows,
        classes=len(manifest.classes),
        routing=len(manifest.routing),
        routing_seen=[[manifest.routing.index(name) for name in e.routing] for e in manifest.exits],
        features=None if first.features is None else [list(f.shape[1:]) for f in first.features],
        external=first.external is not None,
        reservation=first.reservation is not None,
        labelled=first.labels is not None,
        source=source,
    )
