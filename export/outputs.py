"""What a multi-exit model may return, and the one form the exporter works with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from offramp.runtime.errors import ExportError


@dataclass
class MultiExitOutput:
    """What a multi-exit model's forward may return, where a plain sequence of logits isn't enough.

    logits: one (batch, classes) tensor an exit, shallow to deep.
    features: one tensor an exit (batch, ...), for scores in feature space.
    routing: one (batch,) tensor a layer, in layer order: Attention-Residual routing entropies.
    external: one (batch,) learned confidence an exit.
    reservation: one (batch,) logit of an extra abstention class an exit.
    """

    logits: Sequence[Any]
    features: Sequence[Any] | None = None
    routing: Sequence[Any] | None = None
    external: Sequence[Any] | None = None
    reservation: Sequence[Any] | None = None


class ModelFails(ExportError):
    """The model can't be run on the values that it was given; on others it may."""


KINDS = tuple(f.name for f in fields(MultiExitOutput))
PER_EXIT = ("features", "external", "reservation")


@dataclass
class Outputs:
    """The names of a graph's outputs, by kind; those of PER_EXIT kinds are empty or one an exit."""

    logits: list[str]
    features: list[str] = field(default_factory=list)
    routing: list[str] = field(default_factory=list)
    external: list[str] = field(default_factory=list)
    reservation: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.logits:
            raise ExportError("the model has no exits: expected at least one logits output.")
        for kind in PER_EXIT:
            count = len(getattr(self, kind))
            if count not in (0, len(self.logits)):
                raise ExportError(f"{kind} has {count} outputs for {len(self.logits)} exits: expected one an exit.")

    @property
    def names(self) -> list[str]:
        return [name for kind in KINDS for name in getattr(self, kind)]


def flatten(output: Any) -> dict[str, list[Any]]:
    """A model's return value as {kind: tensors}, with absent kinds left out.

    Raises ExportError if it is none of: a sequence of logits, a MultiExitOutput, a mapping with its keys.
    """
    if isinstance(output, MultiExitOutput):
        output = {kind: getattr(output, kind) for kind in KINDS}
    elif hasattr(output, "shape"):  # a single tensor is a single exit
        output = {"logits": [output]}
    elif not isinstance(output, Mapping):
        if not isinstance(output, Sequence):
            raise ExportError(
                f"the model returns a {type(output).__name__}: expected a tuple or list of logits, "
                "a MultiExitOutput, or a mapping with its keys."
            )
        output = {"logits": output}
    unknown = [key for key in output if key not in KINDS]
    if unknown or "logits" not in output:
        raise ExportError(f"the model returns the keys {list(output)}: expected logits and any of {KINDS[1:]}.")
    flat: dict[str, list[Any]] = {}
    for kind in KINDS:
        tensors = output.get(kind)
        if tensors is None or (not hasattr(tensors, "shape") and len(tensors) == 0):
            continue
        tensors = [tensors] if hasattr(tensors, "shape") else list(tensors)
        for k, tensor in enumerate(tensors):
            if not hasattr(tensor, "shape"):
                raise ExportError(f"{kind}[{k}] is a {type(tensor).__name__}, expected a tensor.")
        flat[kind] = tensors
    return flat


def oddities(logits: Sequence[Any]) -> list[str]:
    """What is odd about a model's logits, arrays of shape (rows, classes), though it can be exported: sentences."""
    odd = []
    if len(logits) == 1:
        odd.append(
            "the model has one exit: no row can leave early, and nothing is saved. Return the logits of several exits."
        )
    if any(np.asarray(exit_).shape[1] == 1 for exit_ in logits):
        odd.append(
            "the model's exits have one class: every row gets it, with certainty. If its one logit z says yes or no, "
            "return two, torch.cat([torch.zeros_like(z), z], 1)."
        )
    normalised = [j for j, exit_ in enumerate(logits) if _are_probabilities(np.asarray(exit_, np.float64))]
    if normalised:
        classes = np.asarray(logits[normalised[0]]).shape[1]
        which = f"exit{'s' if len(normalised) > 1 else ''} {', '.join(map(str, normalised))}"
        most = np.e / (np.e + classes - 1)
        odd.append(
            f"{which} of the model seem{'s' if len(normalised) == 1 else ''} to return probabilities: rows that are "
            "never negative and sum to 1. Return logits, without the last softmax: offramp takes softmax itself, so "
            f"that confidence is at most {most:.2f} here, and in float32 the surest rows are all 1, so that their "
            "ranking is lost."
        )
    return odd


def _are_probabilities(rows: Any) -> bool:
    if rows.shape[1] < 2 or not np.isfinite(rows).all():
        return False
    return bool((rows >= 0).all() and np.abs(rows.sum(axis=1) - 1).max(initial=0.0) < 1e-2)
