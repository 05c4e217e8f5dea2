"""A caller's inputs, checked against what the model takes: names, dtypes, shapes, finite values."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import Input, Manifest
from offramp.runtime.errors import InputError
from offramp.runtime.preprocess import Text

Arrays = dict[str, NDArray[Any]]


def check_inputs(
    inputs: Mapping[str, Any], manifest: Manifest, *, allow_nonfinite: bool = False
) -> tuple[Arrays, dict[str, int]]:
    """The inputs as arrays of the model's dtypes, and the size of every symbolic axis.

    Arrays may be of any dtype that fits without loss and means the same (int32 for int64, bool for integers), and of
    any width of float: numpy's own float64 is rounded, unless that makes it infinite; plain sequences become the
    model's dtype. Raises InputError naming the input and what was expected. NaN and ±inf in floats are refused unless
    allow_nonfinite.
    """
    if not isinstance(inputs, Mapping):
        raise InputError(
            f"inputs is a {type(inputs).__name__}, expected a mapping with {_names(manifest)}"
            f"{'; cascade.preprocess(rows) makes one of raw rows' if manifest.preprocess is not None else ''}."
        )
    known = set(_names(manifest))
    unknown = [str(name) for name in inputs if name not in known]
    if unknown:
        raise InputError(f"inputs has {unknown[0]!r}, which the model doesn't take; it takes {_names(manifest)}.")
    arrays: Arrays = {}
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for given in manifest.inputs:
        if given.name not in inputs:
            raise InputError(f"inputs lacks {given.name!r}; the model takes {_names(manifest)}.")
        array = _as_array(inputs[given.name], given)
        if array.ndim != len(given.shape):
            raise InputError(f"input {given.name!r} has the shape {list(array.shape)}, expected {given.shape}.")
        for k, wanted in enumerate(given.shape):
            size = array.shape[k]
            if isinstance(wanted, int):
                if size != wanted:
                    raise InputError(
                        f"input {given.name!r} has the shape {list(array.shape)}, expected {given.shape}: "
                        f"axis {k} is {size}."
                    )
            elif sizes.setdefault(wanted, size) != size:
                raise InputError(
                    f"input {given.name!r} has {wanted} = {size}, but {owner[wanted]!r} has {wanted} = {sizes[wanted]}."
                )
            else:
                owner.setdefault(wanted, given.name)
        if not allow_nonfinite and array.dtype.kind == "f" and not np.isfinite(array).all():
            by_row = np.moveaxis(array, given.batch_axis, 0)
            rows = np.flatnonzero(~np.isfinite(by_row.reshape(len(by_row), -1)).all(1))
            raise InputError(
                f"input {given.name!r} has NaN or infinity in row {int(rows[0])}"
                f"{f' and {len(rows) - 1} more' if len(rows) > 1 else ''}: expected finite numbers "
                "(allow_nonfinite=True lets them pass)."
            )
        if counts(given, manifest) and array.size and (least := array.min()) < 0:
            row = int(np.argwhere(np.moveaxis(array, given.batch_axis, 0) < 0)[0][0])
            raise InputError(f"input {given.name!r} has {least} in row {row}: expected 0 or more, as a tokeniser's.")
        arrays[given.name] = array
    for axis, size in sizes.items():
        if axis != "batch" and size == 0:
            raise InputError(f"input {owner[axis]!r} has {axis} = 0, expected at least 1.")
    return arrays, sizes


def counts(given: Input, manifest: Manifest) -> bool:
    """Whether an input's numbers are a tokeniser's, of which none is below 0: to a graph -1 is a table's last row."""
    return isinstance(manifest.preprocess, Text) and np.dtype(given.dtype).kind == "i"


def _names(manifest: Manifest) -> list[str]:
    return [i.name for i in manifest.inputs]


def rows_of(arrays: Mapping[str, NDArray[Any]], manifest: Manifest, start: int, stop: int) -> Arrays:
    """Rows start…stop of a model's inputs, each along its own batch axis; contiguous, and views where they can be."""
    return {
        i.name: np.ascontiguousarray(arrays[i.name][(slice(None),) * i.batch_axis + (slice(start, stop),)])
        for i in manifest.inputs
    }


def sizes_of(arrays: Mapping[str, NDArray[Any]], manifest: Manifest) -> dict[str, int]:
    """The size of every symbolic axis of checked inputs."""
    return {
        axis: arrays[given.name].shape[k]
        for given in manifest.inputs
        for k, axis in enumerate(given.shape)
        if isinstance(axis, str)
    }


def made_up_inputs(manifest: Manifest, sizes: Mapping[str, int]) -> Arrays:
    """Inputs of the model's types and these axis sizes: normal floats, ones for integers. For time, not for answers."""
    rng = np.random.default_rng(0)
    arrays: Arrays = {}
    for given in manifest.inputs:
        missing = [d for d in given.shape if isinstance(d, str) and d not in sizes]
        if missing:
            raise InputError(
                f"sizes lacks the axis {missing[0]!r} of input {given.name!r}: for example {missing[0]}=32."
            )
        shape = [sizes[d] if isinstance(d, str) else d for d in given.shape]
        floats = np.dtype(given.dtype).kind == "f"
        arrays[given.name] = (rng.standard_normal(shape) if floats else np.ones(shape)).astype(given.dtype)
    return arrays


_INTEGERS = "biu"


def _as_array(value: Any, given: Input) -> NDArray[Any]:
    wanted = np.dtype(given.dtype)
    if not isinstance(value, np.ndarray) and hasattr(value, "__array__"):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        try:
            return convert(np.asarray(value), given)
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"input {given.name!r} is ragged: expected rows of one shape, {given.shape}.") from error
    if value.dtype == wanted:
        return value if value.flags.c_contiguous else np.ascontiguousarray(value).reshape(value.shape)
    _refuse_texts(value, given)
    # uint8 pixels for a float input would be accepted by numpy, at 255 times the scale: kinds must match.
    kinds = _INTEGERS if wanted.kind in "iu" else wanted.kind
    both_float = value.dtype.kind == wanted.kind == "f"
    if value.dtype.kind not in kinds or not (both_float or np.can_cast(value.dtype, wanted, "safe")):
        raise InputError(f"input {given.name!r} has the dtype {value.dtype}, expected {wanted}.")
    with np.errstate(over="ignore"):
        made = value.astype(wanted)
    if both_float and wanted.itemsize < value.dtype.itemsize and (np.isinf(made) & ~np.isinf(value)).any():
        raise InputError(f"input {given.name!r} has numbers beyond {wanted}'s range.")
    return np.ascontiguousarray(made).reshape(value.shape)


def _refuse_texts(values: NDArray[Any], given: Input) -> None:
    """Texts are never read as numbers: what "1,5" or "0x1" is to be is for the caller to say."""
    if values.dtype.kind not in "USO":
        return
    for value in values.flat:
        if value is None or isinstance(value, str | bytes):
            shown = "None" if value is None else f"the text {value[:40]!r}"
            raise InputError(f"input {given.name!r} holds {shown}, expected numbers of {given.dtype}, {given.shape}.")


def convert(values: NDArray[Any], given: Input) -> NDArray[Any]:
    """Values whose dtype is an accident of their container (JSON, Parquet) as the model's dtype.

    Integers may become floats, floats of any width the model's; raises InputError for another kind, or
    integers out of range.
    """
    _refuse_texts(values, given)
    wanted = np.dtype(given.dtype)
    kinds = _INTEGERS if wanted.kind in _INTEGERS else _INTEGERS + "f"
    if values.size and values.dtype.kind not in kinds:
        raise InputError(f"input {given.name!r} holds {values.dtype} values, expected {wanted}.")
    if values.size and wanted.kind in "iu" and values.dtype.kind in "iu":
        limits = np.iinfo(wanted)
        if values.min() < limits.min or values.max() > limits.max:
            raise InputError(f"input {given.name!r} has values outside {wanted}'s range.")
    return np.ascontiguousarray(values.astype(wanted)).reshape(values.shape)
