"""Data for the jobs: arrays named as the model's inputs, or raw rows that the bundle's preprocessing turns into them.

One file, or a folder of shards; always read a block of rows at a time (tables.py says what isn't bounded by that).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.arrays.class_numbers import class_numbers
from offramp.runtime.bundle import Input
from offramp.runtime.errors import InputError
from offramp.runtime.inputs import convert
from offramp.runtime.jobs.data.raw_rows import PICTURES, Lines, Pictures, pictures_in, visible
from offramp.runtime.jobs.data.tables import LABELS, Npy, Npz, Parquet, Table
from offramp.runtime.preprocess import Image, Preprocess, Preprocessor, Text, TextPreprocessor

Arrays = dict[str, NDArray[Any]]
Positions = NDArray[np.int64]
_ARRAYS = (".npz", ".npy", ".parquet")
_LINES = (".txt", ".csv", ".jsonl")
# Texts of one length go through the model together, so it pays to look at many at once; they're small.
_TEXTS = 1024


class Takes(Protocol):
    """What a model takes and answers, as a bundle's manifest says it."""

    @property
    def inputs(self) -> list[Input]: ...
    @property
    def classes(self) -> list[str]: ...
    @property
    def preprocess(self) -> Preprocess | None: ...


class Taker(Protocol):
    """A model that data are for: a bundle, or one that isn't a bundle yet."""

    @property
    def manifest(self) -> Takes: ...
    def preprocessor(self) -> Preprocessor:
        """What turns raw rows into inputs."""


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file, ready for the model.

    parts: (positions in the chunk, inputs), each row in one of them. labels: int64, -1 where unknown, or None.
    """

    rows: int
    parts: list[tuple[Positions, Arrays]]
    labels: NDArray[np.int64] | None


@dataclass(frozen=True)
class DataFile:
    """One file's rows. column: of the raw rows, None for arrays. labels: int64 (N,), or None if the file has none."""

    table: Table
    rows: int
    labels: NDArray[np.int64] | None
    column: str | None
    manifest: Takes
    preprocessor: Preprocessor | None

    @property
    def name(self) -> str:
        return str(self.table.path)

    def chunks(self, start: int, step: int) -> Iterator[Chunk]:
        """Rows start… in chunks of `step` rows; they're the same wherever a reader starts, if it's a multiple of step.

        Raises InputError naming file and row.
        """
        step = self.step(step)
        axes = {self.column: 0} if self.column else {i.name: i.batch_axis for i in self.manifest.inputs}
        for block in self.table.blocks(axes, start, step):
            parts = self._arrays(block) if self.column is None else self._raw(block[self.column], start)
            rows = sum(len(positions) for positions, _ in parts)
            labels = None if self.labels is None else self.labels[start : start + rows]
            yield Chunk(rows, parts, labels)
            start += rows

    def raw_rows(self) -> Iterator[Any]:
        """The rows of `column` as they stand: texts; or pictures, as a file's bytes or a path."""
        assert self.column is not None
        for block in self.table.blocks({self.column: 0}, 0, _TEXTS):
            for row in block[self.column]:
                yield row if isinstance(self.manifest.preprocess, Text) else _picture(row, self.table.path)

    def step(self, batch: int) -> int:
        """Rows in a chunk, for a batch of this size."""
        return max(batch, _TEXTS) if isinstance(self.preprocessor, TextPreprocessor) and self.column else batch

    def _arrays(self, block: Mapping[str, Any]) -> list[tuple[Positions, Arrays]]:
        inputs: Arrays = {}
        for given in self.manifest.inputs:
            values = block[given.name]
            if not isinstance(values, np.ndarray):
                raise InputError(f"{self.name}: column {given.name!r} holds {_kind(values)}, expected numbers.")
            # Parquet's widths are those of whatever wrote it, not the model's.
            inputs[given.name] = convert(values, given) if isinstance(self.table, Parquet) else values
        first = self.manifest.inputs[0]
        return [(np.arange(inputs[first.name].shape[first.batch_axis]), inputs)]

    def _raw(self, rows: Any, start: int) -> list[tuple[Positions, Arrays]]:
        assert self.preprocessor is not None
        if isinstance(rows, np.ndarray):  # of texts or paths, or of pictures that are decoded already
            rows = rows.tolist() if rows.dtype.kind in "US" else list(rows)
        if not isinstance(self.preprocessor, TextPreprocessor):
            rows = [_picture(row, self.table.path) for row in rows]
        try:
            return self.preprocessor.parts(rows, first=start)
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from error


def open_data(path: str | Path, bundle: Taker, *, prepared: bool = True, labels: bool = True) -> list[DataFile]:
    """The files of a data source in name order, their columns and labels checked; rows are read by `chunks`.

    path: a .npz, .npy or Parquet file with columns named as the model's inputs, and `labels`; if the bundle has
        preprocessing, also a .txt (a text a line), .csv, .jsonl, .npz or Parquet with a `text` (pictures: `path`)
        column, and `labels` as class numbers or names; a folder of such files; or of pictures, one folder a class.
    prepared: False where raw rows are wanted as they stand (`raw_rows`), and nothing that prepares them is loaded.
    labels: False leaves them out, whatever stands there.
    Raises InputError naming the file and the column at fault.
    """
    files = _files(Path(path), bundle.manifest)
    preprocessor = None
    found = []
    for file in files:
        table = _table(file, bundle.manifest)
        column = _raw_column(table, bundle.manifest)
        if column is not None and prepared and preprocessor is None:
            preprocessor = bundle.preprocessor()
        found.append(_source(table, column, bundle.manifest, preprocessor, labels=labels))
    for source in found:
        if (source.labels is None) != (found[0].labels is None):
            raise InputError(
                f"{source.name}: {'lacks' if source.labels is None else 'has'} labels, unlike {found[0].name}."
            )
    return found


def _files(root: Path, manifest: Takes) -> list[Path]:
    raw = _LINES if manifest.preprocess is not None else ()
    suffixes = (*_ARRAYS, *raw)
    hint = "" if raw else " (texts and pictures need a bundle that was exported with preprocess=…)"
    if root.is_dir():
        files = [f for f in visible(root, suffixes) if f.suffix.lower() in suffixes and f.is_file()]
        if not files and isinstance(manifest.preprocess, Image):
            if any(pictures_in(root)):
                return [root]
            raise InputError(f"{root}: no {', '.join((*suffixes, *PICTURES))} file in this folder.")
        if not files:
            raise InputError(f"{root}: no {', '.join(suffixes)} file in this folder{hint}.")
        return files
    if not root.is_file():
        raise InputError(f"{root}: no such file or folder.")
    if root.suffix.lower() not in suffixes:
        raise InputError(f"{root}: expected a {', '.join(suffixes)} file, or a folder of them{hint}.")
    return [root]


def _table(path: Path, manifest: Takes) -> Table:
    if path.is_dir():
        return Pictures(path)
    suffix = path.suffix.lower()
    if suffix == ".npy":
        if len(manifest.inputs) != 1:
            names = [i.name for i in manifest.inputs]
            raise InputError(f"{path}: a .npy holds one array, the model takes {names}. Use .npz.")
        return Npy(path, manifest.inputs[0].name)
    if suffix in _LINES:
        return Lines(path)
    return Npz(path) if suffix == ".npz" else Parquet(path)


def _raw_column(table: Table, manifest: Takes) -> str | None:
    """The column of raw rows; None if the table has the model's inputs themselves."""
    wanted = [i.name for i in manifest.inputs]
    missing = [name for name in wanted if name not in table.names]
    if not missing and not isinstance(table, Lines | Pictures):
        return None
    raw = {Text: ("text",), Image: ("path", "image"), type(None): ()}[type(manifest.preprocess)]
    for name in raw:
        if name in table.names:
            return name
    takes = f"the model takes {wanted}{f', or raw rows in a column {raw[0]!r}' if raw else ''}"
    if isinstance(table, Lines):
        raise InputError(f"{table.path}: lacks the column {raw[0]!r}; it has {table.names}.")
    raise InputError(f"{table.path}: lacks the column {missing[0]!r}; it has {table.names}, {takes}.")


def _source(
    table: Table, column: str | None, manifest: Takes, preprocessor: Preprocessor | None, *, labels: bool
) -> DataFile:
    named = next((name for name in LABELS if name in table.names), None) if labels else None
    if column is None:
        counts = {i.name: table.rows(i.name, i.batch_axis) for i in manifest.inputs}
        if isinstance(table, Npy | Npz):
            for given in manifest.inputs:
                if len(table.shape(given.name)) != len(given.shape):
                    shape = list(table.shape(given.name))
                    raise InputError(
                        f"{table.path}: column {given.name!r} has the shape {shape}, expected {given.shape}."
                    )
    else:
        if isinstance(table, Npz) and not table.shape(column):
            raise InputError(f"{table.path}: column {column!r} is a single value, expected one a row.")
        counts = {column: table.rows(column)}
    if named is not None:
        counts[named] = table.rows(named)
    if len(set(counts.values())) > 1:
        raise InputError(f"{table.path}: columns have different numbers of rows: {counts}.")
    rows = next(iter(counts.values()))
    numbers = None if named is None else _labels(table, named, rows, manifest.classes)
    return DataFile(table, rows, numbers, column, manifest, preprocessor)


def _labels(table: Table, name: str, rows: int, classes: list[str]) -> NDArray[np.int64]:
    parts: list[NDArray[np.int64]] = []
    done = 0
    for block in table.blocks({name: 0}, 0, 65_536):
        parts.append(class_numbers(block[name], classes, f"{table.path}: {name}", done))
        done += len(parts[-1])
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _picture(row: Any, table: Path) -> Any:
    """A path (relative ones start at the table's folder), the file's bytes, or a mapping with one of them."""
    if isinstance(row, Mapping):
        row = row.get("bytes") or row.get("path")
    if isinstance(row, str):
        return table.parent / row
    return row


def _kind(values: Sequence[Any]) -> str:
    return f"{type(values[0]).__name__} values" if len(values) else "no numbers"
