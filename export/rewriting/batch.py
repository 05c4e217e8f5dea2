"""A file made for a fixed number of rows takes any number of them."""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from offramp.export.rewriting.quiet import quietly

# What takes a single row beside any number of them.
_BROADCAST = frozenset(["Add", "Sub", "Mul", "Div", "Where", "Equal", "Less", "Greater", "And", "Or", "Max", "Min"])


def free_batch(model: ir.Model) -> int | None:
    """Let axis 0 of the inputs vary, in place, if it is the same number in all of them; that number, None if it isn't.

    What the exporter has written down for so many rows is said of any number: sizes in reshapes and expansions, and
    constants that are the same for every row. Whether the graph's rows are independent of each other then is for
    whoever compares it with the file.
    """
    graph = model.graph
    shapes = [value.shape for value in graph.inputs]
    first = {shape[0] if shape is not None and len(shape) else None for shape in shapes}
    rows = first.pop() if len(first) == 1 else None
    outputs = [value.shape for value in graph.outputs if value.shape is not None and len(value.shape) == 2]
    if not isinstance(rows, int) or any(isinstance(shape[0], int) and shape[0] != rows for shape in outputs):
        return None
    for value, shape in zip(graph.inputs, shapes, strict=True):
        value.shape = ir.Shape(["batch", *list(shape or [])[1:]])
    leading = {}
    for node in graph:
        for value in node.outputs:
            leading[value.name] = value.shape[0] if value.shape is not None and len(value.shape) else None
            value.shape = None
    _fold(model)
    count = _count(graph)
    for node in list(graph):
        if node.op_type == "Reshape":
            _keep_rows(graph, node, rows, leading)
        elif node.op_type == "Expand":
            _expand_to(graph, node, rows, count)
        elif node.op_type == "Concat" and node.attributes["axis"].as_int() != 0:
            _repeat(graph, node, rows, count)
        elif node.op_type in _BROADCAST and rows > 1:
            for k, given in enumerate(node.inputs):
                if given is not None and (one := _one_of(given, rows)) is not None:
                    node.replace_input_with(k, _weight(graph, f"{node.outputs[0].name}.{k}", one))
    return rows


def _fold(model: ir.Model) -> None:
    """Sizes and tokens that older exporters compute from constants become constants."""
    from onnxscript.optimizer import fold_constants

    with quietly("onnxscript"):
        # By itself it leaves ConstantOfShape, from which torch's older exporter takes the sizes of an expansion.
        fold_constants(model, should_fold=lambda node: True if node.op_type == "ConstantOfShape" else None)


def _count(graph: ir.Graph) -> ir.Value:
    """How many rows there are, as a value [1]."""
    node = ir.node("Shape", inputs=[graph.inputs[0]], attributes={"start": 0, "end": 1})
    node.outputs[0].name = f"{graph.inputs[0].name}.rows"
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.INT64), ir.Shape([1])
    if len(graph):
        graph.insert_before(graph[0], node)
    return node.outputs[0]


def _keep_rows(graph: ir.Graph, node: ir.Node, rows: int, leading: Mapping[str | None, object]) -> None:
    """A first size that is a number of rows becomes the one that is left, or that of the input.

    leading: first sizes of values, as the file had them.
    """
    sizes = _integers(node.inputs[1])
    if len(sizes) < 2 or sizes[0] <= 0 or sizes[0] % rows:
        return
    given = leading.get(node.inputs[0].name if node.inputs[0] is not None else None)
    rest = sizes[1:]
    literal = node.attributes.get("allowzero")
    if literal is not None and literal.as_int() and 0 in rest:
        return
    if -1 not in rest:
        first = -1
    elif sizes[0] == rows and given in (None, rows):
        first = 0
    else:
        return
    node.attributes.pop("allowzero", None)
    node.replace_input_with(1, _weight(graph, f"{node.outputs[0].name}.shape", np.array([first, *rest], np.int64)))


def _expand_to(graph: ir.Graph, node: ir.Node, rows: int, count: ir.Value) -> None:
    """What is repeated for so many rows is repeated for those that there are."""
    sizes = _integers(node.inputs[1])
    if len(sizes) > 1 and sizes[0] == rows:
        rest = _weight(graph, f"{node.outputs[0].name}.rest", np.array(sizes[1:], np.int64))
        node.replace_input_with(1, _joined(graph, node, [count, rest]))


def _repeat(graph: ir.Graph, node: ir.Node, rows: int, count: ir.Value) -> None:
    """A constant beside the rows, a class token for instance, is made as often as there are rows."""
    for k, value in enumerate(node.inputs):
        one = None if value is None else _one_of(value, rows)
        if one is None or one.ndim < 2 or all(v is None or v.const_value is not None for v in node.inputs):
            continue
        name = f"{node.outputs[0].name}.{k}"
        rest = _weight(graph, f"{name}.rest", np.array(one.shape[1:], np.int64))
        sizes = _joined(graph, node, [count, rest], name)
        many = ir.node("Expand", inputs=[_weight(graph, f"{name}.one", one), sizes])
        many.outputs[0].name, many.outputs[0].type = f"{name}.many", node.inputs[k].type  # type: ignore[union-attr]
        graph.insert_before(node, many)
        node.replace_input_with(k, many.outputs[0])


def _joined(graph: ir.Graph, before: ir.Node, parts: list[ir.Value], name: str = "") -> ir.Value:
    node = ir.node("Concat", inputs=parts, attributes={"axis": 0})
    node.outputs[0].name = f"{name or before.outputs[0].name}.sizes"
    node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    graph.insert_before(before, node)
    return node.outputs[0]


def _one_of(value: ir.Value, rows: int) -> np.ndarray | None:
    """What a constant holds for each row, with its first axis; None where it isn't the same for all, or no constant."""
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or len(tensor.shape) < 2 or tensor.shape[0] != rows:
        return None
    values = tensor.numpy()
    return values[:1] if (values[:1] == values).all() else None


def _integers(value: ir.Value | None) -> list[int]:
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return [] if tensor is None else [int(v) for v in tensor.numpy().reshape(-1)]


def _weight(graph: ir.Graph, name: str, values: np.ndarray) -> ir.Value:
    tensor = ir.tensor(values, name=name)
    value = ir.Value(name=name, shape=ir.Shape(values.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value
