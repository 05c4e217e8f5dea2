"""Exits of an ONNX file as logits: an inner tensor, what a Softmax was taken of, two columns for one logit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from offramp.runtime.errors import ExportError

_SAME = ("Identity", "Dropout")


@dataclass(frozen=True)
class Head:
    """One exit: the tensor of the file that has its logits, and the graph's output that is made of it.

    binary: the tensor is one logit z, which says yes or no, and the output has the columns 0 and z, the softmax of
    which is z's sigmoid.
    """

    tensor: str
    output: str
    binary: bool = False


def take_heads(graph: ir.Graph, exits: Sequence[str], there: Iterable[str]) -> list[Head]:
    """Make the graph's outputs of these exits logits, in place. there: names of tensors that the file has.

    Raises ExportError for a name that the graph hasn't, and for the sigmoids of several columns.
    """
    values = {v.name: v for v in graph.inputs} | {v.name: v for node in graph for v in node.outputs}
    known, heads = set(there), []
    for name in exits:
        if name not in values:
            raise ExportError(
                f"the ONNX model has no output {name!r}, nor a tensor of that name; its outputs are "
                f"{[v.name for v in graph.outputs]}."
            )
        value = values[name]
        last = _last(value)
        before = last.inputs[0] if last is not None and last.inputs else None
        if last is None or before is None or before.name not in known:
            head = Head(name, name)
        elif last.op_type == "Softmax" and _over_the_last_axis(last, value):
            head = Head(str(before.name), str(before.name))
        elif last.op_type == "Sigmoid" and value.shape is not None:
            if len(value.shape) == 2 and value.shape[1] != 1:
                raise ExportError(
                    f"exit {name!r} ends in a Sigmoid over {value.shape[1]} columns, as multi-label models do: offramp "
                    f"answers with one class a row. If only one of them can be right, name {before.name!r} as the exit."
                )
            head = Head(str(before.name), f"{name}.logits", binary=True)
            _add_two_columns(graph, before, head.output)
        else:
            head = Head(name, name)
        heads.append(head)
    for head in heads:
        if head.output not in {v.name for v in graph.outputs}:
            graph.outputs.append(values[head.output])
    return heads


def likely_exits(graph: ir.Graph) -> list[str]:
    """The outputs that may be exits: floats of two axes, or of an unknown number; scikit-learn's label is none."""
    found = [
        str(v.name)
        for v in graph.outputs
        if (v.dtype is None or v.dtype.is_floating_point()) and (v.shape is None or len(v.shape) in (1, 2))
    ]
    columns = [v for v in found if (shape := _value(graph, v).shape) is None or len(shape) == 2]
    return columns or found or [str(v.name) for v in graph.outputs]


def said(heads: Sequence[Head]) -> list[str]:
    """What the exits of a file were made of, in sentences."""
    notes = []
    if any(head.binary for head in heads):
        notes.append(
            "the file's exits are one logit z, which says yes or no: they were made two columns, 0 for class 0 and z "
            "for class 1."
        )
    return notes


def _value(graph: ir.Graph, name: str) -> ir.Value:
    return next(v for v in graph.outputs if v.name == name)


def _last(value: ir.Value) -> ir.Node | None:
    """The operation that makes a value, those that hand on what they get left out."""
    node = value.producer()
    while node is not None and (node.op_type in _SAME or _rounds(node)) and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node


def _rounds(node: ir.Node) -> bool:
    """Is it a Cast from one floating-point type to another, as files of float16 end in?"""
    kinds = [value.dtype if value is not None else None for value in (*node.inputs, *node.outputs)]
    return node.op_type == "Cast" and all(kind is not None and kind.is_floating_point() for kind in kinds)


def _over_the_last_axis(node: ir.Node, value: ir.Value) -> bool:
    axis = node.attributes.get("axis")
    last = -1 if axis is None else axis.as_int()
    return last == -1 or (value.shape is not None and last == len(value.shape) - 1)


def _add_two_columns(graph: ir.Graph, z: ir.Value, name: str) -> None:
    """`name` is a column of zeros, and z beside it."""

    def constant(what: str, values: list[int]) -> ir.Value:
        tensor = ir.tensor(np.array(values, np.int64), name=f"{name}.{what}")
        value = ir.Value(
            name=tensor.name, shape=ir.Shape([len(values)]), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        graph.register_initializer(value)
        return value

    column = ir.node("Reshape", inputs=[z, constant("column", [-1, 1])])
    both = ir.node("Pad", inputs=[column.outputs[0], constant("zeros", [0, 1, 0, 0])])
    column.outputs[0].name, both.outputs[0].name = f"{name}.z", name
    both.outputs[0].type = z.type
    graph.extend([column, both])
    graph.outputs.append(both.outputs[0])
