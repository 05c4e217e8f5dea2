"""A torch module as one ONNX graph with named inputs and outputs, by torch.export."""

import contextlib
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
from offramp.export.tracing.module import ALL_LOGITS, Runner, line_of
from offramp.runtime.errors import ExportError
from torch.nn.attention import SDPBackend, sdpa_kernel

DynamicAxes = Mapping[str, Mapping[int, str]]


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
    """The model with positional inputs and one flat tuple of outputs, as the exporter wants it.

    changed: inputs that forward changes in place, which a graph can't; it gets copies of them.
    """

    def __init__(self, model: torch.nn.Module, names: Sequence[str], changed: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = list(names)
        self.changed = list(changed)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = dict(zip(self.names, inputs, strict=True))
        output = flatten(self.model(**{n: t.clone() if n in self.changed else t for n, t in named.items()}))
        return tuple(tensor for tensors in output.values() for tensor in tensors)


def trace(
    run: Runner, example: Mapping[str, np.ndarray[Any, Any]], dynamic_axes: Mapping[str, Mapping[int, str]]
) -> tuple[ir.Model, Outputs]:
    """Export the module; outputs are renamed logits_0, … routing_0, …

    Raises ExportError with the exporter's own first lines when it refuses the model.
    """
    names = list(example)
    output = run(example)
    outputs = Outputs(**{kind: [f"{kind}_{k}" for k in range(len(arrays))] for kind, arrays in output.items()})
    rows = example[names[0]].shape[_batch(dynamic_axes[names[0]])]
    for kind, arrays in output.items():
        for k, array in enumerate(arrays):
            if array.ndim == 0 or array.shape[0] != rows or (kind == "logits" and array.ndim != 2):
                wanted = "[batch, classes]" if kind == "logits" else "[batch, …]"
                raise ExportError(
                    f"{kind}[{k}] has the shape {list(array.shape)} for {rows} rows: expected {wanted}."
                    f"{_likely(array.shape, rows) if kind == 'logits' else ''}"
                )
    if len(output["logits"]) == rows > 1:  # or are they rows, of exits stacked behind the batch?
        run({n: np.concatenate([a, a], axis=_batch(dynamic_axes[n])) for n, a in example.items()})
    flat = _Flat(run.model, names, run.changed)
    flat.training = run.model.training
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            _quiet("torch.onnx", "torch.export", "torch"),
        ):
            warnings.simplefilter("ignore")
            program = _exported(
                flat,
                tuple(torch.from_numpy(array.copy()) for array in example.values()),
                dynamo=True,
                input_names=names,
                output_names=outputs.names,
                dynamic_shapes={"inputs": tuple(dict(dynamic_axes[name]) for name in names)},
                verbose=False,
            )
    except Exception as error:
        run.restore()
        cause, gist = _cause(error), _gist(error)
        decides = run.where_it_decides(example)
        if "pack_padded_sequence" in f"{decides} {line_of(cause)}":
            raise ExportError(
                "packed sequences can't be exported: their sizes are values. Run the recurrent layer on the padded "
                "batch, and take each row's state at its last position."
            ) from error
        if decides is not None or "data-dependent" in gist:
            said = "" if "data-dependent" in gist else f" torch.export says: {gist}"
            raise ExportError(
                f"forward decides by the values of a tensor ({decides or line_of(cause) or 'somewhere'}), and a graph "
                f"can't. {ALL_LOGITS}{said}"
            ) from error
        raise ExportError(f"torch.export refuses the model: {gist}") from error
    finally:
        run.restore()
    if program is None:
        raise ExportError("torch.export gave no program.")
    return program.model, outputs


def _batch(axes: Mapping[int, str]) -> int:
    return next(k for k, name in axes.items() if name == "batch")


def _exported(*args: Any, **kwargs: Any) -> Any:
    """torch.onnx.export, with attention spelt out where torch refuses a view of what its fused kernel gives.

    That lies in memory otherwise than what it is decomposed into later: Hugging Face's Swin, torch 2.13.
    """
    try:
        return torch.onnx.export(*args, **kwargs)
    except Exception as error:
        if "Cannot view a tensor" not in str(_cause(error)):
            raise
    with sdpa_kernel(SDPBackend.MATH):
        return torch.onnx.export(*args, **kwargs)


def _likely(shape: tuple[int, ...], rows: int) -> str:
    """What logits of another shape than (rows, classes) usually are."""
    if shape == (rows,):
        return " One logit z that says yes or no is two, torch.stack([torch.zeros_like(z), z], 1)."
    if len(shape) == 2:
        return (
            " Exits in one tensor are stacked [exits, batch, classes]. Where the batch isn't axis 0 of an input, "
            "dynamic_axes says so. Models that give an answer a token, box or pixel aren't classifiers of a row."
        )
    return " Models that give an answer a token, box or pixel aren't classifiers of a row."


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _gist(error: Exception) -> str:
    """The first lines of torch's long explanations, without colours; the innermost cause says most."""
    cause = _cause(error)
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
