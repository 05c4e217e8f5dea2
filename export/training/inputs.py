"""The rows' inputs, computed once and kept on disk, to be had in any order: joint training draws them at random."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.export.training.features import Progress
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.data.sources import DataFile

_INDEX = "inputs.npz"
_ROWS = 256


@dataclass(frozen=True)
class Inputs:
    """values: the rows of each input one behind the other, memory-mapped; offsets: (N,) where a row begins in it.

    shapes: of an input's rows, (N, axes without the batch). alike: (N,), the same number for rows of the same shapes.
    """

    values: dict[str, NDArray[Any]]
    offsets: dict[str, NDArray[np.int64]]
    shapes: dict[str, NDArray[np.int64]]
    alike: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.alike)

    def of(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The inputs of rows of the same shapes, batch first."""
        found = {}
        for name, values in self.values.items():
            shape = tuple(self.shapes[name][rows[0]])
            size = int(np.prod(shape))
            begun = self.offsets[name][rows]
            found[name] = np.stack([values[at : at + size] for at in begun]).reshape(len(rows), *shape)
        return found

    def batches(self, rows: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
        """The rows in batches of at most `size`, those of the same shapes together, shapes in order."""
        found = []
        for one in np.unique(self.alike[rows]):
            some = rows[self.alike[rows] == one]
            found += [some[at : at + size] for at in range(0, len(some), size)]
        return found


def keep_inputs(sources: Sequence[DataFile], folder: Path, progress: Progress | None = None) -> Inputs:
    """Write the inputs of all rows to `folder`, or read what was written there before, whole.

    Raises InputError naming file and row, or that the disk is full.
    """
    if not (folder / _INDEX).exists():
        try:
            _write(sources, folder, progress)
        except OSError as error:
            raise InputError(f"{folder}: the rows' inputs can't be kept there ({error}).") from error
    with np.load(folder / _INDEX, allow_pickle=False) as index:
        names = [str(name) for name in index["names"]]
        return Inputs(
            {
                name: np.memmap(folder / f"input_{k}.bin", np.dtype(str(index["dtypes"][k])), "r")
                for k, name in enumerate(names)
            },
            {name: index[f"offsets_{k}"] for k, name in enumerate(names)},
            {name: index[f"shapes_{k}"] for k, name in enumerate(names)},
            index["alike"],
        )


def _write(sources: Sequence[DataFile], folder: Path, progress: Progress | None) -> None:
    names = [one.name for one in sources[0].manifest.inputs]
    total, start = sum(source.rows for source in sources), 0
    files = [(folder / f"input_{k}.bin").open("wb") for k in range(len(names))]
    offsets = np.zeros((len(names), total), np.int64)
    shapes: list[NDArray[np.int64]] = [np.zeros((total, 0), np.int64)] * len(names)
    dtypes = [""] * len(names)
    written = [0] * len(names)
    try:
        for source in sources:
            stamp = source.table.stamp()
            for chunk in source.chunks(0, _ROWS):
                for positions, inputs in chunk.parts:
                    for k, name in enumerate(names):
                        array = np.ascontiguousarray(inputs[name])
                        size = int(np.prod(array.shape[1:]))
                        if not dtypes[k]:
                            dtypes[k], shapes[k] = array.dtype.str, np.zeros((total, array.ndim - 1), np.int64)
                        files[k].write(array.tobytes())
                        offsets[k, start + positions] = written[k] + size * np.arange(len(positions))
                        shapes[k][start + positions] = array.shape[1:]
                        written[k] += array.size
                start += chunk.rows
                if progress is not None:
                    progress(start, total)
            if source.table.stamp() != stamp:
                raise InputError(f"{source.name}: changed while it was being read. Train again.")
    finally:
        for file in files:
            file.close()
    _, alike = np.unique(np.hstack(shapes), axis=0, return_inverse=True)
    temporary = folder / f".{_INDEX}.tmp"
    columns = {f"offsets_{k}": offsets[k] for k in range(len(names))} | {
        f"shapes_{k}": shape for k, shape in enumerate(shapes)
    }
    with temporary.open("wb") as stream:
        np.savez(stream, allow_pickle=False, names=names, dtypes=dtypes, alike=alike.reshape(-1), **columns)
    temporary.replace(folder / _INDEX)
