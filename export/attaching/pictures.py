"""What a timm or torchvision classifier says of itself."""

import inspect
import json
import math
from pathlib import Path
from typing import Any

import torch
from offramp.export.attaching.attached import About
from offramp.runtime.errors import ExportError

_USUAL = (3, 224, 224)


def about(model: Any) -> About | None:
    """None for a model that is neither timm's nor torchvision's."""
    package = type(model).__module__.partition(".")[0]
    name = next(iter(inspect.signature(model.forward).parameters), "x")
    title = type(model).__name__
    if package == "torchvision":
        return About(title, {name: _example(_USUAL)}, {name: {0: "batch"}})
    if package != "timm":
        return None
    own = model.pretrained_cfg
    size = tuple(own.get("input_size") or _USUAL)
    return About(
        own.get("architecture") or title,
        {name: _example(size)},
        {name: {0: "batch"}},
        [str(label) for label in own["label_names"]] if own.get("label_names") else None,
        _image(own, size),
    )


def is_timm(config: dict[str, Any]) -> bool:
    return "architecture" in config and "pretrained_cfg" in config


def load(folder: Path) -> torch.nn.Module:
    """A timm checkpoint's classifier in evaluation mode. Raises ExportError."""
    try:
        import timm
    except ImportError as error:
        raise ExportError(f"{folder} is a timm checkpoint, and timm isn't installed: pip install timm") from error
    if not any(folder.glob("*.safetensors")):
        raise ExportError(
            f"{folder} has no .safetensors: other weights are pickles, which are never loaded. Write them with "
            "timm.models.save_for_hf(model, folder, safe_serialization=True) of the model that you trust."
        )
    try:
        model: torch.nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    except Exception as error:  # whatever the library raises
        raise ExportError(f"{folder}: can't be loaded by timm: {' '.join(str(error).split())[:300]}") from error
    return model.eval()


def config_of(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ExportError(f"{folder} has no config.json: expected a Hugging Face or timm checkpoint.") from error
    except (OSError, ValueError) as error:
        raise ExportError(f"{path}: can't be read as JSON ({error}).") from error
    if not isinstance(found, dict):
        raise ExportError(f"{path}: expected a JSON object, got a {type(found).__name__}.")
    return found


def _example(size: tuple[int, ...]) -> torch.Tensor:
    return torch.rand((3, *size), generator=torch.Generator().manual_seed(0))


def _image(own: Any, size: tuple[int, ...]) -> dict[str, Any]:
    """timm's data_config: the middle is cut out of a picture that is larger by 1 / crop_pct."""
    channels, height, width = size
    interpolation = own.get("interpolation", "bicubic")
    spec = {
        "kind": "image",
        "height": height,
        "width": width,
        "channels": "RGB" if channels == 3 else "L",
        "interpolation": interpolation if interpolation in ("nearest", "bilinear", "bicubic", "lanczos") else "bicubic",
        "mean": list(own.get("mean", ())),
        "std": list(own.get("std", ())),
    }
    if own.get("crop_mode", "center") == "squash":
        return {**spec, "resize": "stretch"}
    if own.get("crop_mode") == "border":
        return {**spec, "resize": "pad"}
    return {**spec, "resize": "crop", "shorter": math.floor(max(height, width) / (own.get("crop_pct") or 1))}
