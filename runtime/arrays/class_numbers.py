"""Labels as people and programs write them, as numbers of classes."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.errors import InputError

# As pandas writes them, too: a column of numbers with gaps is one of floats. Python's int() also takes "1_0" and "١".
_WHOLE = re.compile(r"\s*([+-]?[0-9]{1,18})(?:\.0*)?\s*", re.ASCII)


def class_numbers(
    values: Any, classes: list[str], where: str, first: int, *, unknown: bool = True
) -> NDArray[np.int64]:
    """Class numbers from numbers, or from names (numbers as text are numbers unless a class is called so).

    Nothing, an empty text and NaN are -1: unknown. unknown: False refuses such. Raises InputError naming the first
    that is none: where[first + its place].
    """
    if isinstance(values, np.ndarray) and values.dtype.kind == "U":
        values = values.tolist() if values.ndim == 1 else values
    if isinstance(values, list):
        names = _Names(classes, unknown)
        values = np.array([names.number(v, where, first + i) for i, v in enumerate(values)], np.int64)
    if values.ndim != 1:
        raise InputError(f"{where} has the shape {values.shape}, expected one class index a row.")
    if values.dtype.kind == "f":
        values = np.where(np.isnan(values), -1, values)
        whole = bool((values == np.round(values)).all())
    if values.dtype.kind not in "iuf" or (values.dtype.kind == "f" and not whole):
        raise InputError(f"{where} has the dtype {values.dtype}, expected class indices 0…{len(classes) - 1}.")
    wrong = np.flatnonzero((values < (-1 if unknown else 0)) | (values >= len(classes)))
    if len(wrong):
        raise _not_a_number(values[wrong[0]], len(classes), where, first + int(wrong[0]), unknown)
    labels: NDArray[np.int64] = values.astype(np.int64)
    return labels


def _not_a_number(value: Any, classes: int, where: str, row: int, unknown: bool) -> InputError:
    more = ", or -1 for unknown" if unknown else ""
    return InputError(f"{where}[{row}] is {value!s:.40}, expected 0…{classes - 1}{more}.")


class _Names:
    """Classes by what labels may call them."""

    def __init__(self, classes: Sequence[str], unknown: bool) -> None:
        """unknown: whether a label may be."""
        self._classes, self._unknown = len(classes), unknown
        self._named = {name: k for k, name in enumerate(classes)}
        # Some systems' file names, and what was copied from them, have their accents apart.
        composed = [unicodedata.normalize("NFC", name) for name in classes]
        times = Counter(composed)
        self._composed = {name: k for k, name in enumerate(composed) if times[name] == 1}
        # A class called "7" that isn't number 7 makes numbers in text ambiguous.
        self._numbered = not any(name.isdecimal() and int(name) != k for name, k in self._named.items())

    def number(self, value: Any, where: str, row: int) -> int:
        if self._unknown and (value is None or value == "" or (isinstance(value, float) and np.isnan(value))):
            return -1
        if isinstance(value, str):
            found = self._of_text(value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0:
            found = int(value)
        else:
            found = None
        if found is None:
            more = ", or nothing (or -1) where it's unknown" if self._unknown else ""
            raise InputError(
                f"{where}[{row}] is {value!r:.80}, which is none of the {self._classes} classes: expected a name or a "
                f"number of one{more}."
            )
        if not (-1 if self._unknown else 0) <= found < self._classes:
            raise _not_a_number(found, self._classes, where, row, self._unknown)
        return found

    def _of_text(self, text: str) -> int | None:
        if text in self._named:
            return self._named[text]
        composed = unicodedata.normalize("NFC", text)
        if composed in self._composed:
            return self._composed[composed]
        if whole := _WHOLE.fullmatch(text):
            number = int(whole[1])
            if str(number) in self._named:
                return self._named[str(number)]
            return number if self._numbered else None
        return None
