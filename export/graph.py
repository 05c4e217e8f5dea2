"""A model as the partitioner sees it: named operations in order, weights apart, subgraph captures explicit."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import onnx
import onnx_ir as ir
from offramp.export.outputs import Outputs
from offramp.export.rewriting.unstack import unstack
from offramp.runtime.errors import ExportError
from onnx_ir.passes import common as passes

# The gate's reductions take their axes as inputs from here on; older models are converted up.
OLDEST_OPSET = 18
# The shape of what these make depends on values, not on sizes.
DATA_SIZED = frozenset(["NonZero", "Unique", "Compress", "NonMaxSuppression", "Loop", "If", "Scan"])


@dataclass(frozen=True)
class Op:
    """One node of the main graph. `inputs` includes what its subgraphs capture.

    fixed: it is made of weights only, so ONNX Runtime runs it once, when it loads the graph.
    """

    index: int
    proto: onnx.NodeProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fixed: bool = False


@dataclass
class ModelGraph:
    """A whole multi-exit model. `axes[input][k]` names the symbolic axes; every one includes "batch"."""

    ops: list[Op]
    inputs: dict[str, tuple[ir.DataType, list[int | str]]]
    weights: dict[str, ir.TensorProtocol]
    outputs: Outputs
    opsets: dict[str, int]
    ir_version: int
    dtypes: dict[str, ir.DataType]

    @cached_property
    def producer(self) -> dict[str, Op]:
        return {name: op for op in self.ops for name in op.outputs}

    @cached_property
    def axes(self) -> list[str]:
        """Symbolic axes, "batch" first."""
        named = (a for _, shape in self.inputs.values() for a in shape if isinstance(a, str))
        return list(dict.fromkeys(["batch", *named]))

    def half_values(self, made: Iterable[Iterable[str]]) -> list[onnx.ValueInfoProto]:
        """The types of the values made, where any value of the model is float16; nothing otherwise.

        ONNX Runtime has no CPU kernels for many float16 operations and puts casts around them: where it had to find
        the types by itself, that ended in a crash.
        """
        if ir.DataType.FLOAT16 not in self.dtypes.values():
            return []
        return [
            onnx.helper.make_tensor_value_info(name, self.dtypes[name].value, None)
            for names in made
            for name in names
            if name in self.dtypes
        ]

    def ancestors(self, names: Iterable[str], stop: frozenset[int] | set[int] = frozenset()) -> set[int]:
        """Indices of the ops that the named values need, not looking behind those in `stop`."""
        found: set[int] = set()
        waiting = list(names)
        while waiting:
            op = self.producer.get(waiting.pop())
            if op is None or op.index in found or op.index in stop:
                continue
            found.add(op.index)
            waiting.extend(op.inputs)
        return found


def captured(graph: onnx.GraphProto) -> set[str]:
    """Names that a subgraph uses but doesn't define."""
    known = {i.name for i in graph.input} | {i.name for i in graph.initializer}
    free: set[str] = set()
    for node in graph.node:
        free |= {name for name in _uses(node) if name not in known}
        known |= set(node.output)
    return free | {o.name for o in graph.output if o.name not in known}


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def _uses(node: onnx.NodeProto) -> list[str]:
    names = [name for name in node.input if name]
    for graph in subgraphs(node):
        names.extend(sorted(captured(graph)))
    return list(dict.fromkeys(names))


def read_onnx(path: Path) -> ir.Model:
    """An ONNX file as an IR model, converted to an opset the gate's nodes exist in."""
    model = _read(path)
    for node in model.graph:
        if _learns(node):
            raise ExportError(
                f"{path}: the node {node.name or node.outputs[0].name!r} ({node.op_type}) is in training mode. "
                "Export the model to ONNX in evaluation mode."
            )
    return model


def _read(path: Path) -> ir.Model:
    try:
        shell = onnx.load(path, load_external_data=False)
        version = max((o.version for o in shell.opset_import if o.domain in ("", "ai.onnx")), default=OLDEST_OPSET)
        maps = any(node.op_type == "ZipMap" for node in shell.graph.node)
        if version >= OLDEST_OPSET and not maps:
            return ir.load(path)
        whole = _without_maps(onnx.load(path))
        return ir.from_proto(onnx.version_converter.convert_version(whole, max(version, OLDEST_OPSET)))
    except Exception as error:  # protobuf, onnx and its C++ checker each raise their own kinds
        raise ExportError(f"{path}: not an ONNX model that can be read ({error}).") from error


def _without_maps(model: onnx.ModelProto) -> onnx.ModelProto:
    """scikit-learn's converters give probabilities as a list of mappings: here as the tensor that those are made of."""
    for node in [node for node in model.graph.node if node.op_type == "ZipMap"]:
        for output in model.graph.output:
            if output.name == node.output[0]:
                output.CopyFrom(onnx.helper.make_tensor_value_info(node.input[0], onnx.TensorProto.FLOAT, [None, None]))
        model.graph.node.remove(node)
    return model


def _learns(node: ir.Node) -> bool:
    """Is it a normalisation over the batch, or a dropout, that is told to behave as in training?"""
    if node.op_type == "BatchNormalization":
        mode = node.attributes.get("training_mode")
        return mode is not None and bool(mode.as_int())
    if node.op_type == "Dropout" and len(node.inputs) > 2 and node.inputs[2] is not None:
        value = ir.convenience.get_const_tensor(node.inputs[2])
        return value is not None and bool(value.numpy())
    return False


def prepare(
    model: ir.Model, outputs: Outputs, dynamic_axes: Mapping[str, Mapping[int, str]] | None = None
) -> ModelGraph:
    """Inline functions, lift constants, name every value, and take the model apart into named operations.

    dynamic_axes: names for the inputs' symbolic axes; without it, those the model itself declares, its
    first input's axis 0 being the batch.
    """
    for step in (
        passes.InlinePass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.RemoveInitializersFromInputsPass(),
        _unstacked,
        passes.CommonSubexpressionEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.NameFixPass(),
        passes.TopologicalSortPass(),
    ):
        result = step(model)
        model = result.model if hasattr(result, "model") else model
    try:
        model = passes.ShapeInferencePass(check_type=False, strict_mode=False)(model).model
    except Exception as error:
        raise ExportError(f"ONNX shape inference fails on the model: {error}") from error
    graph = model.graph
    missing = [name for name in outputs.names if name not in {v.name for v in graph.outputs}]
    if missing:
        raise ExportError(f"the model has no output {missing[0]!r}; it has {[v.name for v in graph.outputs]}.")
    ops = []
    fixed = set(graph.initializers)
    for index, node in enumerate(graph):
        proto = ir.serde.serialize_node(node)
        del proto.metadata_props[:]
        proto.doc_string = ""
        inputs, made = _uses(proto), tuple(name for name in proto.output if name)
        of_weights = bool(inputs) and fixed.issuperset(inputs)
        ops.append(Op(index, proto, tuple(inputs), made, of_weights))
        fixed |= set(made) if of_weights else set()
    dtypes = {
        v.name: v.dtype
        for node in graph
        for v in node.outputs
        if v.name and v.dtype is not None and isinstance(v.type, ir.TensorType)
    }
    weights: dict[str, ir.TensorProtocol] = {}
    for name, value in graph.initializers.items():
        if value.const_value is None:
            raise ExportError(f"the initialiser {name!r} has no value.")
        weights[name] = value.const_value
    return ModelGraph(
        ops=ops,
        inputs=_inputs(graph, dynamic_axes),
        weights=weights,
        outputs=outputs,
        opsets=dict(model.opset_imports),
        ir_version=model.ir_version,
        dtypes=dtypes,
    )


def _unstacked(model: ir.Model) -> ir.Model:
    unstack(model.graph)
    return model


def _inputs(
    graph: ir.Graph, dynamic_axes: Mapping[str, Mapping[int, str]] | None
) -> dict[str, tuple[ir.DataType, list[int | str]]]:
    found: dict[str, tuple[ir.DataType, list[int | str]]] = {}
    batch: set[str] = set()
    for value in graph.inputs:
        if value.shape is None or value.dtype is None or not value.name:
            raise ExportError(f"input {value.name!r} has no shape or type: expected a tensor of known rank.")
        shape: list[int | str] = []
        for k, size in enumerate(value.shape):
            if dynamic_axes is not None:
                named: int | str | None = dynamic_axes.get(value.name, {}).get(k)
                if named is None:
                    if not isinstance(size, int):
                        raise ExportError(
                            f"input {value.name!r}: axis {k} is symbolic but dynamic_axes has no name for it."
                        )
                    named = size
            elif isinstance(size, int):
                named = size
            else:
                # What stands first is the batch, whatever each input calls it.
                called = size.value or f"{value.name}_axis_{k}"
                batch |= {called} if k == 0 else set()
                named = "batch" if called in batch else re.sub(r"\W", "_", called, flags=re.ASCII)
            shape.append(named)
        if shape.count("batch") != 1:
            raise ExportError(
                f'input {value.name!r} has the shape {shape}: expected one axis named "batch". '
                "Give dynamic_axes, or export the model with a dynamic batch."
            )
        found[value.name] = (value.dtype, shape)
    return found
