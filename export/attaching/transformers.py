"""What a Hugging Face classifier says of itself: example inputs, class names, and how raw rows become inputs."""

import inspect
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from offramp.export.attaching.attached import MASK, About
from offramp.runtime.errors import ExportError

IDS, PIXELS = "input_ids", "pixel_values"
_TOKENIZER = "tokenizer.json"
_LONGEST = 512
# Rows of different lengths, so that a mask is seen at work.
_LENGTHS = (12, 5, 9, 12)
# PIL's numbers, which preprocessor_config.json has.
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box"}


def is_transformers(model: torch.nn.Module) -> bool:
    return hasattr(model, "config") and any(base.__module__.startswith("transformers.") for base in type(model).__mro__)


def about(model: Any, folder: Path | None) -> About | None:
    """None for a model of neither texts nor pictures. folder: of its checkpoint, where tokenizer and processor lie."""
    takes = inspect.signature(model.forward).parameters
    title, classes = type(model).__name__, _classes(model.config)
    if IDS in takes:
        example = _tokens(model, with_mask=MASK in takes)
        axes = {name: {0: "batch", 1: "seq"} for name in example}
        return About(title, example, axes, classes, None if folder is None else _text(model, folder))
    if PIXELS in takes:
        pixels = _pixels(model.config)
        spec = None if folder is None else _image(folder, list(pixels.shape))
        return About(title, {PIXELS: pixels}, {PIXELS: {0: "batch"}}, classes, spec)
    return None


def checkpoint_of(model: Any) -> Path | None:
    """The folder that a model was loaded from, if it was one."""
    name = getattr(model.config, "_name_or_path", "")
    return Path(name) if name and Path(name).is_dir() else None


def load(folder: Path) -> torch.nn.Module:
    """A checkpoint's classifier in evaluation mode. Raises ExportError, for weights that only a pickle holds too."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = (config.get("architectures") or [""])[0]
    try:
        import transformers
    except ImportError as error:
        raise ExportError(
            f"{folder} is a Hugging Face checkpoint, and transformers isn't installed: pip install transformers"
        ) from error
    try:
        kind = getattr(transformers, named, None)
    except ImportError as error:  # it imports what is asked for, and that needs other libraries
        raise ExportError(f"{folder}: transformers can't import {named}: {' '.join(str(error).split())}") from error
    if kind is None:
        raise ExportError(f"{folder}/config.json: architectures names {named!r}, which transformers doesn't have.")
    if not any(folder.glob("*.safetensors")):
        raise ExportError(
            f"{folder} has no .safetensors: other weights are pickles, which are never loaded. Write them with "
            "save_pretrained(folder, safe_serialization=True) of the model that you trust."
        )
    try:
        model: torch.nn.Module = kind.from_pretrained(folder, use_safetensors=True, local_files_only=True)
    except Exception as error:  # whatever the library raises
        raise ExportError(f"{folder}: {named} can't be loaded: {' '.join(str(error).split())[:300]}") from error
    return model.eval()


def _classes(config: Any) -> list[str] | None:
    names = getattr(config, "id2label", None) or {}
    found = {int(k): str(v) for k, v in names.items()}
    return [found[k] for k in range(len(found))] if sorted(found) == list(range(len(found))) and found else None


def _tokens(model: Any, *, with_mask: bool) -> dict[str, torch.Tensor]:
    config = model.config
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    special = {getattr(config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos", "cls", "sep")}
    words = torch.tensor([k for k in range(min(config.vocab_size, 30_000)) if k not in special])
    drawn = torch.randint(len(words), (len(_LENGTHS), max(_LENGTHS)), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(max(_LENGTHS)) < torch.tensor(_LENGTHS)[:, None]).long()
    if not with_mask:
        return {IDS: words[drawn]}
    return {IDS: torch.where(mask.bool(), words[drawn], pad), MASK: mask}


def _pixels(config: Any) -> torch.Tensor:
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = (3, getattr(config, "num_channels", 3), height, width)
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def _text(model: Any, folder: Path) -> dict[str, Any] | None:
    if not (folder / _TOKENIZER).is_file():
        _say(f"{folder} has no {_TOKENIZER}, so the bundle will take arrays, not texts")
        return None
    own = _read(folder / "tokenizer_config.json")
    longest = min(_positions(model), int(own.get("model_max_length") or _LONGEST))
    spec = {
        "kind": "text",
        "tokenizer": str(folder / _TOKENIZER),
        "max_length": longest,
        "padding": own.get("padding_side", "right"),
        "truncation": own.get("truncation_side", "right"),
        "sample": ["hello"],
    }
    pad = model.config.pad_token_id
    return spec if pad is None else {**spec, "pad_id": pad}


def _positions(model: Any) -> int:
    """Most tokens a row: RoBERTa's kin count positions from behind the padding's number."""
    most = int(getattr(model.config, "max_position_embeddings", 0) or _LONGEST)
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            most = min(most, part.num_embeddings - part.padding_idx - 1)
    return most


def _image(folder: Path, shape: list[int]) -> dict[str, Any] | None:
    own = _read(folder / "preprocessor_config.json")
    if not own:
        _say(f"{folder} has no preprocessor_config.json, so the bundle will take arrays, not pictures")
        return None
    crop = own.get("crop_size") if own.get("do_center_crop") else None
    height, width = _size(crop or own.get("size"), shape)
    spec: dict[str, Any] = {
        "kind": "image",
        "height": height,
        "width": width,
        "channels": "RGB" if shape[1] == 3 else "L",
        "interpolation": _RESAMPLE.get(own.get("resample", 2), "bilinear"),
        "scale": own.get("rescale_factor", 1 / 255) if own.get("do_rescale", True) else 1.0,
    }
    if own.get("do_normalize", True) and own.get("image_mean"):
        spec |= {"mean": own["image_mean"], "std": own["image_std"]}
    edge = (own.get("size") or {}).get("shortest_edge") if isinstance(own.get("size"), Mapping) else None
    if edge is not None:
        # ConvNeXt's processor enlarges a small picture before it crops.
        shorter = round(edge / own.get("crop_pct", 1)) if "crop_pct" in own and edge < 384 else edge
        spec |= {"resize": "crop", "shorter": max(shorter, height, width)}
    return spec


def _size(size: Any, shape: list[int]) -> tuple[int, int]:
    if isinstance(size, Mapping):
        if "height" in size:
            return int(size["height"]), int(size["width"])
        size = size.get("shortest_edge")
    return (shape[2], shape[3]) if size is None else (int(size), int(size))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ExportError(f"{path}: can't be read as JSON ({error}).") from error
    return found if isinstance(found, dict) else {}


def _say(sentence: str) -> None:
    warnings.warn(f"{sentence}.", stacklevel=2)
