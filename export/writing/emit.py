"""Blocks as ONNX graphs: their operations, sizes asked anew of what the block receives, and the exit gate."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from offramp.export.dims import Dim
from offramp.export.graph import ModelGraph, Op
from offramp.export.partition import BlockPlan
from offramp.export.writing.gate_nodes import gate_inputs, gate_nodes
from offramp.export.writing.short_names import shorten
from offramp.export.writing.weights import WeightFile
from offramp.runtime.errors import ExportError
from onnx import helper, numpy_helper

Shapes = dict[str, list[Dim] | None]


def dimensions(dims: list[Dim] | None) -> list[int | str] | None:
    """Sizes as a manifest or an ONNX value states them: numbers, axis names, or formulas."""
    if dims is None:
        return None
    return [d.constant if d.constant is not None else str(d) for d in dims]


class BlockWriter:
    """Writes blocks of one model over its shared weight file."""

    def __init__(self, graph: ModelGraph, shapes: Shapes, store: WeightFile) -> None:
        self._graph = graph
        self._shapes = shapes
        self._store = store

    def proto(
        self,
        ops: list[Op],
        inputs: list[str],
        outputs: list[str],
        gate: tuple[str, str, str, int],
        *,
        plain: bool = False,
    ) -> onnx.ModelProto:
        """One graph. gate: (logits, label, score, classes). plain: a gate without scale, bias and temperature."""
        made = {name for op in ops for name in op.outputs}
        there = made | set(inputs)
        nodes: list[onnx.NodeProto] = []
        constants: dict[str, onnx.TensorProto] = {}
        for op in ops:
            if op.proto.op_type == "Shape" and op.inputs[0] not in there and op.inputs[0] not in self._graph.weights:
                nodes += self._sizes(op, inputs, constants)
            else:
                nodes.append(op.proto)
                for name in op.inputs:
                    if name in self._graph.weights:
                        constants[name] = self._store.initializer(name)
        for name in outputs:
            if name not in made:  # an output that is an input or a weight as it stands
                nodes.append(helper.make_node("Identity", [name], [name]))
        value_inputs = [self._value(name) for name in inputs]
        value_outputs = [self._value(name) for name in outputs]
        logits, label, score, classes = gate
        extra, more = gate_nodes(logits, self._graph.dtypes[logits].value, classes, label, score, plain=plain)
        nodes += extra
        constants |= {c.name: c for c in more}
        value_inputs += [] if plain else gate_inputs(classes)
        value_outputs += [
            helper.make_tensor_value_info(label, onnx.TensorProto.INT64, ["batch"]),
            helper.make_tensor_value_info(score, onnx.TensorProto.FLOAT, ["batch"]),
        ]
        body = helper.make_graph(
            nodes,
            "block",
            value_inputs,
            value_outputs,
            list(constants.values()),
            value_info=self._graph.half_values(set(op.outputs) - set(outputs) for op in ops),
        )
        shorten(body, weights=False)  # nodes and weights stay what the model calls them, for whoever reads an error
        return helper.make_model(
            body,
            producer_name="offramp",
            ir_version=self._graph.ir_version,
            opset_imports=[helper.make_opsetid(d, v) for d, v in self._graph.opsets.items()],
        )

    def _value(self, name: str) -> onnx.ValueInfoProto:
        if name in self._graph.inputs:
            given, shape = self._graph.inputs[name]
            return helper.make_tensor_value_info(name, given.value, shape)
        dtype = self._graph.dtypes.get(name)
        if dtype is None:
            raise ExportError(f"the type of {name!r} is unknown: ONNX shape inference doesn't reach it.")
        return helper.make_tensor_value_info(name, dtype.value, dimensions(self._shapes.get(name)))

    def _sizes(self, op: Op, inputs: list[str], constants: dict[str, onnx.TensorProto]) -> list[onnx.NodeProto]:
        """A Shape of a tensor that isn't here, put together from the sizes of tensors that are."""
        dims = self._shapes[op.inputs[0]] or []
        bounds = {a.name: a.i for a in op.proto.attribute}
        dims = dims[slice(bounds.get("start", 0), bounds.get("end"))]
        out = op.outputs[0]
        nodes: list[onnx.NodeProto] = []

        def constant(value: int) -> str:
            name = f"{out}.int.{value}"
            constants[name] = numpy_helper.from_array(np.array([value], np.int64), name)
            return name

        def node(kind: str, *names: str, **attributes: Any) -> str:
            made = f"{out}.{kind.lower()}.{len(nodes)}"
            nodes.append(helper.make_node(kind, list(names), [made], **attributes))
            return made

        def size(axis: str) -> str:
            for name in inputs:
                for k, dim in enumerate(self._shapes[name] or []):
                    if dim.plain == axis:
                        return node("Shape", name, start=k, end=k + 1)
            raise ExportError(f"no tensor that reaches the block of {out!r} has the axis {axis!r}.")

        def value(dim: Dim) -> str:
            if dim.constant is not None:
                return constant(dim.constant)
            term, *others = [*(size(axis) for axis in dim.axes), *(value(q) for q in dim.quotients)]
            for other in others:
                term = node("Mul", term, other)
            if dim.factor != 1:
                term = node("Mul", term, constant(dim.factor))
            if dim.offset:
                term = node("Add", term, constant(dim.offset))
            if dim.divisor != 1:
                term = node("Div", term, constant(dim.divisor))
            return term

        parts = [value(dim) for dim in dims]
        if len(parts) == 1 and nodes:
            nodes[-1].output[0] = out
        else:
            nodes.append(helper.make_node("Concat", parts, [out], axis=0))
        return nodes

    def params(self, ops: Iterable[Op]) -> int:
        """Floating-point weight elements that the operations use, each once."""
        names = {n for op in ops for n in op.inputs if n in self._graph.weights}
        weights = self._graph.weights
        return sum(weights[n].size for n in names if weights[n].dtype.is_floating_point())


def numpy_name(dtype: ir.DataType) -> str:
    return str(dtype.numpy().name)


def block_interface(plan: BlockPlan, logits: str) -> list[str]:
    """Outputs of a block's graph before the gate's: carried state, logits, auxiliary outputs, each once."""
    return list(dict.fromkeys([*plan.carried, logits, *plan.auxiliary]))
