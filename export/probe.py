"""What shapes the model's values really have: it is run at several sizes, and every shape is noted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from offramp.export.dims import Dim, fit, next_size
from offramp.export.graph import ModelGraph
from offramp.export.outputs import KINDS
from offramp.export.writing.weights import WeightFile
from offramp.runtime.errors import ExportError
from offramp.runtime.execution.cpu.session import onnxruntime

Inputs = dict[str, np.ndarray[Any, Any]]
_PREFIX = "offramp.shape."
# How many other sizes of an axis are looked at: fewer let a strided size be taken for another stride's.
_OTHER_SIZES = 4
# Strides are found by halving: ten sizes tell 1,024 paddings apart, others one stride from the next.
_MOST_OTHER_SIZES = 24
_MOST_QUOTIENTS = 16
# What ONNX Runtime calls types.
_TYPES = {dtype.name.lower(): dtype for dtype in ir.DataType}


def resize(inputs: Mapping[str, Any], shapes: Mapping[str, list[int | str]], sizes: Mapping[str, int]) -> Inputs:
    """Example inputs at other sizes: rows and positions are repeated from the start, so values stay plausible."""
    out = {}
    for name, array in inputs.items():
        for axis, size in enumerate(shapes[name]):
            if isinstance(size, str) and size in sizes and array.shape[axis] != sizes[size]:
                array = np.take(array, np.arange(sizes[size]) % max(1, array.shape[axis]), axis=axis)
        out[name] = np.ascontiguousarray(array)
    return out


def model_proto(
    graph: ModelGraph, store: WeightFile, outputs: list[onnx.ValueInfoProto], extra: list[onnx.NodeProto]
) -> onnx.ModelProto:
    """The whole model as ONNX, over the bundle's weight file."""
    inputs = [
        onnx.helper.make_tensor_value_info(name, dtype.value, shape) for name, (dtype, shape) in graph.inputs.items()
    ]
    used = {name for op in graph.ops for name in op.inputs} | set(graph.outputs.names)
    proto = onnx.helper.make_graph(
        [op.proto for op in graph.ops] + extra,
        "model",
        inputs,
        outputs,
        [store.initializer(name) for name in graph.weights if name in used],
        value_info=graph.half_values(op.outputs for op in graph.ops),
    )
    return onnx.helper.make_model(
        proto,
        ir_version=graph.ir_version,
        opset_imports=[onnx.helper.make_opsetid(domain, version) for domain, version in graph.opsets.items()],
    )


class Probe:
    """Runs the whole model at chosen axis sizes. `shapes` are formulas for every value that follows one."""

    def __init__(self, graph: ModelGraph, store: WeightFile, folder: Path, example: Inputs) -> None:
        self.graph = graph
        self._example = example
        self._given = {name: shape for name, (_, shape) in graph.inputs.items()}
        self._store, self._folder = store, folder
        self._type_the_rest()
        watched = [name for op in graph.ops for name in op.outputs if name in graph.dtypes]
        extra = [onnx.helper.make_node("Shape", [name], [_PREFIX + name]) for name in watched]
        outputs = [onnx.helper.make_tensor_value_info(_PREFIX + n, onnx.TensorProto.INT64, None) for n in watched] + [
            onnx.helper.make_empty_tensor_value_info(n) for n in graph.outputs.names
        ]
        self._watched = watched
        self.example_sizes = {
            axis: example[name].shape[k]
            for name, shape in self._given.items()
            for k, axis in enumerate(shape)
            if isinstance(axis, str)
        }
        session = self._open(outputs, extra)  # let go again: it is as large as the model
        self.runs = self._runs(session)
        self._seen = [*self.runs, *self._more_runs(session)]
        self.shapes = self._fit()

    def _type_the_rest(self) -> None:
        """Types that ONNX doesn't infer, behind ONNX Runtime's own operations, as ONNX Runtime does."""
        made = [name for op in self.graph.ops for name in op.outputs if name not in self.graph.dtypes]
        if not made:
            return
        session = self._open([onnx.helper.make_empty_tensor_value_info(name) for name in made], [])
        for value in session.get_outputs():
            kind = value.type.removeprefix("tensor(").removesuffix(")")
            if kind in _TYPES:
                self.graph.dtypes[value.name] = _TYPES[kind]

    def _open(self, outputs: list[onnx.ValueInfoProto], extra: list[onnx.NodeProto]) -> Any:
        """The whole model as a session, its optimisations off, giving `outputs`."""
        path = self._folder / ".probe.onnx"
        onnx.save(model_proto(self.graph, self._store, outputs, extra), path)
        try:
            return plain_session(path, "the exported model")
        finally:
            path.unlink(missing_ok=True)

    def positional(self, names: list[str], inputs: Inputs) -> set[str]:
        """Those of the named values that don't move with their rows when some of these six or more are left out."""
        session = self._open([onnx.helper.make_empty_tensor_value_info(n) for n in names], [])
        rows = [4, 1, 3]
        axes = {n: shape.index("batch") for n, shape in self._given.items()}
        some = {n: np.ascontiguousarray(np.take(a, rows, axis=axes[n])) for n, a in inputs.items()}
        wrong = set()
        for name, whole, part in zip(names, session.run(names, inputs), session.run(names, some), strict=True):
            axis = batch_axis(self.shapes[name])
            expected = np.take(whole, rows, axis=axis)
            if expected.shape != part.shape or not _close(expected, part):
                wrong.add(name)
        return wrong

    def answers(self, inputs: Inputs) -> dict[str, list[np.ndarray[Any, Any]]]:
        """The outputs of the whole graph by kind, before anything is cut."""
        outputs = self.graph.outputs
        session = self._open([onnx.helper.make_empty_tensor_value_info(n) for n in outputs.names], [])
        values = dict(zip(outputs.names, session.run(outputs.names, inputs), strict=True))
        return {kind: [values[n] for n in getattr(outputs, kind)] for kind in KINDS if getattr(outputs, kind)}

    def inputs(self, sizes: Mapping[str, int]) -> Inputs:
        return resize(self._example, self._given, sizes)

    def _shapes(self, session: Any, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        inputs = self.inputs(sizes)
        values = session.run([_PREFIX + n for n in self._watched], inputs)
        shapes = {n: tuple(int(d) for d in v) for n, v in zip(self._watched, values, strict=True)}
        return shapes | {n: a.shape for n, a in inputs.items()}

    def _runs(self, session: Any) -> list[tuple[dict[str, int], dict[str, tuple[int, ...]]]]:
        """Shapes at the example's sizes and at others: each axis at two more sizes at least, where it can be."""
        base = {**self.example_sizes, "batch": 3}
        runs = []
        try:
            runs.append((base, self._shapes(session, base)))
        except Exception as error:
            raise ExportError(f"the exported model doesn't run on the example inputs: {one_line(error)}") from error
        for axis in self.graph.axes:
            n = base[axis]
            worked = 0
            # Other multiples and neighbours: a model may need 32 | height, or take at most 512 positions.
            for size in (
                (5, 7, 11, 13) if axis == "batch" else (n + 3, n + 1, 2 * n, n - 1, n + 2, n - 2, n // 2, n + 32, 4 * n)
            ):
                if size < 1 or size == n or worked == _OTHER_SIZES:
                    continue
                sizes = {**base, axis: size, **({} if axis == "batch" else {"batch": 2})}
                try:
                    runs.append((sizes, self._shapes(session, sizes)))
                    worked += 1
                except Exception as error:
                    failure = error
            if not worked:
                raise ExportError(
                    f"the axis {axis!r} is declared dynamic, but the exported model only runs at {n}: "
                    f"{one_line(failure)} A state or shape was made for one size: take sizes from the input, and let "
                    "recurrent layers be batch_first."
                )
        return runs

    def _more_runs(self, session: Any) -> list[tuple[dict[str, int], dict[str, tuple[int, ...]]]]:
        """Shapes at sizes that tell strides and paddings apart: what (n + 1) // 2 is, and what (n + 5) // 320."""
        more: list[tuple[dict[str, int], dict[str, tuple[int, ...]]]] = []
        base = self.runs[0][0]
        for axis in self.graph.axes[1:]:
            tried = {base[axis]}
            while len(tried) <= _MOST_OTHER_SIZES:
                runs = [*self.runs, *more]
                columns = {column for name in runs[0][1] for column in zip(*(s[name] for _, s in runs), strict=False)}
                asked = {
                    next_size([(sizes, size) for (sizes, _), size in zip(runs, column, strict=True)], axis, base[axis])
                    for column in columns
                }
                size = min((n for n in asked if n is not None and n not in tried), default=None)
                if size is None:
                    break
                tried.add(size)
                try:
                    more.append(({**base, axis: size}, self._shapes(session, {**base, axis: size})))
                except Exception:  # a size that the model doesn't take tells nothing
                    continue
        return more

    def _fit(self) -> dict[str, list[Dim] | None]:
        runs = self._seen
        ranks = {name: {len(shapes[name]) for _, shapes in runs} for name in runs[0][1]}
        samples = {
            name: [[(sizes, shapes[name][k]) for sizes, shapes in runs] for k in range(min(ranks[name]))]
            for name in ranks
        }
        fitted = {name: [fit(column) for column in columns] for name, columns in samples.items()}
        for _ in range(2):  # tokens are products of heights and widths, and rows of tokens products of these
            parts = (d for dims in fitted.values() for d in dims if d and (d.divisor != 1 or d.quotients))
            quotients = list(dict.fromkeys(parts))[:_MOST_QUOTIENTS]
            for name, dims in fitted.items():
                pairs = zip(dims, samples[name], strict=True)
                fitted[name] = [d or fit(column, quotients) for d, column in pairs]
        found: dict[str, list[Dim] | None] = {}
        for name, dims in fitted.items():
            known = [d for d in dims if d is not None]
            found[name] = known if len(known) == len(dims) and len(ranks[name]) == 1 else None
        for name, tensor in self.graph.weights.items():
            found[name] = [Dim(offset=int(d)) for d in tensor.shape.numpy()]
        return found


def plain_session(model: Path | bytes, what: str, *, optimised: bool = False, weights: Path | None = None) -> Any:
    """A session that does what the graph says, node by node unless optimised.

    weights: the folder of external weights, for a model in bytes. Raises ExportError if ONNX Runtime can't load it.
    """
    ort = onnxruntime()
    options = ort.SessionOptions()
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if weights is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimised:  # it runs a few times: packing every matrix for that would hold the weights once more
        options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        given = model if isinstance(model, bytes) else str(model)
        return ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(f"ONNX Runtime can't load {what}: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """An error's message without its line breaks, which ONNX Runtime is free with."""
    return " ".join(str(error).split())


def _close(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.dtype.kind != "f":
        return np.array_equal(a, b)
    spread = max(1.0, float(np.abs(a[np.isfinite(a)]).max(initial=0.0)))
    few = 2e-2 if a.dtype == np.float16 else 1e-4  # a batch of another size is added up in another order
    return bool(np.allclose(a.astype(np.float64), b, rtol=few, atol=few * spread, equal_nan=True))


def batch_axis(dims: list[Dim] | None) -> int | None:
    """The one axis that is plainly the batch; None if there is none, or another size involves the batch too."""
    if dims is None:
        return None
    touched = [k for k, dim in enumerate(dims) if "batch" in dim.involved]
    return touched[0] if len(touched) == 1 and dims[touched[0]].plain == "batch" else None


def element_bytes(dtype: ir.DataType) -> int:
    return max(1, dtype.bitwidth // 8) if dtype != ir.DataType.STRING else 16
