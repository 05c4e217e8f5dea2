"""Training data: what `offramp record` takes, for a model that isn't a bundle yet."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from offramp.export.attaching.attached import Attached
from offramp.export.preprocess import Taken, check_kind, take_preprocess
from offramp.runtime.bundle import Input
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.data.sources import DataFile, open_data
from offramp.runtime.preprocess import Preprocess, Preprocessor, open_preprocessor


@dataclass(frozen=True)
class Model:
    """What a model takes: its inputs, its classes, and how raw rows become inputs."""

    inputs: list[Input]
    classes: list[str]
    preprocess: Preprocess | None
    source: Path | None

    @property
    def manifest(self) -> "Model":
        return self

    def preprocessor(self) -> Preprocessor:
        if self.preprocess is None:
            raise InputError("the model takes arrays only: it brings no tokenizer or processor, and none was given.")
        return open_preprocessor(self.preprocess, self.inputs, lambda _: self.source or Path())


def model_of(attached: Attached) -> Model:
    """Raises ExportError where the preprocessing doesn't fit the model."""
    about = attached.about
    inputs = []
    for name, tensor in about.example_inputs.items():
        axes = about.dynamic_axes[name]
        shape = [axes.get(k, int(size)) for k, size in enumerate(tensor.shape)]
        inputs.append(Input(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=shape))
    taken: Taken | None = None
    if about.preprocess is not None:
        check_kind(about.preprocess)
        taken = take_preprocess(about.preprocess, {one.name: (one.dtype, one.shape) for one in inputs})
    return Model(
        inputs,
        about.classes or [str(k) for k in range(classes_of(attached))],
        None if taken is None else taken.spec,
        None if taken is None else taken.source,
    )


def classes_of(attached: Attached) -> int:
    """How many classes the logits have."""
    weight = list(attached.heads.parameters())[-1]
    return int(weight.shape[0])


def open_rows(attached: Attached, data: str | Path, *, labels: bool = True) -> list[DataFile]:
    """The files of a data source. labels: False leaves them out, whatever stands there.

    Raises InputError naming what is wrong, or that there are no rows.
    """
    sources = open_data(data, model_of(attached), labels=labels)
    if not sum(source.rows for source in sources):
        raise InputError(f"{data}: has no rows.")
    return sources


def tensors_of(inputs: dict[str, Any], device: str) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(array)).to(device) for name, array in inputs.items()}
