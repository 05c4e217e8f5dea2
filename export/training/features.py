"""What a frozen model says of every row, computed once: what its heads take, its own logits, and the labels.

Pooling has no weights, so a row is a vector a head: training on them takes seconds where running the model takes
minutes. They lie in memory-mapped files, and a run that was killed goes on where it was.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from offramp.export.attaching.attached import Attached
from offramp.export.training.rows import classes_of, tensors_of
from offramp.runtime.errors import InputError
from offramp.runtime.files import write_atomically
from offramp.runtime.jobs.data.sources import Chunk, DataFile

BATCH = 64
_JOURNAL = "features.json"
_CHECKPOINT_SECONDS = 2.0
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Features:
    """pooled: one (N, width) array a head. logits: (N, C), the last exit's. labels: (N,), -1 where unknown."""

    pooled: tuple[NDArray[np.float32], ...]
    logits: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


class _Journal(msgspec.Struct, kw_only=True):
    """How far it is. key: what must be the same for it to be gone on with."""

    key: dict[str, Any]
    done: int = 0


def compute_features(
    attached: Attached,
    sources: Sequence[DataFile],
    folder: Path,
    key: dict[str, Any],
    *,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Features:
    """Run the model on all rows, or on those that an earlier run with the same key left.

    folder: for the files. key: says which model and data these are. Raises InputError naming file and rows.
    """
    total = sum(source.rows for source in sources)
    folder.mkdir(parents=True, exist_ok=True)
    journal = _read(folder, key)
    arrays = _open(folder, attached, total, new=not journal.done)
    if progress is not None:
        progress(journal.done, total)
    saved = time.monotonic()
    at = 0
    for source in sources:
        begin = max(0, journal.done - at)
        if begin < source.rows:
            stamp = source.table.stamp()
            for chunk in source.chunks(begin, BATCH):
                _fill(attached, chunk, arrays, journal.done, device, f"{source.name}, from row {begin} on")
                begin += chunk.rows
                journal.done += chunk.rows
                if progress is not None:
                    progress(journal.done, total)
                if time.monotonic() - saved >= _CHECKPOINT_SECONDS:
                    _save(folder, journal, arrays)
                    saved = time.monotonic()
            if source.table.stamp() != stamp or begin != source.rows:
                raise InputError(f"{source.name}: changed while it was being read. Train again.")
        at += source.rows
    _save(folder, journal, arrays)
    *pooled, logits, labels = arrays
    return Features(tuple(pooled), logits, labels)


def _fill(
    attached: Attached, chunk: Chunk, arrays: Sequence[NDArray[Any]], start: int, device: str, where: str
) -> None:
    *outputs, labels = arrays
    for positions, inputs in chunk.parts:
        for at in range(0, len(positions), BATCH):
            some = {name: array[at : at + BATCH] for name, array in inputs.items()}
            try:
                with torch.inference_mode():
                    made = attached.pooled(**tensors_of(some, device))
            except (RuntimeError, ValueError, IndexError, TypeError) as error:  # the user's own code
                raise InputError(f"{where}: the model fails: {' '.join(str(error).split())[:300]}") from error
            for array, tensor in zip(outputs, made, strict=True):
                array[start + positions[at : at + BATCH]] = tensor.float().cpu().numpy()
    labels[start : start + chunk.rows] = -1 if chunk.labels is None else chunk.labels


def _open(folder: Path, attached: Attached, rows: int, *, new: bool) -> list[NDArray[Any]]:
    shapes = {f"pooled_{j}.npy": (rows, tap.width) for j, tap in enumerate(attached.taps)}
    shapes["logits.npy"] = (rows, classes_of(attached))
    if not new:
        return [np.load(folder / name, mmap_mode="r+") for name in (*shapes, "labels.npy")]
    made = [
        np.lib.format.open_memmap(folder / name, "w+", np.dtype(np.float32), shape) for name, shape in shapes.items()
    ]
    return [*made, np.lib.format.open_memmap(folder / "labels.npy", "w+", np.dtype(np.int64), (rows,))]


def _read(folder: Path, key: dict[str, Any]) -> _Journal:
    """An earlier run's journal, if it is of this model and data; else a new one."""
    try:
        found = msgspec.json.decode((folder / _JOURNAL).read_bytes(), type=_Journal)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return _Journal(key=key)
    return found if found.key == key else _Journal(key=key)


def _save(folder: Path, journal: _Journal, arrays: Sequence[NDArray[Any]]) -> None:
    for array in arrays:
        assert isinstance(array, np.memmap)
        array.flush()
    write_atomically(folder / _JOURNAL, msgspec.json.encode(journal))
