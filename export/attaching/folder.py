"""A classifier with heads on disk: which model, where its heads stand, and the heads' weights; no pickle.

The model's own weights stay where they are: the folder says where, and what they must be.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from offramp.export.attaching import INDEX
from offramp.export.attaching.attach import load_checkpoint
from offramp.export.attaching.attached import About, Attached, Tap
from offramp.export.attaching.heads import Head, Pooling
from offramp.runtime.bundle import own_version
from offramp.runtime.errors import ExportError
from offramp.runtime.files import new_folder, sha256_of_file, write_atomically

HEADS, EXAMPLE, SOURCE = "heads.npz", "example.npz", "source.npz"
SCHEMA = "offramp-attached/1"
_UNREADABLE = (OSError, ValueError, KeyError, msgspec.MsgspecError)


class Place(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A head: the submodule behind which it stands, how it pools, and its sizes. share: of the FLOPs until there."""

    tap: str
    pooling: Pooling
    width: int
    hidden: int
    share: float | None


class Index(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """attached.json. source: a checkpoint's folder, or FILE.py:FUNCTION. files: its files' SHA-256, by path.

    preprocess: as `export_bundle` takes it. axes: input -> [number, name] of those that vary. tuned: whether the
    model's own weights were trained with the heads', and are in source.npz. accuracy: by exit, once trained.
    """

    schema: str
    created_by: str
    source: str
    files: dict[str, str]
    title: str
    classes: list[str]
    places: list[Place]
    axes: dict[str, list[tuple[int, str]]]
    preprocess: dict[str, Any] | None
    tuned: bool = False
    trained: dict[str, Any] = {}


def save_attached(
    attached: Attached,
    path: str | Path,
    source: str,
    *,
    tuned: bool = False,
    trained: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write heads and what is known of the model to the folder `path`.

    source: what `load_attached` finds the model by: a checkpoint's folder, or FILE.py:FUNCTION.
    """
    folder = Path(path)
    with new_folder(folder, marker=INDEX, replace=overwrite) as temporary:
        write_attached(attached, temporary, source, tuned=tuned, trained=trained)
    return folder


def write_attached(
    attached: Attached, folder: Path, source: str, *, tuned: bool = False, trained: Mapping[str, Any] | None = None
) -> None:
    """The files of `save_attached`, into a folder that is there."""
    about = attached.about
    heads = [head for head in attached.heads if isinstance(head, Head)]
    places = [
        Place(
            tap=tap.name,
            pooling=tap.pooling,
            width=tap.width,
            hidden=head.hidden.out_features,
            share=tap.share if math.isfinite(tap.share) else None,
        )
        for tap, head in zip(attached.taps, heads, strict=True)
    ]
    count = heads[0].classes.out_features
    index = Index(
        schema=SCHEMA,
        created_by=f"offramp {own_version()}",
        source=str(Path(source).absolute()) if Path(source).is_dir() else source,
        files=_files(source),
        title=about.title,
        classes=about.classes or [str(k) for k in range(count)],
        places=places,
        axes={name: [(int(k), axis) for k, axis in axes.items()] for name, axes in about.dynamic_axes.items()},
        preprocess=None if about.preprocess is None else dict(about.preprocess),
        tuned=tuned,
        trained=dict(trained or {}),
    )
    save_arrays(folder / HEADS, attached.heads.state_dict())
    save_arrays(folder / EXAMPLE, about.example_inputs)
    if tuned:
        save_arrays(folder / SOURCE, attached.source.state_dict())
    write_atomically(folder / INDEX, msgspec.json.format(msgspec.json.encode(index), indent=1))


def load_attached(path: str | Path, build: Callable[[str], torch.nn.Module] | None = None) -> tuple[Attached, Index]:
    """The classifier with heads that `save_attached` wrote, and what stands in its index.

    build: makes the model of a source that is no folder. Raises ExportError for a folder that isn't whole, or a model
    whose files changed since.
    """
    folder = Path(path)
    index = read_index(folder)
    if Path(index.source).is_dir():
        if _files(index.source) != index.files:
            raise ExportError(f"{index.source}: changed since {folder} was made from it. Attach and train again.")
        model = load_checkpoint(Path(index.source))
    elif build is None:
        raise ExportError(f"{folder / INDEX}: source is {index.source!r}, which isn't there.")
    else:
        model = build(index.source)
    count = len(index.classes)
    example = {name: torch.from_numpy(array) for name, array in load_arrays(folder / EXAMPLE).items()}
    about = About(
        index.title, example, {n: dict(axes) for n, axes in index.axes.items()}, index.classes, index.preprocess
    )
    taps = [Tap(p.tap, p.pooling, p.width, float("nan") if p.share is None else p.share) for p in index.places]
    heads = [Head(place.width, place.hidden, count) for place in index.places]
    attached = Attached(model, taps, heads, about)
    _load(attached.heads, folder / HEADS)
    if index.tuned:
        _load(attached.source, folder / SOURCE)
    return attached, index


def read_index(folder: Path) -> Index:
    """Raises ExportError for a folder that isn't a classifier with heads."""
    try:
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
    except _UNREADABLE as error:
        raise ExportError(f"{folder / INDEX}: can't be read ({error}).") from error
    if index.schema != SCHEMA:
        raise ExportError(f"{folder / INDEX}: schema is {index.schema!r}, expected {SCHEMA!r}.")
    return index


def save_arrays(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Tensors as an .npz, whole or absent. bfloat16, which numpy lacks, becomes float32; loading turns it back."""
    arrays = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu()
        arrays[name] = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **arrays)
    temporary.replace(path)


def load_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Raises ExportError for a file that can't be read."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except _UNREADABLE as error:
        raise ExportError(f"{path}: can't be read ({error}).") from error


def _load(module: torch.nn.Module, path: Path) -> None:
    try:
        module.load_state_dict({name: torch.from_numpy(array) for name, array in load_arrays(path).items()})
    except RuntimeError as error:
        raise ExportError(f"{path}: doesn't fit the model ({' '.join(str(error).split())[:300]}).") from error


def _files(source: str) -> dict[str, str]:
    """SHA-256 of a checkpoint's weights and settings; nothing of a function's."""
    folder = Path(source)
    if not folder.is_dir():
        return {}
    files = [*folder.glob("*.safetensors"), *folder.glob("*.json")]
    return {file.name: sha256_of_file(file) for file in sorted(files)}
