"""Arrays at the door: what every number-cruncher here accepts, and how it walks them without big temporaries."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from offramp.runtime.arrays.cores import usable_cores
from offramp.runtime.errors import InputError

Array = NDArray[Any]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Result = TypeVar("Result")

# 128 Ki values: a float64 copy of one block is 1 MiB and stays in a core's second-level cache.
BLOCK_VALUES = 1 << 17
# A pass that makes no temporaries gains nothing from the cache: fewer, larger blocks.
SCAN_VALUES = 1 << 22
# Below this many values a second thread costs more than it saves.
PARALLEL_VALUES = 1 << 22


def row_blocks(rows: int, columns: int = 1, values: int = BLOCK_VALUES) -> Iterator[slice]:
    """Slices that cover range(rows), each with about `values` entries when a row has `columns`."""
    step = max(1, values // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def for_each_block(
    work: Callable[[slice], Result], rows: int, columns: int = 1, values: int = BLOCK_VALUES
) -> list[Result]:
    """`work` on each block of rows, results in order; on all cores when the array is large.

    numpy releases the GIL in its loops, so plain threads give the second core.
    """
    blocks = list(row_blocks(rows, columns, values))
    # Small first: asking for the cores is a system call, and one row's score takes no more than three of them.
    if len(blocks) < 2 or rows * columns < PARALLEL_VALUES or (workers := usable_cores()) < 2:
        return [work(block) for block in blocks]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, blocks))


def matrix(values: ArrayLike, name: str = "logits") -> Array:
    """An (N, C) floating array with C ≥ 1; integers become float64. No copy when it is one already."""
    array = np.asarray(values)
    if array.ndim != 2 or array.shape[1] == 0:
        raise InputError(f"{name}: expected shape (rows, classes) with at least one class, got {array.shape}.")
    return _floating(array, name)


def vector(values: ArrayLike, name: str, rows: int | None = None) -> Floats:
    """An (N,) float64 array without NaN; ±inf are allowed."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise InputError(f"{name}: expected one value a row, shape (rows,), got {array.shape}.")
    if rows is not None and len(array) != rows:
        raise InputError(f"{name}: expected {rows} rows, got {len(array)}.")
    array = _floating(array, name).astype(np.float64, copy=False)
    refuse_nan(np.isnan(array), name)
    return array


def numbers(values: ArrayLike, name: str) -> Floats:
    """A float64 array of any shape from numbers; texts that numpy would read as numbers are none."""
    return _floating(np.asarray(values), name).astype(np.float64, copy=False)


def _floating(array: Array, name: str) -> Array:
    if array.dtype.kind in "biu":
        return array.astype(np.float64)
    if array.dtype.kind != "f":
        raise InputError(f"{name}: expected numbers, got dtype {array.dtype}.")
    return array


def refuse_nan(is_nan: Any, name: str) -> None:
    """Raise with the numbers of the rows that hold a NaN; `is_nan` is (N,)."""
    if is_nan.any():
        raise InputError(f"{name}: NaN in {describe_rows(np.flatnonzero(is_nan))}.")


def group_sums(groups: Ints, values: ArrayLike | None, size: int) -> Floats:
    """(size,) float64 Σ of values (or number of rows) in each group."""
    return np.bincount(groups, values, minlength=size).astype(np.float64, copy=False)


def describe_rows(rows: Array) -> str:
    """'row 3' or 'rows 1, 4, 7 and 120 more'."""
    shown = ", ".join(str(int(row)) for row in rows[:5])
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    return f"row{'s' if len(rows) > 1 else ''} {shown}{more}"


def labels(values: ArrayLike, rows: int | None = None, classes: int | None = None, name: str = "labels") -> Ints:
    """(N,) int64 class numbers from integers of any width, bools, or floats that are whole; −1 = unlabelled."""
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] > 1:
        raise InputError(
            f"{name}: expected class numbers of shape (rows,), got one-hot of shape {array.shape}; "
            f"pass {name}.argmax(axis=1)."
        )
    if array.ndim != 1:
        raise InputError(f"{name}: expected class numbers of shape (rows,), got shape {array.shape}.")
    if rows is not None and len(array) != rows:
        raise InputError(f"{name}: expected {rows} rows, got {len(array)}.")
    if array.dtype.kind == "f":
        refuse_nan(np.isnan(array), name)
        broken = array != np.floor(array)
        if broken.any():
            raise InputError(
                f"{name}: expected whole class numbers, not so in {describe_rows(np.flatnonzero(broken))}."
            )
    elif array.dtype.kind not in "biu" and array.size:
        raise InputError(f"{name}: expected class numbers, got dtype {array.dtype}.")
    top = np.iinfo(np.int64).max if classes is None else classes - 1
    # Compared before the cast: a uint64 or a huge float would wrap into range.
    outside = (array < -1) | (array > top) if array.size else np.zeros(0, bool)
    if outside.any():
        bound = "−1 (unlabelled) or more" if classes is None else f"−1 (unlabelled) to {classes - 1}"
        raise InputError(f"{name}: expected {bound}, not so in {describe_rows(np.flatnonzero(outside))}.")
    return array.astype(np.int64)


def flags(values: ArrayLike, name: str, rows: int | None = None) -> Bools:
    """(N,) bool from bools or numbers that are exactly 0 or 1."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise InputError(f"{name}: expected one flag a row, shape (rows,), got {array.shape}.")
    if rows is not None and len(array) != rows:
        raise InputError(f"{name}: expected {rows} rows, got {len(array)}.")
    if array.dtype.kind == "b":
        return array
    if array.size and array.dtype.kind not in "iuf":
        raise InputError(f"{name}: expected 0 or 1, got dtype {array.dtype}.")
    other = (array != 0) & (array != 1)
    if other.any():
        raise InputError(f"{name}: expected 0 or 1, not so in {describe_rows(np.flatnonzero(other))}.")
    return array.astype(bool)


def weights(values: ArrayLike | None, rows: int, name: str = "weights") -> Floats | None:
    """(N,) float64, finite and ≥ 0, not all zero unless there are no rows; None stays None (all rows count 1)."""
    if values is None:
        return None
    array = vector(values, name, rows)
    wrong = ~np.isfinite(array) | (array < 0)
    if wrong.any():
        raise InputError(f"{name}: expected finite values ≥ 0, not so in {describe_rows(np.flatnonzero(wrong))}.")
    if rows and not array.any():
        raise InputError(f"{name}: expected at least one value above 0.")
    return array


def seed(value: int, name: str = "seed") -> int:
    """A whole number from 0 on, which is what numpy's generators start from."""
    if not isinstance(value, int | np.integer) or value < 0:
        raise InputError(f"{name}: expected a whole number of at least 0, got {value!r}.")
    return int(value)


def fraction(value: float, name: str, *, low_open: bool = True, high_open: bool = True) -> float:
    """A float between 0 and 1, ends excluded unless said otherwise."""
    if not isinstance(value, int | float | np.integer | np.floating):
        raise InputError(f"{name}: expected a number between 0 and 1, got {value!r}.")
    low_ok = value > 0 if low_open else value >= 0
    high_ok = value < 1 if high_open else value <= 1
    if not (low_ok and high_ok):
        bounds = f"{'(' if low_open else '['}0, 1{')' if high_open else ']'}"
        raise InputError(f"{name}: expected a number in {bounds}, got {value!r}.")
    return float(value)
