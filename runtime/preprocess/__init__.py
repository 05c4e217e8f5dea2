"""Raw rows to the model's inputs, by what the bundle's manifest says: texts through its tokenizer, pictures to arrays.

The record job, `offramp predict` and the server all use this, so a row means the same everywhere.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from offramp.runtime.preprocess.image import ImagePreprocessor
from offramp.runtime.preprocess.spec import Image, Preprocess, Text, check
from offramp.runtime.preprocess.text import TextPreprocessor

Preprocessor = TextPreprocessor | ImagePreprocessor


class Takes(Protocol):
    """An input of the model; pad is None where rows of several lengths can't be mixed."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int | str]: ...
    @property
    def pad(self) -> float | str | None: ...


def open_preprocessor(spec: Preprocess, inputs: Sequence[Takes], file: Callable[[str], Path]) -> Preprocessor:
    """What a manifest describes: call it with a list of texts or pictures.

    inputs: the model's. file: where a bundle's file lies. Raises RuntimeUnavailable if its library isn't installed.
    """
    named = {given.name: given for given in inputs}
    if isinstance(spec, Image):
        return ImagePreprocessor(spec, named[spec.input].dtype)
    length = named[spec.ids].shape[1]
    return TextPreprocessor(
        spec,
        file(spec.tokenizer),
        {name: np.dtype(given.dtype) for name, given in named.items()},
        length if isinstance(length, int) else None,
        mixed=all(given.pad is not None for given in inputs),
    )


__all__ = [
    "Image",
    "ImagePreprocessor",
    "Preprocess",
    "Preprocessor",
    "Text",
    "TextPreprocessor",
    "check",
    "open_preprocessor",
]
