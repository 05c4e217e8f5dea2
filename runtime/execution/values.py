"""What a caller is told whose values a graph can't run on."""

import re
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray
from offramp.runtime.errors import InputError

OUT_OF_RANGE = "an index is out of range"


# A table has the rows 0 to the last number; the first counts from its end.
_INDEX = re.compile(r"idx=(-?\d+) must be within the inclusive range \[-\d+,\s*(\d+)\]")


def cannot_run(file: str, why: str, inputs: Mapping[str, NDArray[Any]] | None = None) -> InputError:
    """The one error for it, whoever noticed. file: the graph's. why: in a few words. inputs: its own, if at hand."""
    named = _outside(why, inputs or {})
    if named is not None:
        return InputError(named)
    return InputError(
        f"{file} can't run on these values ({why}): "
        "for instance an id outside the vocabulary, or a row longer than the model takes."
    )


def _outside(why: str, inputs: Mapping[str, NDArray[Any]]) -> str | None:
    """Which input has the number that no table has a row for; None where a row may be too long instead."""
    found = _INDEX.search(why)
    if found is None:
        return None
    value, last = int(found[1]), int(found[2])
    numbers = {name: array for name, array in inputs.items() if array.dtype.kind in "iu"}
    if any(size > last + 1 for array in numbers.values() for size in array.shape):
        return None
    having = [name for name, array in numbers.items() if (array == value).any()]
    if not having:
        return None
    return f"input {having[0]!r} has {value}, which is outside the vocabulary: expected 0 to {last}."


def about_values(error: Exception) -> bool:
    """Whether an error of ONNX Runtime, whose exceptions have no base of their own, may be about a caller's values.

    Memory and the device aren't the caller's fault.
    """
    return not ("llocat" in str(error) or "CUDA" in str(error))


def reason(error: Exception) -> str:
    """What ONNX Runtime says went wrong, without the places in its source where it noticed."""
    message = " ".join(str(error).rpartition("Status Message: ")[2].split())
    return re.sub(r"^/\S+:\d+ .*?(was false\.|\)) ", "", message)
