"""A torch module as one ONNX graph with named inputs and outputs, by torch.export."""

import contextlib
import inspect
import io
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from offramp.export.outputs import Outputs, flatten
from offramp.runtime.errors import ExportError

DynamicAxes = Mapping[str, Mapping[int, str]]


def name_inputs(model: torch.nn.Module, example: Any) -> dict[str, torch.Tensor]:
    """Example inputs by name: a mapping as it is, a tensor or sequence by the names of forward's parameters."""
    if isinstance(example, torch.Tensor | np.ndarray):
        example = (example,)
    if not isinstance(example, Mapping):
        if not isinstance(example, Sequence):
            raise ExportError(
                f"example_inputs is a {type(example).__name__}: expected a mapping of tensors by input name."
            )
        names = [p.name for p in inspect.signature(model.forward).parameters.values()]
        if len(example) > len(names):
            raise ExportError(f"example_inputs has {len(example)} tensors, forward takes {len(names)}.")
        example = dict(zip(names, example, strict=False))
    named: dict[str, torch.Tensor] = {}
    for name, value in example.items():
        if not isinstance(value, torch.Tensor | np.ndarray):
            raise ExportError(f"example_inputs[{name!r}] is a {type(value).__name__}, expected a tensor.")
        named[name] = torch.as_tensor(value)
    if not named:
        raise ExportError("example_inputs is empty: expected at least one tensor.")
    return named


def check_axes(example: Mapping[str, torch.Tensor], dynamic_axes: DynamicAxes | None) -> dict[str, dict[int, str]]:
    """dynamic_axes with every input in it; axis 0 is "batch" where nothing was given."""
    if dynamic_axes is None:
        return {name: {0: "batch"} for name in example}
    unknown = set(dynamic_axes) - set(example)
    if unknown:
        raise ExportError(f"dynamic_axes names {sorted(unknown)}, but the inputs are {list(example)}.")
    checked = {}
    for name, tensor in example.items():
        axes = {int(k): str(v) for k, v in dynamic_axes.get(name, {}).items()}
        axes = {k + tensor.dim() if k < 0 else k: v for k, v in axes.items()}
        for k in axes:
            if not 0 <= k < tensor.dim():
                raise ExportError(f"dynamic_axes[{name!r}] names axis {k}, but the example has {tensor.dim()} axes.")
        if list(axes.values()).count("batch") != 1:
            raise ExportError(f'dynamic_axes[{name!r}] is {axes}: expected one axis named "batch".')
        checked[name] = axes
    return checked


class _Flat(torch.nn.Module):
    """The model with positional inputs and one flat tuple of outputs, as the exporter wants it."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = list(names)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = flatten(self.model(**dict(zip(self.names, inputs, strict=True))))
        return tuple(tensor for tensors in output.values() for tensor in tensors)


def run_torch(
    model: torch.nn.Module, inputs: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, list[np.ndarray[Any, Any]]]:
    """The model's outputs by kind, as numpy arrays."""
    with torch.no_grad():
        output = flatten(model(**{name: torch.from_numpy(array) for name, array in inputs.items()}))
    return {
        kind: [t.detach().float().numpy() if t.dtype == torch.bfloat16 else t.detach().numpy() for t in tensors]
        for kind, tensors in output.items()
    }


def trace(
    model: torch.nn.Module, example: Mapping[str, torch.Tensor], dynamic_axes: Mapping[str, Mapping[int, str]]
) -> tuple[ir.Model, Outputs]:
    """Export the module; outputs are renamed logits_0, … routing_0, …

    Raises ExportError with the exporter's own first lines when it refuses the model.
    """
    names = list(example)
    _refuse_training(model)
    with torch.no_grad():
        try:
            output = flatten(model(**example))
        except ExportError:
            raise
        except Exception as error:
            raise ExportError(f"the model fails on the example inputs: {error}") from error
    outputs = Outputs(**{kind: [f"{kind}_{k}" for k in range(len(tensors))] for kind, tensors in output.items()})
    rows = next(example[name].shape[k] for name in names for k, a in dynamic_axes[name].items() if a == "batch")
    for kind, tensors in output.items():
        for k, tensor in enumerate(tensors):
            if tensor.dim() == 0 or tensor.shape[0] != rows or (kind == "logits" and tensor.dim() != 2):
                wanted = "[batch, classes]" if kind == "logits" else "[batch, …]"
                raise ExportError(f"{kind}[{k}] has the shape {list(tensor.shape)} for {rows} rows: expected {wanted}.")
    flat = _Flat(model, names)
    flat.training = model.training
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            _quiet("torch.onnx", "torch.export", "torch"),
        ):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                flat,
                tuple(example.values()),
                dynamo=True,
                input_names=names,
                output_names=outputs.names,
                dynamic_shapes={"inputs": tuple(dict(dynamic_axes[name]) for name in names)},
                verbose=False,
            )
    except Exception as error:
        raise ExportError(f"torch.export refuses the model: {_gist(error)}") from error
    if program is None:
        raise ExportError("torch.export gave no program.")
    return program.model, outputs


def _refuse_training(model: torch.nn.Module) -> None:
    """Raises ExportError if a part of the model is random, or learns from what it sees: before it has seen anything."""
    for name, part in model.named_modules():
        random = isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.p > 0
        if part.training and (random or isinstance(part, torch.nn.modules.batchnorm._BatchNorm)):
            where = f"{name or 'the model'} ({type(part).__name__})"
            raise ExportError(f"{where} is in training mode. Call model.eval() before exporting it.")


def _gist(error: Exception) -> str:
    """The first lines of torch's long explanations, without colours; the innermost cause says most."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(cause) or type(cause).__name__)
    return " ".join(text.split())[:600]


@contextlib.contextmanager
def _quiet(*names: str) -> Any:
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
