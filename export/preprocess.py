"""What a user says about raw input, completed and copied into the bundle with its files."""

import difflib
import importlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
from offramp.runtime.bundle import Bundle, Input
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import BundleError, ExportError, InputError, RuntimeUnavailable, how_to_install
from offramp.runtime.preprocess import Image, Preprocess, Text, check, open_preprocessor

Inputs = Mapping[str, tuple[str, Sequence[int | str]]]
TOKENIZER = "tokenizer.json"
# Names that tokenizers' outputs go by, where the model's inputs are called the same.
_KINDS: dict[str, type[Preprocess]] = {"text": Text, "image": Image}
_LIBRARIES = {"text": ("tokenizers", "text"), "image": ("PIL", "image")}
_USUAL = {"ids": "input_ids", "mask": "attention_mask", "type_ids": "token_type_ids"}


@dataclass(frozen=True)
class Taken:
    """A spec as the manifest will have it; `source` is copied to `copied`, if it names a file."""

    spec: Preprocess
    source: Path | None
    copied: str | None

    def copy(self, folder: Path) -> None:
        if self.source is not None and self.copied is not None:
            shutil.copyfile(self.source, folder / self.copied)


def check_kind(given: Preprocess | Mapping[str, Any]) -> None:
    """Refuse what is wrong whatever the model is: a missing library, an unknown field or value. Raises ExportError."""
    if not isinstance(given, Text | Image | Mapping):
        raise ExportError(f"preprocess is a {type(given).__name__}, expected a mapping, or a Text or Image spec.")
    fields = _fields(given)
    kind = fields.get("kind")
    if kind not in _KINDS:
        raise ExportError(f"preprocess.kind is {kind!r}, expected {_either(_KINDS)}.{_near(kind, _KINDS)}")
    library, extra = _LIBRARIES[kind]
    try:
        importlib.import_module(library)
    except ImportError as error:
        raise ExportError(
            f"preprocess of the kind {kind!r} needs {library}, which isn't installed. {how_to_install(extra)}"
        ) from error
    for field, value in fields.items():
        if field != "kind":
            _check_field(kind, field, value)


def take_preprocess(given: Preprocess | Mapping[str, Any], inputs: Inputs) -> Taken:
    """The spec for the manifest, completed, checked, and tried on its sample as far as that needs no model.

    given: a Text or Image spec, or the same as a mapping with "kind". What a mapping leaves out is taken from
        the model's inputs and from the tokenizer's own settings. inputs: name -> (dtype, shape).
    Raises ExportError naming the field.
    """
    check_kind(given)
    fields = _fields(given)
    source: Path | None = None
    if fields["kind"] == "text":
        source = _path(fields, "tokenizer")
        fields = _text_defaults(fields, source, inputs) | {"tokenizer": TOKENIZER}
    else:
        fields = _image_defaults(fields, inputs)
        if fields.get("sample") is not None:
            source = _path(fields, "sample")
            fields["sample"] = f"sample{source.suffix.lower()}"
    try:
        spec: Preprocess = msgspec.convert(fields, type=Preprocess)
    except msgspec.ValidationError as error:
        raise ExportError(f"preprocess: {error}.") from error

    def require(condition: object, message: str) -> None:
        if not condition:
            raise ExportError(f"{message}.")

    copied = spec.tokenizer if isinstance(spec, Text) else spec.sample
    check(spec, inputs, {copied}, require)
    rows: list[Any] = spec.sample if isinstance(spec, Text) else [source] if source else []
    try:
        takes = [Input(name=name, dtype=dtype, shape=list(shape)) for name, (dtype, shape) in inputs.items()]
        prepare = open_preprocessor(spec, takes, lambda _: source or Path())
        for row in rows:
            prepare([row])
    except (BundleError, InputError) as error:
        raise ExportError(f"preprocess: its sample can't be answered: {error}") from error
    return Taken(spec, source, copied)


def _fields(given: Preprocess | Mapping[str, Any]) -> dict[str, Any]:
    named = msgspec.to_builtins(given) if isinstance(given, Text | Image) else given
    return {str(k): str(v) if isinstance(v, Path) else v for k, v in named.items()}


def _check_field(kind: str, field: str, value: Any) -> None:
    """Is there such a field, and may it be that?"""
    types = {one.name: one.type for one in msgspec.structs.fields(_KINDS[kind])}
    if field not in types:
        raise ExportError(
            f"preprocess has no field {field!r}.{_near(field, types)} The kind {kind!r} has {', '.join(types)}."
        )
    expected = types[field]
    try:
        msgspec.convert(value, expected)
    except msgspec.ValidationError as error:
        optional = [None] if type(None) in get_args(expected) else []
        literals = [part for part in (expected, *get_args(expected)) if get_origin(part) is Literal]
        choices = [choice for part in literals for choice in get_args(part)]
        wanted = _either([*choices, *optional]) if choices else re.sub("^Expected (.*), got .*", r"\1", str(error))
        raise ExportError(
            f"preprocess.{field} is {value!r}, expected {wanted.replace('`', '')}.{_near(value, choices)}"
        ) from error


def _either(choices: Iterable[str | None]) -> str:
    *most, last = ["null" if c is None else f'"{c}"' for c in choices]
    return f"{', '.join(most)} or {last}" if most else last


def _near(given: Any, names: Iterable[str]) -> str:
    """' Did you mean …?', or nothing."""
    near = difflib.get_close_matches(str(given), list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


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
