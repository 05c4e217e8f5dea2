"""Data files: .npz, .npy, Parquet, or a folder of such shards, with columns named as the model's inputs."""

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import Manifest
from offramp.runtime.errors import InputError
from offramp.runtime.inputs import convert

Arrays = dict[str, NDArray[Any]]
LABELS = "labels"
_SUFFIXES = (".npz", ".npy", ".parquet")


@dataclass(frozen=True)
class Shard:
    """One file's rows. labels: int64 (N,), -1 where unknown; None if the file has none."""

    path: Path
    inputs: Arrays
    labels: NDArray[np.int64] | None


def shards(path: str | Path) -> list[Path]:
    """The files of a data source, in name order. Raises InputError if there are none."""
    root = Path(path)
    if root.is_dir():
        files = sorted(f for f in root.iterdir() if f.suffix in _SUFFIXES)
        if not files:
            raise InputError(f"{root}: no {', '.join(_SUFFIXES)} file in this folder.")
        return files
    if not root.is_file():
        raise InputError(f"{root}: no such file or folder.")
    if root.suffix not in _SUFFIXES:
        raise InputError(f"{root}: expected a {', '.join(_SUFFIXES)} file, or a folder of them.")
    return [root]


def read_shard(path: Path, manifest: Manifest) -> Shard:
    """One data file, its columns checked against the model's inputs. Raises InputError naming file and column."""
    columns = _read(path, manifest)
    wanted = [i.name for i in manifest.inputs]
    missing = [name for name in wanted if name not in columns]
    if missing:
        raise InputError(f"{path}: lacks the column {missing[0]!r}; it has {list(columns)}, the model takes {wanted}.")
    inputs = {name: columns[name] for name in wanted}
    rows = {name: array.shape[0] if array.ndim else 0 for name, array in columns.items() if name in (*wanted, LABELS)}
    if len(set(rows.values())) > 1:
        raise InputError(f"{path}: columns have different numbers of rows: {rows}.")
    return Shard(path, inputs, _labels(columns[LABELS], path, len(manifest.classes)) if LABELS in columns else None)


def _read(path: Path, manifest: Manifest) -> Mapping[str, NDArray[Any]]:
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        if path.suffix == ".npy":
            if len(manifest.inputs) != 1:
                names = [i.name for i in manifest.inputs]
                raise InputError(f"{path}: a .npy holds one array, the model takes {names}. Use .npz.")
            return {manifest.inputs[0].name: np.load(path, allow_pickle=False)}
        columns = _read_parquet(path)
        # Parquet's widths are those of whatever wrote it, not the model's.
        return columns | {i.name: convert(columns[i.name], i) for i in manifest.inputs if i.name in columns}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, InputError):
            raise
        if "pickle" in str(error):
            raise InputError(f"{path}: holds Python objects or no array at all; objects are never loaded.") from error
        raise InputError(f"{path}: can't be read ({error}).") from error


def _read_parquet(path: Path) -> Arrays:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise InputError(f'{path}: Parquet needs pyarrow. Run: pip install "offramp[jobs]"') from error
    try:
        table = parquet.read_table(path)
    except ArrowException as error:
        raise InputError(f"{path}: can't be read ({error}).") from error
    columns = {}
    for name in table.column_names:
        values = table.column(name).to_numpy()
        if values.dtype.kind == "O":  # nested lists: rows of one shape become one array
            try:
                values = np.stack([_nested(v) for v in values]) if len(values) else np.zeros((0,))
            except (ValueError, TypeError) as error:
                raise InputError(
                    f"{path}: column {name!r} is ragged or has gaps: expected rows of one shape."
                ) from error
        columns[name] = values
    return columns


def _nested(value: Any) -> NDArray[Any]:
    return (
        np.stack([_nested(v) for v in value])
        if isinstance(value, np.ndarray) and value.dtype.kind == "O"
        else np.asarray(value)
    )


def _labels(values: NDArray[Any], path: Path, classes: int) -> NDArray[np.int64]:
    if values.ndim != 1:
        raise InputError(f"{path}: {LABELS} has the shape {values.shape}, expected one class index a row.")
    if values.dtype.kind == "f" and np.isfinite(values).all() and (values == np.round(values)).all():
        values = values.astype(np.int64)
    if values.dtype.kind not in "iu":
        raise InputError(f"{path}: {LABELS} has the dtype {values.dtype}, expected class indices 0…{classes - 1}.")
    labels = values.astype(np.int64)
    wrong = np.flatnonzero((labels < -1) | (labels >= classes))
    if len(wrong):
        raise InputError(
            f"{path}: {LABELS}[{wrong[0]}] is {labels[wrong[0]]}, expected 0…{classes - 1}, or -1 for unknown."
        )
    return labels


def row_slices(rows: int, step: int) -> Iterator[slice]:
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
