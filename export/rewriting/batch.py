"""A file made for one row at a time takes any number of them."""

import numpy as np
import onnx_ir as ir


def free_batch(graph: ir.Graph) -> bool:
    """Let axis 0 of the inputs vary, in place, if it is 1 in all of them; whether it was.

    A reshape to [1, …] keeps the batch. Whether the graph's rows are independent of each other then is for whoever
    compares it with the file, row by row.
    """
    shapes = [value.shape for value in graph.inputs]
    if not all(shape is not None and len(shape) and shape[0] == 1 for shape in shapes):
        return False
    for value, shape in zip(graph.inputs, shapes, strict=True):
        value.shape = ir.Shape(["batch", *list(shape or [])[1:]])
    for node in graph:
        for value in node.outputs:
            value.shape = None
        if node.op_type == "Reshape" and node.inputs[1] is not None:
            _keep_rows(graph, node)
    return True


def _keep_rows(graph: ir.Graph, node: ir.Node) -> None:
    target = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
    sizes = [] if target is None else target.numpy().tolist()
    if len(sizes) < 2 or sizes[0] != 1:
        return
    name = f"{node.outputs[0].name}.shape"
    tensor = ir.tensor(np.array([0, *sizes[1:]], np.int64), name=name)
    value = ir.Value(name=name, shape=ir.Shape([len(sizes)]), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    node.replace_input_with(1, value)
