"""What a manifest says about raw input: which file and which steps turn a text or a picture into the model's inputs."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

# A side no picture needs, and more than any model was trained on: what is larger is a mistake or an attack.
_LARGEST_SIDE = 16_384
_LONGEST_TEXT = 1_000_000


class Text(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="text", forbid_unknown_fields=True):
    """Texts become token ids.

    tokenizer: a tokenizer.json (Hugging Face `tokenizers`) among the bundle's files; its own padding and
        truncation are not used, the fields here are.
    ids, mask, type_ids: names of the model's inputs, integers (batch, seq).
    max_length: most tokens a row, special ones included. truncation: the side longer rows lose, None refuses them.
    padding, pad_id, pad_type_id: which side of a shorter row is filled, and with what; the mask says 0 there.
    special_tokens: whether the tokenizer's own, [CLS] and [SEP] say, are added.
    sample: texts to try the bundle with.
    """

    tokenizer: str
    ids: str
    mask: str | None = None
    type_ids: str | None = None
    max_length: int
    truncation: Literal["right", "left"] | None = "right"
    padding: Literal["right", "left"] = "right"
    pad_id: int = 0
    pad_type_id: int = 0
    special_tokens: bool = True
    sample: list[str] = []


class Image(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="image", forbid_unknown_fields=True):
    """PNG or JPEG pictures become arrays: turned upright, composed, resized, ordered, then (v * scale - mean) / std.

    input: the model's only input, (batch, channels, height, width), (batch, height, width, channels) or
        (batch, height, width), as layout says; v is 0…255.
    channels: colour order, or "L" for grey. background: what shows through transparent pixels, 0…255 a channel.
    resize: "stretch" to height x width whatever the shape; "crop": the shorter side becomes `shorter` (default
        the larger of height and width), then the middle is cut out; "pad": as large as fits, the rest
        background; None refuses other sizes.
    mean, std: a number a channel. An integer input gets rounded values.
    max_pixels: larger pictures are refused before they are decoded. sample: a picture among the bundle's files.
    """

    input: str
    height: int
    width: int
    layout: Literal["NCHW", "NHWC", "NHW"] = "NCHW"
    channels: Literal["RGB", "BGR", "L"] = "RGB"
    background: tuple[int, int, int] = (255, 255, 255)
    resize: Literal["stretch", "crop", "pad"] | None = "stretch"
    shorter: int | None = None
    interpolation: Literal["nearest", "box", "bilinear", "bicubic", "lanczos"] = "bilinear"
    scale: float = 1 / 255
    mean: list[float] = []
    std: list[float] = []
    max_pixels: int = 50_000_000
    sample: str | None = None

    @property
    def shape(self) -> list[int]:
        """The input's shape without the batch."""
        depth = [1 if self.channels == "L" else 3]
        size = [self.height, self.width]
        return {"NCHW": depth + size, "NHWC": size + depth, "NHW": size}[self.layout]


Preprocess = Text | Image
Require = Callable[[object, str], None]


def check(
    spec: Preprocess, inputs: Mapping[str, tuple[str, Sequence[int | str]]], files: object, require: Require
) -> None:
    """Call require(condition, message) for all that must hold between a spec and the model's inputs.

    inputs: name -> (dtype, shape). files: names of the bundle's files.
    """
    if isinstance(spec, Text):
        _check_text(spec, inputs, files, require)
    else:
        _check_image(spec, inputs, files, require)


def _check_text(spec: Text, inputs: Mapping[str, Any], files: Any, require: Require) -> None:
    require(spec.tokenizer in files, f"preprocess.tokenizer {spec.tokenizer!r} is not in files")
    given = {"ids": spec.ids, "mask": spec.mask, "type_ids": spec.type_ids}
    names = [name for name in given.values() if name is not None]
    require(len(set(names)) == len(names), "preprocess names an input twice")
    missing = [name for name in inputs if name not in names]
    require(not missing, f"preprocess gives {names}, the model also takes {missing}")
    axes = set()
    for field, name in given.items():
        if name is None:
            continue
        require(name in inputs, f"preprocess.{field} names {name!r}, the model's inputs are {list(inputs)}")
        dtype, shape = inputs[name]
        require(
            np.dtype(dtype).kind in "iu" and len(shape) == 2 and shape[0] == "batch",
            f'preprocess.{field}: input {name!r} is {dtype} {list(shape)}, expected integers ["batch", length]',
        )
        axes.add(shape[1])
        if isinstance(shape[1], int):
            require(spec.max_length <= shape[1], f"preprocess.max_length is {spec.max_length}, {name!r} has {shape[1]}")
    require(len(axes) == 1, "preprocess: the inputs' lengths aren't one axis")
    require(1 <= spec.max_length <= _LONGEST_TEXT, f"preprocess.max_length is {spec.max_length}, expected 1 or more")
    limits = np.iinfo(inputs[spec.ids][0])
    require(max(0, limits.min) <= spec.pad_id <= limits.max, f"preprocess.pad_id {spec.pad_id} is not a token id")
    require(0 <= spec.pad_type_id < 128, f"preprocess.pad_type_id {spec.pad_type_id} is not a type id")


def _check_image(spec: Image, inputs: Mapping[str, Any], files: Any, require: Require) -> None:
    require(list(inputs) == [spec.input], f"preprocess.input is {spec.input!r}, the model takes {list(inputs)}")
    for field in ("height", "width", "shorter"):
        size = getattr(spec, field)
        require(size is None or 1 <= size <= _LARGEST_SIDE, f"preprocess.{field} is {size}, expected 1…{_LARGEST_SIDE}")
    dtype, shape = inputs[spec.input]
    require(np.dtype(dtype).kind in "iuf", f"preprocess: input {spec.input!r} is {dtype}, expected numbers")
    fits = len(shape) == len(spec.shape) + 1 and shape[0] == "batch"
    fits = fits and all(isinstance(a, str) or a == b for a, b in zip(shape[1:], spec.shape, strict=True))
    require(fits, f"preprocess makes [batch, {', '.join(map(str, spec.shape))}], {spec.input!r} is {list(shape)}")
    depth = 1 if spec.channels == "L" else 3
    require(spec.layout != "NHW" or depth == 1, 'preprocess.layout "NHW" has room for grey pictures only: channels "L"')
    for field in ("mean", "std"):
        values = getattr(spec, field)
        require(
            len(values) in (0, depth) and all(math.isfinite(v) for v in values),
            f"preprocess.{field} is {values}, expected {depth} finite numbers",
        )
    require(all(v != 0 for v in spec.std), "preprocess.std has a zero")
    require(math.isfinite(spec.scale) and spec.scale != 0, f"preprocess.scale is {spec.scale}")
    require(
        all(0 <= v <= 255 for v in spec.background),
        f"preprocess.background is {spec.background}, expected three numbers 0…255",
    )
    if spec.resize == "crop" and spec.shorter is not None:
        least = max(spec.height, spec.width)
        require(spec.shorter >= least, f"preprocess.shorter is {spec.shorter}, expected at least {least}")
    require(spec.shorter is None or spec.resize == "crop", 'preprocess.shorter belongs to resize "crop"')
    require(spec.max_pixels >= 1, f"preprocess.max_pixels is {spec.max_pixels}")
    require(spec.sample is None or spec.sample in files, f"preprocess.sample {spec.sample!r} is not in files")
