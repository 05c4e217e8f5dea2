"""What a user says about raw input, completed and copied into the bundle with its files."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from offramp.runtime.bundle import Bundle
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import BundleError, ExportError, InputError, RuntimeUnavailable
from offramp.runtime.preprocess import Image, Preprocess, Text, check

Inputs = Mapping[str, tuple[str, Sequence[int | str]]]
TOKENIZER = "tokenizer.json"
# Names that tokenizers' outputs go by, where the model's inputs are called the same.
_USUAL = {"ids": "input_ids", "mask": "attention_mask", "type_ids": "token_type_ids"}


def take_preprocess(given: Preprocess | Mapping[str, Any], inputs: Inputs, folder: Path) -> Preprocess:
    """The spec for the manifest; the tokenizer and the sample picture it names are copied into `folder`.

    given: a Text or Image spec, or the same as a mapping with "kind". What a mapping leaves out is taken from
        the model's inputs and from the tokenizer's own settings. inputs: name -> (dtype, shape).
    Raises ExportError naming the field.
    """
    fields = dict(msgspec.to_builtins(given) if isinstance(given, Text | Image) else given)
    source: Path | None = None
    if fields.get("kind") == "text":
        source = _path(fields, "tokenizer")
        fields = _text_defaults(fields, source, inputs) | {"tokenizer": TOKENIZER}
    elif fields.get("kind") == "image":
        fields = _image_defaults(fields, inputs)
        if fields.get("sample") is not None:
            source = _path(fields, "sample")
            fields["sample"] = f"sample{source.suffix.lower()}"
    try:
        spec: Preprocess = msgspec.convert(fields, type=Preprocess)
    except msgspec.ValidationError as error:
        raise ExportError(f'preprocess: {error}. It needs a "kind", "text" or "image", and its fields.') from error

    def require(condition: object, message: str) -> None:
        if not condition:
            raise ExportError(f"{message}.")

    copied = spec.tokenizer if isinstance(spec, Text) else spec.sample
    check(spec, inputs, {copied}, require)
    if source is not None and copied is not None:
        shutil.copyfile(source, folder / copied)
    return spec


def try_preprocess(bundle: Bundle, cascade: Cascade) -> None:
    """Answer the sample, so that a bundle whose raw rows don't fit its model isn't written. Raises ExportError."""
    spec = bundle.manifest.preprocess
    assert spec is not None
    rows: list[Any] = spec.sample if isinstance(spec, Text) else [bundle.file(spec.sample)] if spec.sample else []
    try:
        cascade.predict(cascade.preprocess([]))
        for row in rows:
            cascade.predict(cascade.preprocess([row]))
    except RuntimeUnavailable as error:
        raise ExportError(f"preprocess can't be tried: {error}") from error
    except (BundleError, InputError) as error:
        raise ExportError(f"preprocess: its sample can't be answered: {error}") from error


def _path(fields: Mapping[str, Any], field: str) -> Path:
    path = Path(str(fields.get(field, "")))
    if field not in fields or not path.is_file():
        raise ExportError(f"preprocess.{field} is {fields.get(field)!r}, expected the path of a file.")
    return path


def _text_defaults(fields: dict[str, Any], tokenizer: Path, inputs: Inputs) -> dict[str, Any]:
    try:
        own = json.loads(tokenizer.read_text(encoding="utf-8"))
        padding, truncation = own.get("padding") or {}, own.get("truncation") or {}
        defaults = {
            "max_length": truncation.get("max_length"),
            "truncation": str(truncation.get("direction", "Right")).lower(),
            "padding": str(padding.get("direction", "Right")).lower(),
            "pad_id": padding.get("pad_id"),
            "pad_type_id": padding.get("pad_type_id"),
        }
    except (OSError, ValueError, AttributeError) as error:
        raise ExportError(f"preprocess.tokenizer {tokenizer}: can't be read as a tokenizer.json ({error}).") from error
    if defaults["pad_id"] is None:
        pads = [t["id"] for t in own.get("added_tokens") or [] if "pad" in str(t.get("content")).lower()]
        defaults["pad_id"] = pads[0] if pads else None
    named = {field: name for field, name in _USUAL.items() if name in inputs}
    if "ids" not in named and len(inputs) == 1:
        named["ids"] = next(iter(inputs))
    fixed = [shape[1] for _, shape in inputs.values() if len(shape) == 2 and isinstance(shape[1], int)]
    if defaults["max_length"] is not None and fixed:
        defaults["max_length"] = min(defaults["max_length"], *fixed)
    elif fixed:
        defaults["max_length"] = min(fixed)
    return {name: value for name, value in (defaults | named).items() if value is not None} | fields


def _image_defaults(fields: dict[str, Any], inputs: Inputs) -> dict[str, Any]:
    if "input" not in fields and len(inputs) == 1:
        fields["input"] = next(iter(inputs))
    return fields
