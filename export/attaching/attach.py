"""attach_exits: a trained single-exit classifier in, the same with exits after chosen blocks out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from offramp.export.attaching import pictures, transformers
from offramp.export.attaching.attached import MASK, About, Attached, Tap, logits_of
from offramp.export.attaching.blocks import Block, evenly, look
from offramp.export.attaching.heads import Head, Pooling, hidden_width, pooling_of, width_of
from offramp.export.attaching.refuse import refuse, refuse_exits
from offramp.export.attaching.taps import parse, tapped
from offramp.export.tracing.module import Runner
from offramp.export.tracing.trace import check_axes
from offramp.export.tracing.unwrap import name_inputs
from offramp.runtime.errors import ExportError


def attach_exits(
    model: Any,
    at: Sequence[str | int] | None = None,
    classes: Sequence[str] | None = None,
    *,
    example_inputs: Any = None,
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = None,
    preprocess: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Attached:
    """Put a head behind some of a trained classifier's blocks. The heads aren't trained yet: `train_heads` does that.

    model: a torch.nn.Module in evaluation mode that returns logits (batch, classes), or the folder of a Hugging Face
        or timm checkpoint. It stays as it is, and is the last exit, bit for bit.
    at: blocks to put heads behind: names of submodules ("encoder.layer.0"; with "#2" behind it the third call of one
        that is called several times), or numbers of the blocks that `find_blocks` finds, from 0 on. Default: up to 5
        that split the FLOPs evenly.
    classes: names of the logits. example_inputs, dynamic_axes, preprocess: as `export_bundle` takes them. Each is
        asked of the model where it isn't given: Hugging Face, timm and torchvision models know.
    seed: of the heads' first weights.

    Raises ExportError for a model that is no classifier of one class a row, or a block that isn't there.
    """
    folder = Path(model) if isinstance(model, str | Path) else None
    if folder is not None:
        model = load_checkpoint(folder)
    refuse(model)
    about = _about(model, folder, example_inputs, dynamic_axes)
    about = replace(
        about,
        classes=about.classes if classes is None else list(classes),
        preprocess=about.preprocess if preprocess is None else preprocess,
    )
    arrays = {name: tensor.numpy() for name, tensor in about.example_inputs.items()}
    with Runner(model):
        inputs = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        blocks, shares, total = look(model, inputs)
        names = _chosen(model, at, blocks)
        taps, logits = _look(model, names, shares, inputs)
        count, flops = int(logits.shape[1]), total // len(logits)
    if count < 2:
        raise ExportError(
            "the model gives one logit a row: heads are taught which of several classes a row is. Let forward return "
            "two, torch.cat([torch.zeros_like(z), z], 1) of a logit z that says yes or no."
        )
    if about.classes is not None and len(about.classes) != count:
        raise ExportError(f"classes has {len(about.classes)} names, the model gives {count} logits.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = [Head(tap.width, hidden_width(tap.width, count, flops), count) for tap in taps]
    return Attached(model, taps, heads, about)


def load_checkpoint(folder: Path) -> torch.nn.Module:
    """The classifier of a Hugging Face or timm checkpoint, in evaluation mode. Raises ExportError."""
    if not folder.is_dir():
        raise ExportError(f"{folder}: no such folder.")
    if pictures.is_timm(pictures.config_of(folder)):
        return pictures.load(folder)
    return transformers.load(folder)


def _about(model: torch.nn.Module, folder: Path | None, example: Any, axes: Any) -> About:
    found = None
    if transformers.is_transformers(model):
        found = transformers.about(model, folder or transformers.checkpoint_of(model))
    else:
        found = pictures.about(model)
    if example is None:
        if found is None:
            raise ExportError(
                f"example_inputs is missing: {type(model).__name__} is no Hugging Face, timm or torchvision "
                "classifier, so nobody knows what it takes. Give a few rows by the names of forward's parameters."
            )
        return found if axes is None else replace(found, dynamic_axes=check_axes(found.example_inputs, axes))
    adapted, named = name_inputs(model, example)
    if adapted is not model:
        raise ExportError("example_inputs: expected a tensor for each parameter of forward, by its name.")
    title = type(model).__name__ if found is None else found.title
    known = (None, None) if found is None else (found.classes, found.preprocess)
    if axes is None and found is not None and set(named) == set(found.example_inputs):
        axes = found.dynamic_axes
    return About(title, named, check_axes(named, axes), *known)


def _chosen(model: torch.nn.Module, at: Sequence[str | int] | None, blocks: Sequence[Block]) -> list[str]:
    if at is None:
        if not blocks:
            raise ExportError(
                f"{type(model).__name__} has no blocks that can be told: name the submodules to put heads behind (at=)."
            )
        return evenly(blocks)
    if isinstance(at, str) or not at:
        raise ExportError(f"at is {at!r}, expected a list of submodules' names or blocks' numbers.")
    names = []
    parts = dict(model.named_modules())
    for one in at:
        if isinstance(one, int | np.integer):
            if not 0 <= one < len(blocks):
                raise ExportError(f"at has the block {one}, the model has blocks 0 to {len(blocks) - 1}.")
            names.append(blocks[one].tap)
        elif parse(one)[0] in parts and parse(one)[0]:
            names.append(one)
        else:
            outermost = [name for name, _ in model.named_children()]
            raise ExportError(
                f"at names {one!r}, which the model doesn't have. Any submodule's name goes: {_some(outermost)}, and "
                f"what is in them. Blocks that were found by themselves: {_some([b.tap for b in blocks]) or 'none'}."
            )
    if len(set(names)) != len(names):
        raise ExportError(f"at names a block twice: {names}.")
    return names


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (", …" if len(names) > 12 else "")


def _look(
    model: torch.nn.Module, names: Sequence[str], shares: Mapping[str, float], inputs: Mapping[str, torch.Tensor]
) -> tuple[list[Tap], torch.Tensor]:
    """The taps in the order in which they run, and the model's logits."""
    with torch.no_grad(), tapped(model, names) as found:
        output = model(**inputs)
    refuse_exits(output)
    logits = logits_of(output)
    rows = logits.shape[0]
    mask = list(inputs[MASK].shape) if MASK in inputs else None
    taps = []
    for name in found:  # in the order of the calls
        feature = found[name]
        shape = list(feature.shape)
        pooling: Pooling | None = None
        if shape[0] == rows and feature.is_floating_point():
            last = "NHWC" in str(getattr(model, "output_fmt", ""))
            pooling = pooling_of(shape, mask, channels_last=last)
        if pooling is None:
            raise ExportError(
                f"{name!r} gives {feature.dtype} of the shape {shape} for {rows} rows: expected floats [batch, width], "
                "[batch, seq, width] or [batch, width, h, w]."
            )
        taps.append(Tap(name, pooling, width_of(shape, pooling), shares.get(name, float("nan"))))
    missing = [name for name in names if name not in found]
    if missing:
        raise ExportError(f"at names {missing[0]!r}, which the model doesn't run on the example, or not so often.")
    return taps, logits
