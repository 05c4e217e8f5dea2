"""Exits that were stacked into one tensor and are taken out of it again: each is what went in.

The stack waits for the deepest exit: unless it is seen through, the first block is the whole network.
"""

import onnx_ir as ir


def unstack(graph: ir.Graph) -> None:
    """Let what is taken out of a stack be what was put into it, in place; nodes that nobody uses then stay behind."""
    for node in list(graph):
        parts = _parts(node)
        if parts is None:
            continue
        axis, inside = parts
        for user, _ in list(node.outputs[0].uses()):
            for taken, k in _taken(user, axis, len(inside)):
                if user.op_type == "Gather":
                    _is(graph, taken, inside[k])
                    continue
                for squeeze, _ in list(taken.uses()):
                    if squeeze.op_type == "Squeeze" and _integers(squeeze, 1) == [axis]:
                        _is(graph, squeeze.outputs[0], inside[k])


def _parts(node: ir.Node) -> tuple[int, list[ir.Value]] | None:
    """The axis along which a node stacks values, and these."""
    if node.op_type != "Concat" or node.domain:
        return None
    axis, inside = node.attributes["axis"].as_int(), []
    for value in node.inputs:
        maker = None if value is None else value.producer()
        if maker is None or maker.op_type != "Unsqueeze" or _integers(maker, 1) != [axis] or maker.inputs[0] is None:
            return None
        inside.append(maker.inputs[0])
    return axis, inside


def _taken(user: ir.Node, axis: int, count: int) -> list[tuple[ir.Value, int]]:
    """What a node takes out of a stack of so many: its outputs, and which part each is."""
    if user.op_type == "Split" and _axis(user) == axis and len(user.outputs) == count:
        return [(value, k) for k, value in enumerate(user.outputs)]
    if user.op_type == "Gather" and _axis(user) == axis:
        index = _constant(user, 1)
        if index is not None and index.shape == ir.Shape([]):
            return [(user.outputs[0], int(index.numpy()) % count)]
    if user.op_type == "Slice" and _integers(user, 3) in ([axis], None) and _integers(user, 4) in ([1], None):
        start, end = _integers(user, 1), _integers(user, 2)
        if start and end and len(start) == 1 and end[0] == start[0] + 1 and (axis == 0 or _integers(user, 3)):
            return [(user.outputs[0], start[0])] if 0 <= start[0] < count else []
    return []


def _axis(node: ir.Node) -> int:
    given = node.attributes.get("axis")
    return 0 if given is None else given.as_int()


def _constant(node: ir.Node, k: int) -> ir.TensorProtocol | None:
    value = node.inputs[k] if len(node.inputs) > k else None
    return None if value is None else ir.convenience.get_const_tensor(value)


def _integers(node: ir.Node, k: int) -> list[int] | None:
    """Input k, if it is constant."""
    tensor = _constant(node, k)
    return None if tensor is None else [int(v) for v in tensor.numpy().reshape(-1)]


def _is(graph: ir.Graph, old: ir.Value, source: ir.Value) -> None:
    """`old` is `source` from now on, wherever it was read."""
    node = ir.node("Identity", inputs=[source])
    new = node.outputs[0]
    new.name, new.type, new.shape = old.name, old.type, old.shape
    old.name = f"{old.name}.stacked"
    maker = old.producer()
    if maker is not None:
        graph.insert_before(maker, node)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
