"""Data files of arrays, read a block of rows at a time: .npy, .npz, Parquet.

What is held in memory: one block; for Parquet also what pyarrow decodes of a row group. A member of an .npz
that isn't compressed is mapped, a compressed one is streamed; only a compressed member whose rows aren't its
first axis, or that is in Fortran order, is read whole.
"""

import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.errors import InputError, how_to_install
from offramp.runtime.files import sha256_of_file
from offramp.runtime.records import UNREADABLE

Array = NDArray[Any]
Block = dict[str, Any]
_PIECE = 1 << 20


class Table(Protocol):
    """Columns of one data file. A column is an array with its rows along some axis, or a list of raw rows."""

    path: Path
    names: list[str]

    def rows(self, name: str, axis: int = 0) -> int:
        """How many rows a column has."""

    def blocks(self, axes: Mapping[str, int], start: int, step: int) -> Iterator[Block]:
        """Rows start…, `step` at a time, of the columns named in axes: name -> the axis its rows are along."""

    def digest(self) -> str:
        """SHA-256 of the content."""

    def stamp(self) -> object:
        """Something that is different once the content has been written anew."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors of the libraries that read files, as one InputError that names the file."""
    try:
        yield
    except InputError:
        raise
    except (*UNREADABLE, RuntimeError) as error:
        if "pickle" in str(error) or "Python objects" in str(error):
            raise InputError(f"{path}: holds Python objects or no array at all; objects are never loaded.") from error
        raise InputError(f"{path}: can't be read ({error}).") from error


def stamp_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


class _OneFile:
    """What tables of one file have in common."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: list[str] = []

    def digest(self) -> str:
        with reading(self.path):
            return sha256_of_file(self.path)

    def stamp(self) -> object:
        return stamp_of(self.path)


# ---------------------------------------------------------------- .npy and .npz


class _Column:
    """One array in a file: mapped, or streamed from its start."""

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> None:
        self.dtype, self.shape, self.fortran = dtype, shape, fortran
        self.mapped: Array | None = None
        self.open: Callable[[], IO[bytes]] | None = None  # at the first value

    def blocks(self, axis: int, start: int, step: int) -> Iterator[Array]:
        rows = self.shape[axis]
        start = min(start, rows)
        if self.mapped is None and (axis or self.fortran):
            self.mapped = self._whole()
        if self.mapped is not None:
            before = (slice(None),) * axis
            for at in range(start, rows, step):
                yield np.asarray(self.mapped[(*before, slice(at, min(at + step, rows)))])
            return
        assert self.open is not None
        with self.open() as stream:
            row = math.prod(self.shape[1:]) * self.dtype.itemsize
            _skip(stream, start * row)
            for at in range(start, rows, step):
                count = min(step, rows - at)
                values = np.frombuffer(_exactly(stream, count * row), self.dtype)
                yield values.reshape(count, *self.shape[1:])
            _at_end(stream)

    def _whole(self) -> Array:
        assert self.open is not None
        with self.open() as stream:
            values = np.frombuffer(_exactly(stream, math.prod(self.shape) * self.dtype.itemsize), self.dtype)
            _at_end(stream)
        return values.reshape(self.shape, order="F" if self.fortran else "C")


class Npz(_OneFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._found: dict[str, _Column] = {}
        self._unreadable: dict[str, Exception] = {}
        with reading(path), zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.filename.endswith(".npy"):
                    name = info.filename.removesuffix(".npy")
                    try:
                        self._found[name] = self._member(archive, info)
                    except UNREADABLE as error:  # no matter, unless somebody wants it
                        self._unreadable[name] = error
        self.names = [*self._found, *self._unreadable]

    def _column(self, name: str) -> _Column:
        if name in self._unreadable:
            with reading(self.path):
                raise self._unreadable[name]
        return self._found[name]

    def _member(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Column:
        with archive.open(info) as stream:
            column = _Column(*_header(stream))
            begin = stream.tell()
        size = math.prod(column.shape) * column.dtype.itemsize
        if info.file_size - begin != size:
            raise ValueError(f"{info.filename} has {info.file_size - begin} bytes, its header says {size}")
        if info.compress_type == zipfile.ZIP_STORED:
            with self.path.open("rb") as file:
                file.seek(info.header_offset + 26)
                lengths = file.read(4)
            at = info.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
            column.mapped = _map(self.path, column, at + begin)

        def member() -> IO[bytes]:
            with zipfile.ZipFile(self.path) as again:  # the member keeps the file open by itself
                stream = again.open(info.filename)
            _skip(stream, begin)
            return stream

        column.open = member
        return column

    def rows(self, name: str, axis: int = 0) -> int:
        shape = self.shape(name)
        return shape[axis] if len(shape) > axis else 0

    def shape(self, name: str) -> tuple[int, ...]:
        return self._column(name).shape

    def digest(self) -> str:
        with reading(self.path), zipfile.ZipFile(self.path) as archive:
            # A mapped member isn't checked by zipfile as it is read, so its sum is checked here.
            for info in archive.infolist():
                if info.compress_type == zipfile.ZIP_STORED:
                    with archive.open(info) as stream:
                        while stream.read(_PIECE):
                            pass
        return super().digest()

    def blocks(self, axes: Mapping[str, int], start: int, step: int) -> Iterator[Block]:
        columns = {name: self._column(name).blocks(axis, start, step) for name, axis in axes.items()}
        yield from _together(self.path, columns)


class Npy(_OneFile):
    """A single array, which goes by the name of the model's only input."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        with reading(path), path.open("rb") as stream:
            self._column = _Column(*_header(stream))
            self._column.mapped = _map(path, self._column, stream.tell())
        self.names = [name]

    def rows(self, name: str, axis: int = 0) -> int:
        return self._column.shape[axis] if len(self._column.shape) > axis else 0

    def shape(self, name: str) -> tuple[int, ...]:
        return self._column.shape

    def blocks(self, axes: Mapping[str, int], start: int, step: int) -> Iterator[Block]:
        yield from _together(self.path, {name: self._column.blocks(axis, start, step) for name, axis in axes.items()})


def _header(stream: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"the .npy format {version} is not one of plain arrays")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("Python objects")
    return dtype, shape, fortran


def _map(path: Path, column: _Column, offset: int) -> Array:
    order: Any = "F" if column.fortran else "C"
    if not math.prod(column.shape):  # nothing can't be mapped
        return np.zeros(column.shape, column.dtype, order)
    return np.memmap(path, column.dtype, "r", offset, column.shape, order)


def _together(path: Path, columns: Mapping[str, Iterator[Array]]) -> Iterator[Block]:
    with reading(path):
        for parts in zip(*columns.values(), strict=True):
            yield dict(zip(columns, parts, strict=True))


def _skip(stream: IO[bytes], size: int) -> None:
    while size:
        size -= len(_exactly(stream, min(size, _PIECE)))


def _exactly(stream: IO[bytes], size: int) -> bytes:
    pieces = []
    while size:
        piece = stream.read(size)
        if not piece:
            raise EOFError("it ends too early")
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _at_end(stream: IO[bytes]) -> None:
    if stream.read(1):  # zipfile compares the checksum here
        raise ValueError("it is longer than its header says")


# ---------------------------------------------------------------- Parquet


class Parquet(_OneFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise InputError(f"{path}: Parquet needs pyarrow. {how_to_install('jobs')}") from error
        self._error = ArrowException
        with self._reading():
            self._file = parquet.ParquetFile(path)
            self._count = int(self._file.metadata.num_rows)
            self.names = list(self._file.schema_arrow.names)
        self._shapes: dict[str, tuple[int, ...]] = {}

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with reading(self.path):
                yield
        except self._error as error:
            raise InputError(f"{self.path}: can't be read ({error}).") from error

    def rows(self, name: str, axis: int = 0) -> int:
        return self._count

    def blocks(self, axes: Mapping[str, int], start: int, step: int) -> Iterator[Block]:
        import pyarrow

        with self._reading():
            held: list[Any] = []
            count = 0
            for batch in self._batches(list(axes), start, step):
                while batch.num_rows:
                    head = batch.slice(0, step - count)
                    held.append(head)
                    count += head.num_rows
                    batch = batch.slice(head.num_rows)
                    if count == step:
                        yield self._block(pyarrow.Table.from_batches(held), axes)
                        held, count = [], 0
            if held:
                yield self._block(pyarrow.Table.from_batches(held), axes)

    def _batches(self, names: list[str], start: int, step: int) -> Iterator[Any]:
        """Record batches from row `start` on; row groups in front of it aren't read."""
        first, metadata = 0, self._file.metadata
        while first < metadata.num_row_groups and start >= metadata.row_group(first).num_rows:
            start -= metadata.row_group(first).num_rows
            first += 1
        groups = list(range(first, metadata.num_row_groups))
        for batch in self._file.iter_batches(batch_size=step, row_groups=groups, columns=names):
            yield batch.slice(start)
            start = max(0, start - batch.num_rows)

    def _block(self, table: Any, axes: Mapping[str, int]) -> Block:
        block: Block = {}
        for name, axis in axes.items():
            values = _dense(table.column(name).combine_chunks(), self.path, name)
            if isinstance(values, np.ndarray):
                if self._shapes.setdefault(name, values.shape[1:]) != values.shape[1:]:
                    raise _ragged(self.path, name)
                values = np.moveaxis(values, 0, axis)
            block[name] = values
        return block


def _dense(column: Any, path: Path, name: str) -> Any:
    """An Arrow column as one array (nested lists: rows of one shape), or as a list of texts, bytes or structs."""
    import pyarrow
    from pyarrow import types

    kind = column.type
    if isinstance(column, pyarrow.ChunkedArray):  # of no chunks
        column = pyarrow.concat_arrays(column.chunks) if column.num_chunks else pyarrow.array([], kind)
    if isinstance(kind, pyarrow.BaseExtensionType):
        inner = _dense(column.storage, path, name)
        return inner.reshape(len(inner), *kind.shape) if hasattr(kind, "shape") else inner
    if types.is_dictionary(kind):
        return _dense(column.cast(kind.value_type), path, name)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        if column.null_count:
            raise _ragged(path, name)
        if types.is_fixed_size_list(kind):
            width = kind.list_size
        else:
            lengths = np.unique(column.value_lengths().to_numpy(zero_copy_only=False))
            if len(lengths) > 1:
                raise _ragged(path, name)
            width = int(lengths[0]) if len(lengths) else 0
        inner = _dense(column.flatten(), path, name)
        if not isinstance(inner, np.ndarray):
            raise _ragged(path, name)
        return inner.reshape(len(column), width, *inner.shape[1:])
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        if column.null_count:
            if types.is_integer(kind) and name in LABELS:
                return column.cast(pyarrow.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
            if types.is_floating(kind) and name in LABELS:  # where NaN says so
                return column.to_numpy(zero_copy_only=False)
            raise _ragged(path, name)
        return column.to_numpy(zero_copy_only=False)
    return column.to_pylist()


# The first is the project's name; data sets elsewhere often use the other for raw rows.
LABELS = ("labels", "label")


def _ragged(path: Path, name: str) -> InputError:
    return InputError(f"{path}: column {name!r} is ragged or has gaps: expected rows of one shape.")
