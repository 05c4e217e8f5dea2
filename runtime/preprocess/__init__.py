"""Raw rows to the model's inputs, by what the bundle's manifest says: texts through its tokenizer, pictures to arrays.

The record job, `offramp predict` and the server all use this, so a row means the same everywhere.
"""

from typing import TYPE_CHECKING

import numpy as np
from offramp.runtime.errors import InputError
from offramp.runtime.preprocess.image import ImagePreprocessor
from offramp.runtime.preprocess.spec import Image, Preprocess, Text, check
from offramp.runtime.preprocess.text import TextPreprocessor

if TYPE_CHECKING:
    from offramp.runtime.bundle import Bundle

Preprocessor = TextPreprocessor | ImagePreprocessor


def from_bundle(bundle: "Bundle") -> Preprocessor:
    """The preprocessor of a bundle: call it with a list of texts or pictures.

    Raises InputError if the bundle has no preprocessing, RuntimeUnavailable if its library isn't installed.
    """
    manifest = bundle.manifest
    spec = manifest.preprocess
    if spec is None:
        raise InputError(
            f"{bundle.path}: this bundle takes arrays only; export it with preprocess=… and it takes raw rows."
        )
    inputs = {given.name: given for given in manifest.inputs}
    if isinstance(spec, Image):
        return ImagePreprocessor(spec, inputs[spec.input].dtype)
    length = inputs[spec.ids].shape[1]
    return TextPreprocessor(
        spec,
        bundle.file(spec.tokenizer),
        {name: np.dtype(given.dtype) for name, given in inputs.items()},
        length if isinstance(length, int) else None,
        mixed=all(given.pad is not None for given in inputs.values()),
    )


__all__ = [
    "Image",
    "ImagePreprocessor",
    "Preprocess",
    "Preprocessor",
    "Text",
    "TextPreprocessor",
    "check",
    "from_bundle",
]
