"""Records on disk: a folder of .npy files, one per exit and kind, memory-mapped when read.

50,000 rows x 1,000 classes x 7 exits need no memory of that size: logits stay on disk until a row is read.
"""

import io
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from offramp.runtime.errors import InputError
from offramp.runtime.files import flush_to_disk, write_atomically
from offramp.runtime.predictions import Records

SCHEMA = "offramp-records/1"
INDEX = "records.json"


# What numpy raises for a file that isn't what its name says: it looks for zip archives, and has Python read headers.
UNREADABLE = (
    OSError,
    ValueError,  # UnicodeDecodeError, too
    EOFError,
    SyntaxError,
    TypeError,
    KeyError,
    MemoryError,
    OverflowError,
    RecursionError,
    NotImplementedError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


class Index(msgspec.Struct, kw_only=True, frozen=True):
    """records.json: what the folder holds, and which bundle it came from."""

    schema: str
    manifest: str  # digest of the bundle's manifest, or "" for a user's own logits
    exits: int
    rows: int
    classes: int
    routing: int = 0
    routing_seen: list[list[int]] | None = None  # an exit's routing layers; None: an older offramp wrote this
    features: list[list[int]] | None = None  # an exit's feature shape, without the rows
    external: bool = False
    reservation: bool = False
    labelled: bool = False
    source: dict[str, Any] = {}


class RecordsWriter:
    """Writes records of a known number of rows, part by part. Use it in a folder that's renamed when whole.

    Files have their final size from the first part on and rows are written where they belong, by plain writes:
    nothing grows in memory, and a writer that was killed can be followed by one that begins `at` a row that a
    `sync` covered. The bytes don't depend on the parts.
    """

    def __init__(self, folder: Path, index: Index, at: int = 0) -> None:
        self._folder = folder
        self._index = index
        self._at = at
        self._begun = at > 0
        self._files: dict[str, _Column] = {}

    @property
    def at(self) -> int:
        """Rows written so far."""
        return self._at

    def append(self, part: Records) -> None:
        """Write the next rows. Raises InputError for parts of another shape, or more rows than announced."""
        if self._at + len(part) > self._index.rows:
            raise InputError(f"records: {self._at + len(part)} rows come, {self._index.rows} were announced.")
        for name, values, axis in _pieces(part):
            if name not in self._files:
                shape = list(values.shape)
                shape[axis] = self._index.rows
                self._files[name] = _Column(self._folder / f"{name}.npy", values.dtype, tuple(shape), axis, self._begun)
            self._files[name].write(values, self._at)
        self._at += len(part)

    def sync(self) -> None:
        """Return when what was written is on the disk."""
        for file in self._files.values():
            flush_to_disk(file.stream.fileno())

    def close(self) -> None:
        """Finish: all rows must be there. records.json is written last."""
        if self._at != self._index.rows:
            raise InputError(f"records: {self._at} rows were written, {self._index.rows} were announced.")
        self.stop()
        write_index(self._folder, self._index)

    def stop(self) -> None:
        """Close the files as they are, without an index."""
        for file in self._files.values():
            file.stream.close()
        self._files.clear()


class _Column:
    """One .npy of its final size, rows written in place along one axis."""

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], axis: int, begun: bool) -> None:
        self.path, self.dtype, self.shape, self.axis = path, dtype, shape, axis
        header = io.BytesIO()
        described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, described)
        self._start = header.tell()
        size = self._start + math.prod(shape) * dtype.itemsize
        if begun and path.is_file() and path.stat().st_size == size:
            self.stream = path.open("r+b", buffering=0)
            return
        if begun:
            raise InputError(
                f"{path}: not the file that was begun. Record again with --overwrite (overwrite=True in Python)."
            )
        self.stream = path.open("w+b", buffering=0)
        self.stream.write(header.getvalue())
        self.stream.truncate(size)

    def write(self, values: NDArray[Any], at: int) -> None:
        """Rows `at`… of the file. The axes in front of the rows' are few (layers), those behind are contiguous."""
        shape = list(values.shape)
        shape[self.axis] = self.shape[self.axis]
        if tuple(shape) != self.shape or values.dtype != self.dtype:
            raise InputError(
                f"{self.path.name}: rows of {values.dtype} {values.shape} after {self.dtype} {self.shape}: "
                "expected the same shape from every file."
            )
        row = math.prod(self.shape[self.axis + 1 :]) * self.dtype.itemsize
        for k, outer in enumerate(np.ndindex(*self.shape[: self.axis])):
            self.stream.seek(self._start + (k * self.shape[self.axis] + at) * row)
            left = memoryview(np.ascontiguousarray(values[outer]).tobytes())
            while len(left):
                left = left[self.stream.write(left) :]


def write_index(folder: Path, index: Index) -> None:
    write_atomically(folder / INDEX, msgspec.json.format(msgspec.json.encode(index), indent=1))


def _pieces(part: Records) -> Iterator[tuple[str, NDArray[Any], int]]:
    """(file stem, values, axis of the rows) of everything in a part."""
    for j in range(len(part.logits)):
        yield f"logits_{j}", part.logits[j], 0
        yield f"score_{j}", part.score[j], 0
        yield f"label_{j}", part.label[j], 0
        yield f"flops_{j}", part.flops[j], 0
        if part.features is not None:
            yield f"features_{j}", part.features[j], 0
        if part.external is not None:
            yield f"external_{j}", part.external[j], 0
        if part.reservation is not None:
            yield f"reservation_{j}", part.reservation[j], 0
    if part.routing is not None:
        yield "routing", part.routing, 1
    if part.truth is not None:
        yield "labels", part.truth, 0


def read_index(folder: str | Path) -> Index:
    where = Path(folder) / INDEX
    try:
        index = msgspec.json.decode(where.read_bytes(), type=Index)
    except OSError as error:
        raise InputError(
            f"{where}: can't be read ({error.strerror}). Records are written by `offramp record`."
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{where}: {error}.") from error
    if index.schema != SCHEMA:
        raise InputError(f"{where}: schema is {index.schema!r}, this offramp reads {SCHEMA!r}. Record again.")
    _check_index(index, where)
    return index


def _check_index(index: Index, where: Path) -> None:
    """Raises InputError for numbers that no records have."""
    for field, least in (("exits", 1), ("rows", 0), ("classes", 1), ("routing", 0)):
        if getattr(index, field) < least:
            raise InputError(f"{where}: {field} is {getattr(index, field)}, expected at least {least}. Record again.")
    if index.features is not None and len(index.features) != index.exits:
        raise InputError(f"{where}: features has {len(index.features)} shapes for {index.exits} exits. Record again.")


def read_records(folder: str | Path) -> Records:
    """The records in a folder. logits and features are tuples of memory-mapped arrays, one an exit.

    Raises InputError naming the file that is missing, damaged or of another shape than records.json says.
    """
    return read_arrays(Path(folder), read_index(folder))


def read_arrays(root: Path, index: Index) -> Records:
    """The records in a folder that holds what an index says. Errors as in `read_records`."""
    exits, rows = range(index.exits), index.rows

    def load(name: str, shape: tuple[int, ...], kinds: str) -> NDArray[Any]:
        path = root / f"{name}.npy"
        try:
            # An empty file can't be mapped.
            array = load_npy(path, mapped=math.prod(shape) > 0)
        except InputError as error:
            raise InputError(f"{error} Record again.") from error
        if array.shape != shape or array.dtype.kind not in kinds:
            raise InputError(f"{path}: {array.dtype} {array.shape}, {INDEX} says {shape}. Record again.")
        return array

    def answers(j: int) -> NDArray[Any]:
        array = load(f"label_{j}", (rows,), "i")
        if outside := np.flatnonzero((array < -1) | (array >= index.classes)).tolist():
            raise InputError(
                f"{root / f'label_{j}.npy'}: row {outside[0]} was answered {array[outside[0]]}, {INDEX} says "
                f"{index.classes} classes. Record again."
            )
        return array

    def stack(name: str, kinds: str) -> NDArray[Any]:
        return np.stack([load(f"{name}_{j}", (rows,), kinds) for j in exits])

    return Records(
        logits=tuple(load(f"logits_{j}", (rows, index.classes), "f") for j in exits),
        score=stack("score", "f"),
        label=np.stack([answers(j) for j in exits]),
        flops=stack("flops", "i"),
        features=None
        if index.features is None
        else tuple(load(f"features_{j}", (rows, *index.features[j]), "f") for j in exits),
        routing=load("routing", (index.routing, rows), "f") if index.routing else None,
        external=stack("external", "f") if index.external else None,
        reservation=stack("reservation", "f") if index.reservation else None,
        truth=load("labels", (rows,), "i") if index.labelled else None,
        routing_seen=tuple(map(tuple, index.routing_seen)) if index.routing and index.routing_seen else None,
    )


def load_npy(path: str | Path, *, mapped: bool = True) -> NDArray[Any]:
    """One array of a .npy file. Raises InputError naming the file, whatever is in it."""
    try:
        array = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except UNREADABLE as error:
        raise InputError(f"{path}: can't be read ({error}).") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise InputError(f"{path}: is an archive, expected a .npy file with one array.")
    return array
