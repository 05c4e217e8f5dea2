"""A single-exit classifier with heads: a multi-exit model as export takes it, around the user's own module."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from offramp.export.attaching.heads import Head, Pooling, pool
from offramp.export.attaching.taps import tapped, tensor_of
from offramp.export.exporter import export_bundle
from offramp.runtime.errors import ExportError

MASK = "attention_mask"


@dataclass(frozen=True)
class About:
    """What goes with a model: how it is run, and what its inputs and outputs mean.

    example_inputs, dynamic_axes, preprocess: as `export_bundle` takes them. classes: None where nobody knows them.
    """

    title: str
    example_inputs: Mapping[str, torch.Tensor]
    dynamic_axes: Mapping[str, Mapping[int, str]]
    classes: list[str] | None = None
    preprocess: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Tap:
    """Where a head stands: the submodule (and its call) behind which it looks, how it pools, its share of the FLOPs."""

    name: str
    pooling: Pooling
    width: int
    share: float


class Attached(torch.nn.Module):
    """`source`, which stays as it is, and a head behind each of `taps`.

    forward takes the source's inputs and returns the heads' logits, shallow to deep, then the source's own, each
    (batch, classes). Only the heads follow `train()`.
    """

    def __init__(self, source: torch.nn.Module, taps: Sequence[Tap], heads: Sequence[Head], about: About) -> None:
        super().__init__()
        self.source = source
        self.taps = tuple(taps)
        self.heads = torch.nn.ModuleList(heads)
        self.about = about
        self.eval()

    def forward(self, *args: torch.Tensor, **inputs: torch.Tensor) -> list[torch.Tensor]:
        *pooled, last = self.pooled(*args, **inputs)
        return [*self.exits(pooled), last]

    def exits(self, pooled: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The heads' logits of pooled features, one (batch, width) a head."""
        return [head(x) for head, x in zip(self.heads, pooled, strict=True)]

    def pooled(self, *args: torch.Tensor, **inputs: torch.Tensor) -> list[torch.Tensor]:
        """What each head takes, (batch, width), and the source's logits: all that a frozen source has to say."""
        named = dict(zip(self.parameters_of_forward, args, strict=False)) | inputs
        with tapped(self.source, [tap.name for tap in self.taps]) as found:
            logits = logits_of(self.source(**named))
        missing = [tap.name for tap in self.taps if tap.name not in found]
        if missing:
            raise ExportError(f"the model didn't run {missing[0]!r}, behind which a head stands.")
        return [*(pool(found[tap.name], tap.pooling, named.get(MASK)) for tap in self.taps), logits]

    @property
    def parameters_of_forward(self) -> list[str]:
        return list(inspect.signature(self.source.forward).parameters)

    def train(self, mode: bool = True) -> Self:
        """Only the heads: the source stays in the mode in which it was given."""
        self.training = mode
        self.heads.train(mode)
        return self

    def export(self, path: str | Path, **options: Any) -> Path:
        """`export_bundle` with what is known about the model; `options` go before that."""
        return export_bundle(self, dict(self.about.example_inputs), path, **{**self.known, **options})

    @property
    def known(self) -> dict[str, Any]:
        """Options of `export_bundle` that the model answers by itself."""
        about = self.about
        return {
            "dynamic_axes": about.dynamic_axes,
            "classes": about.classes,
            "preprocess": about.preprocess,
            "name": about.title,
        }


def logits_of(output: Any) -> torch.Tensor:
    """A classifier's logits, (batch, classes). Raises ExportError for what isn't one row of logits a row."""
    if hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    logits = tensor_of(output)
    if logits is None:
        raise ExportError(f"the model returns a {type(output).__name__}: expected logits, or an output with logits.")
    if logits.dim() != 2:
        raise ExportError(
            f"the model returns logits of the shape {list(logits.shape)}: expected [batch, classes]. What answers "
            "for each token or place isn't one classification a row."
        )
    return logits
