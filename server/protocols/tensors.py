"""Arrays out of JSON numbers, with errors that name the field."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import Input, Manifest
from offramp.runtime.errors import InputError
from offramp.runtime.inputs import check_inputs
from offramp.server.query import Group

_AT_ONCE = 2**18  # numbers that are converted without a pause: some ten milliseconds
_SHOWN = 5  # positions listed in an error


def numbers(data: Any, dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    """Nested lists of JSON numbers as an array of a dtype.

    Whole numbers fit floats, booleans fit numbers; fractions don't fit integers. Raises InputError for
    anything else: ragged lists, null, strings, numbers that the dtype can't hold.
    """
    try:
        loose = _loose(data)
    except (ValueError, OverflowError) as error:
        raise InputError(f"{where} is ragged: expected lists of one length at each level.") from error
    if loose.size == 0:
        return np.zeros(loose.shape, dtype)
    if loose.dtype.kind == "O" and dtype.kind == "f" and _all_numbers(data):
        loose = _rounded(loose)  # JavaScript writes 1e20 without a point
    if loose.dtype.kind not in "biuf":
        raise InputError(f"{where} holds {_misfit(data)}, expected numbers for {dtype}.")
    if dtype.kind in "iu":
        if loose.dtype.kind == "f":
            raise InputError(f"{where} has numbers with a point (1.0 too) or beyond {dtype}, expected whole ones.")
        _check_range(loose, *_range(dtype), dtype, where)
    elif dtype.kind == "b" and loose.dtype.kind != "b":
        if loose.dtype.kind == "f":
            raise InputError(f"{where} has numbers with a point, expected booleans.")
        _check_range(loose, 0, 1, dtype, where)
    elif dtype.kind == "f":
        _check_finite(loose, dtype, where)
    return np.ascontiguousarray(loose, dtype)


def _loose(data: Any) -> NDArray[Any]:
    """As np.asarray, a part at a time: numpy holds Python's lock, and the event loop needs it in between."""
    if not isinstance(data, list) or not data:
        return np.asarray(data)
    each = math.prod(_shape(data[0]))
    if len(data) == 1 and each > _AT_ONCE:
        return _loose(data[0])[None]
    step = max(1, _AT_ONCE // max(1, each))
    if step >= len(data):
        return np.asarray(data)
    parts = [np.asarray(data[start : start + step]) for start in range(0, len(data), step)]
    if any(part.dtype.kind not in "biuf" or part.shape[1:] != parts[0].shape[1:] for part in parts):
        return np.asarray(data)  # which finds out what is wrong, or what numbers of several kinds are together
    return np.concatenate(parts)


@lru_cache
def _range(dtype: np.dtype[Any]) -> tuple[int, int]:
    about = np.iinfo(dtype)
    return int(about.min), int(about.max)


def _check_range(values: NDArray[Any], low: int, high: int, dtype: np.dtype[Any], where: str) -> None:
    for value in (int(values.min()), int(values.max())):
        if not low <= value <= high:
            raise InputError(f"{where} has {value}, which {dtype} can't hold.")


def _check_finite(values: NDArray[Any], dtype: np.dtype[Any], where: str) -> None:
    """What is beyond a dtype's largest number and rounds to it is taken: 3.4028235e+38 is how float32's is written."""
    for value in (values.min(), values.max()):
        with np.errstate(over="ignore"):
            fits = np.isfinite(np.asarray(value).astype(dtype))
        if not fits:
            raise InputError(f"{where} has {value}, which {dtype} can't hold.")


def _all_numbers(data: Any) -> bool:
    if isinstance(data, list):
        return all(map(_all_numbers, data))
    return isinstance(data, int | float)


def _rounded(numbers: NDArray[Any]) -> NDArray[Any]:
    """Whole numbers of any size as float64; the same again where one is beyond even that, or where lists differ."""
    try:
        return numbers.astype(np.float64)
    except (OverflowError, TypeError, ValueError):
        return numbers


def _misfit(data: Any) -> str:
    """What in nested lists isn't a number, in JSON's words."""
    if isinstance(data, list):
        return next((found for found in map(_misfit, data) if found), "")
    if isinstance(data, int) and not isinstance(data, bool):
        return f"the number {data}" if not -(2**63) <= data < 2**64 else ""
    if isinstance(data, float | bool):
        return ""
    return {str: "a string", dict: "an object", type(None): "null"}.get(type(data), "something")


def groups_of_instances(instances: Sequence[Any], manifest: Manifest) -> tuple[Group, ...]:
    """The rows of a /v1/predict request, those of equal shapes together.

    instances: one a row, an object with the model's inputs by name; for a model with one input also that
    input's bare value. Shapes are those of one row, so without the batch axis.
    Raises InputError naming the instance and the input.
    """
    inputs, names = manifest.inputs, [given.name for given in manifest.inputs]
    columns = [[_field(instance, given.name, k, names) for k, instance in enumerate(instances)] for given in inputs]
    made = []
    for rows in _alike(columns, len(instances)):
        whole = len(rows) == len(instances)
        where = "instances" if whole else f"instances{_listed(rows)}"
        arrays = {}
        for given, column in zip(inputs, columns, strict=True):
            array = _column(column if whole else [column[k] for k in rows], rows, given, where)
            if array.ndim != len(given.shape):
                expected = [size for size in given.shape if size != "batch"]
                raise InputError(
                    f"{where}.{given.name} has the shape {list(array.shape[1:])} in each instance, expected {expected}."
                )
            arrays[given.name] = np.moveaxis(array, 0, given.batch_axis) if given.batch_axis else array
        made.append(_group(arrays, manifest, np.asarray(rows, np.int64), where))
    return tuple(made)


def _column(values: Sequence[Any], rows: Sequence[int], given: Input, where: str) -> NDArray[Any]:
    """One input's values in some instances. Raises InputError naming the first instance that is to blame by itself."""
    dtype = np.dtype(given.dtype)
    try:
        return numbers(values, dtype, f"{where}.{given.name}")
    except InputError:
        for k, value in zip(rows, values, strict=True):
            numbers([value], dtype, f"instances[{k}].{given.name}")
        raise


def _alike(columns: Sequence[Sequence[Any]], rows: int) -> Iterable[Sequence[int]]:
    """The numbers of rows whose values have the same shapes, together."""
    if rows == 1:
        return [(0,)]
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for k, row in enumerate(zip(*columns, strict=True)):
        alike.setdefault(tuple(map(_shape, row)), []).append(k)
    return alike.values()


def _field(instance: Any, name: str, k: int, names: Sequence[str]) -> Any:
    """The value of one input in one instance. names: of all inputs."""
    if not isinstance(instance, dict):
        if len(names) == 1:
            return instance
        raise InputError(f"instances[{k}] is not an object, expected one with {names}.")
    if name not in instance:
        raise InputError(f"instances[{k}] lacks {name!r}, expected {names}.")
    if len(instance) > len(names):
        extra = next(other for other in instance if other not in names)
        raise InputError(f"instances[{k}] has {extra!r}, which the model doesn't take; expected {names}.")
    return instance[name]


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of nested lists as their first elements tell it; `numbers` finds the ragged ones."""
    sizes = []
    while isinstance(value, list):
        sizes.append(len(value))
        value = value[0] if value else None
    return tuple(sizes)


def _listed(rows: Sequence[int]) -> str:
    more = ", …" if len(rows) > _SHOWN else ""
    return f"[{', '.join(map(str, itertools.islice(rows, _SHOWN)))}{more}]"


def group_of_arrays(arrays: Mapping[str, NDArray[Any]], manifest: Manifest) -> Group:
    """The rows of a request that brings whole arrays, one an input. Raises InputError naming the input."""
    checked, sizes = check_inputs(arrays, manifest)
    return Group(checked, sizes, np.arange(sizes["batch"]))


def _group(arrays: Mapping[str, NDArray[Any]], manifest: Manifest, positions: NDArray[np.int64], where: str) -> Group:
    try:
        checked, sizes = check_inputs(arrays, manifest)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    return Group(checked, sizes, positions)
