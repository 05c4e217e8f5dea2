"""What a multi-exit model may return, and the one form the exporter works with."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
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
    """A model's return value as {kind: tensors}; absent kinds, and what is no exit, are left out.

    Logits are a sequence of (batch, classes) or one (exits, batch, classes): by themselves, first in a tuple, or under
    "logits" in a mapping or dataclass that may have the other kinds as well. Or they are a mapping's values, shallow
    to deep. Raises ExportError for anything else, and where another field may be exits, too.
    """
    named = _named(output)
    logits = _logits(named["logits"])
    flat = {"logits": logits}
    for kind in KINDS[1:]:
        tensors = named.get(kind)
        if tensors is None or (not hasattr(tensors, "shape") and len(tensors) == 0):
            continue
        if hasattr(tensors, "shape"):
            stacked = tensors.ndim > 1 and (kind == "routing" or tensors.shape[0] == len(logits) > 1)
            tensors = tensors.unbind(0) if stacked else [tensors]
        flat[kind] = _tensors(kind, tensors)
    for key, value in named.items():
        if key not in KINDS and any(_may_be_exits(one, logits[0]) for one in _each(value)):
            raise ExportError(
                f"the model returns {key!r} beside its logits, of the same shape: return the logits of all exits in "
                "one list, shallow to deep."
            )
    return flat


def _named(output: Any) -> Mapping[str, Any]:
    """The return value's fields, "logits" among them."""
    if is_dataclass(output) and not isinstance(output, Mapping):
        output = {field.name: getattr(output, field.name) for field in fields(output)}
    elif hasattr(output, "_asdict") and "logits" in output._fields:
        output = output._asdict()
    if not isinstance(output, Mapping):
        if not hasattr(output, "shape") and not isinstance(output, Sequence):
            raise ExportError(
                f"the model returns a {type(output).__name__}: expected a tuple or list of logits, "
                "a MultiExitOutput, or a mapping with its keys."
            )
        return {"logits": output}
    _refuse_boxes(output)
    if "logits" in output:
        return output
    others = {key: value for key, value in output.items() if key not in KINDS and value is not None}
    if not others or not all(hasattr(value, "shape") and len(value.shape) == 2 for value in others.values()):
        raise ExportError(f"the model returns the keys {list(output)}: expected logits and any of {KINDS[1:]}.")
    return {"logits": _in_order(others), **{key: output[key] for key in KINDS[1:] if key in output}}


def _in_order(exits: Mapping[str, Any]) -> list[Any]:
    """A mapping's exits by their numbers, where all keys are one word with a number; else as they come."""
    keys = [re.fullmatch(r"(.*?)(\d+)", str(key)) for key in exits]
    numbered = [(int(key[2]), tensor) for key, tensor in zip(keys, exits.values(), strict=True) if key]
    if len(numbered) < len(exits) or len({key[1] for key in keys if key}) > 1:
        return list(exits.values())
    return [tensor for _, tensor in sorted(numbered, key=lambda pair: pair[0])]


def _logits(given: Any) -> list[Any]:
    if hasattr(given, "shape"):
        return list(given.unbind(0)) if len(given.shape) == 3 else [given]
    if isinstance(given, Mapping):
        return _tensors("logits", _in_order(given))
    if not len(given):
        raise ExportError("the model has no exits: expected at least one logits output.")
    first = given[0]
    if isinstance(first, Mapping):
        _refuse_boxes(first)
    if isinstance(first, list | tuple) or (hasattr(first, "shape") and len(first.shape) == 3):
        return _logits(first)
    exits = list(given)
    while len(exits) > 1 and not _is_exit(exits[-1]):  # hidden states, a mapping of extras, None
        if any(_may_be_exits(one, first) for one in _each(exits.pop())):
            raise ExportError(
                "the model returns logits behind others of the same shape, in a list or mapping: return the logits of "
                "all exits in one list, shallow to deep."
            )
    return _tensors("logits", exits)


def _is_exit(value: Any) -> bool:
    """Whether this may be meant to be an exit in a tuple of them; what is odd about it is said later."""
    if hasattr(value, "shape"):
        return len(value.shape) in (0, 1, 2)
    return not (value is None or isinstance(value, Mapping | list | tuple))


def _tensors(kind: str, given: Any) -> list[Any]:
    tensors = list(given)
    for k, tensor in enumerate(tensors):
        if not hasattr(tensor, "shape"):
            raise ExportError(f"{kind}[{k}] is a {type(tensor).__name__}, expected a tensor.")
    return tensors


def _each(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list | tuple) else [value]


def _may_be_exits(value: Any, logits: Any) -> bool:
    """Whether it has the shape of an exit, (batch, classes)."""
    return hasattr(value, "shape") and len(value.shape) == 2 and value.shape[-1:] == getattr(logits, "shape", ())[-1:]


def _refuse_boxes(output: Mapping[str, Any]) -> None:
    if {"boxes", "pred_boxes"} & set(output):
        raise ExportError(
            f"the model returns {list(output)}, as detection models do: offramp serves classifiers, which answer with "
            "one class a row."
        )


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
