"""The module inside what people hand over, and inputs as they pass them to it."""

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import numpy as np
import torch
from offramp.export.tracing.chain import Chain, as_chain
from offramp.runtime.errors import ExportError

_PARALLEL = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
# What transformers calls models that don't give one class a row, and what they give instead.
_OTHER_TASKS = {
    "TokenClassification|MaskedLM|PreTraining": "one answer a token",
    "CausalLM|LMHeadModel|ConditionalGeneration|Seq2SeqLM": "generated text",
    "QuestionAnswering": "a span of the text",
    "ObjectDetection|RCNN|RetinaNet|SSD|FCOS": "boxes",
    "Segmentation": "one answer a pixel",
    "MultipleChoice": "one score a choice",
}
_OTHER_PROBLEMS = {"multi_label_classification": "multi-label", "regression": "regression"}
_CONSTANTS = (bool, int, float, str, type(None))


def as_module(model: Any) -> torch.nn.Module:
    """The nn.Module in what was given: that of torch.compile, DataParallel, a bound `forward`, or blocks and heads.

    Raises ExportError with the way out for anything else, for tasks that aren't the classification of a row, and for
    weights that ONNX Runtime can't compute with on a CPU.
    """
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        raise ExportError(
            f"model is the class {model.__name__}: give an instance of it, {model.__name__}(…).eval(), with its "
            "weights loaded."
        )
    if isinstance(model, MethodType) and isinstance(model.__self__, torch.nn.Module):
        if model.__name__ != "forward":
            raise ExportError(f"model is the method {model.__name__!r}: give a torch.nn.Module whose forward calls it.")
        model = model.__self__
    while isinstance(model, _PARALLEL) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, _PARALLEL) else model._orig_mod
    model = as_chain(model) or model
    if isinstance(model, torch.export.ExportedProgram | torch.jit.ScriptModule | torch.fx.GraphModule):
        raise ExportError(
            f"model is a {type(model).__name__}, whose sizes may be fixed: give the torch.nn.Module it was made of, or "
            "write it as an ONNX file with torch.onnx.export and give that file's path."
        )
    if not isinstance(model, torch.nn.Module):
        wrap = ", in whose forward you call it" if callable(model) else ""
        parts = ', {"blocks": [...], "heads": [...]}' if isinstance(model, Mapping | Sequence) else ""
        raise ExportError(
            f"model is a {type(model).__name__}: expected a torch.nn.Module{wrap}{parts}, or the path of an ONNX file."
        )
    _refuse_other_tasks(model)
    _refuse_weights(model)
    return model


def _refuse_other_tasks(model: torch.nn.Module) -> None:
    kind = type(model).__name__
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if problem in _OTHER_PROBLEMS:
        raise ExportError(
            f"{kind} is a {_OTHER_PROBLEMS[problem]} model (config.problem_type): offramp answers with one class a row."
        )
    for names, given in _OTHER_TASKS.items():
        if re.search(f"({names})$", kind):
            raise ExportError(f"{kind} gives {given}: offramp serves classifiers, which answer with one class a row.")


def _refuse_weights(model: torch.nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype == torch.bfloat16:
            raise ExportError(
                f"{name} is bfloat16, which ONNX Runtime can't compute with on a CPU: give model.float(), which has "
                "the same weights."
            )
        if tensor.is_meta:
            raise ExportError(f"{name} is on the meta device, without values: load the model's weights first.")
        if tensor.device.type != "cpu":
            raise ExportError(
                f"{name} is on {tensor.device}: give model.cpu(), or copy.deepcopy(model).cpu() to keep yours there."
            )


@contextlib.contextmanager
def uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """`module.compile()` put off: compiling for each of the sizes that an export tries takes minutes."""
    compiled = [(part, part.__dict__["_compiled_call_impl"]) for part in model.modules() if _is_compiled(part)]
    for part, _ in compiled:
        part.__dict__["_compiled_call_impl"] = None
    try:
        yield
    finally:
        for part, call in compiled:
            part.__dict__["_compiled_call_impl"] = call


def _is_compiled(part: torch.nn.Module) -> bool:
    return part.__dict__.get("_compiled_call_impl") is not None


class Adapted(torch.nn.Module):
    """A module whose forward takes tensors by name, where the user's takes them otherwise.

    arguments, keywords: what the user's forward is given, with a _Place for each tensor.
    """

    def __init__(self, model: torch.nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._arguments, self._keywords = arguments, keywords

    def forward(self, **named: torch.Tensor) -> Any:
        return self.model(*_filled(self._arguments, named), **_filled(self._keywords, named))


class _Place:
    """Where a tensor goes."""

    def __init__(self, name: str) -> None:
        self.name = name


def _filled(given: Any, named: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(given, _Place):
        return named[given.name]
    if isinstance(given, Mapping):
        return {key: _filled(value, named) for key, value in given.items()}
    if isinstance(given, list | tuple):
        return type(given)(_filled(value, named) for value in given)
    return given


def name_inputs(model: torch.nn.Module, example: Any) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model, adapted if need be, and its example inputs by name.

    A mapping's names are as they are; a tensor or tuple has those of forward's parameters, and "input_0", … where
    forward takes any number of them. A tensor inside a mapping or list is called by the way to it: "batch.ids", "xs.0".
    None, numbers, flags and strings stay what they are in the example.
    """
    if isinstance(example, torch.Tensor | np.ndarray):
        example = (example,)
    if not isinstance(example, Mapping | Sequence) or isinstance(example, str):
        raise ExportError(f"example_inputs is a {type(example).__name__}: expected a mapping of tensors by input name.")
    tensors: dict[str, torch.Tensor] = {}
    arguments: tuple[Any, ...] = ()
    if isinstance(example, Mapping):
        keywords = {str(name): _placed(value, str(name), tensors) for name, value in example.items()}
    else:
        names, any_number = _parameters(model)
        if len(example) > len(names) and not any_number:
            raise ExportError(f"example_inputs has {len(example)} tensors, forward takes {len(names)}.")
        if any_number:
            names = [*names, *(f"input_{k}" for k in range(len(names), len(example)))]
        placed = {name: _placed(value, name, tensors) for name, value in zip(names, example, strict=False)}
        arguments, keywords = (tuple(placed.values()), {}) if any_number else ((), placed)
    if not tensors:
        raise ExportError("example_inputs is empty: expected at least one tensor.")
    plain = not arguments and all(isinstance(value, _Place) for value in keywords.values())
    return (model if plain else Adapted(model, arguments, keywords)), tensors


def _parameters(model: torch.nn.Module) -> tuple[list[str], bool]:
    """Names of forward's parameters, and whether it takes any number more by position."""
    takes = model.blocks[0] if isinstance(model, Chain) else model
    parameters = inspect.signature(takes.forward).parameters.values()
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return named, any(p.kind == p.VAR_POSITIONAL for p in parameters)


def _placed(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The value with its tensors taken out, under their names."""
    if isinstance(value, _CONSTANTS):
        return value
    if isinstance(value, Mapping):
        return {key: _placed(inner, f"{name}.{key}", tensors) for key, inner in value.items()}
    if isinstance(value, list | tuple) and not any(isinstance(inner, int | float) for inner in value):
        placed = [_placed(inner, f"{name}.{k}", tensors) for k, inner in enumerate(value)]
        return placed if isinstance(value, list) else tuple(placed)
    if not isinstance(value, torch.Tensor | np.ndarray):
        raise ExportError(f"example_inputs[{name!r}] is a {type(value).__name__}, expected a tensor.")
    try:
        tensor = torch.as_tensor(value).detach().cpu()
        tensor.numpy()
    except (TypeError, RuntimeError, NotImplementedError) as error:  # bfloat16, meta, sparse, texts
        raise ExportError(
            f"example_inputs[{name!r}] can't be a request's array ({str(error).splitlines()[0]}): expected values "
            "of a type that numpy has; cast them in forward where the model needs another."
        ) from error
    tensors[name] = tensor
    return _Place(name)
