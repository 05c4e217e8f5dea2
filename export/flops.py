"""What operations cost, as formulas: FLOPs as torch's FlopCounterMode counts them (matmul, conv, attention)."""

from collections.abc import Callable, Iterable, Mapping
from math import prod

import onnx
from offramp.export.dims import Cost, Dim
from offramp.export.graph import Op

Shapes = Mapping[str, list[Dim] | None]


def flops(ops: Iterable[Op], shapes: Shapes) -> Cost:
    """FLOPs of the operations: two for each multiply-add of a contraction, none for the rest.

    None for what is made of weights only, either: no row pays for it.
    """
    total = Cost()
    for op in ops:
        count = _counter(op)
        if count is not None and not op.fixed:
            count(op.proto, shapes, total)
    return total


def uncounted(ops: Iterable[Op], shapes: Shapes) -> list[Op]:
    """The contractions of which a size is unknown: `flops` counts nothing for them."""
    return [
        op
        for op in ops
        if is_contraction(op) and not op.fixed and any(shapes.get(name) is None for name in _counted_by(op))
    ]


def _counted_by(op: Op) -> list[str]:
    """The values whose sizes an operation's FLOPs are made of."""
    by_output = _counter(op) in (_matmul, _gemm, _conv, _packed_attention)
    return [*op.proto.input[:2], *op.proto.output[: int(by_output)]]


def is_contraction(op: Op) -> bool:
    return _counter(op) is not None


def _counter(op: Op) -> Callable[[onnx.NodeProto, Shapes, Cost], None] | None:
    if op.proto.domain == "com.microsoft" and op.proto.op_type == "Attention":
        return _packed_attention
    return _COUNTERS.get(op.proto.op_type)


def attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    for a in node.attribute:
        if a.name == name:
            return int(a.i)
    return default


def _matmul(node: onnx.NodeProto, shapes: Shapes, total: Cost) -> None:
    left, out = shapes.get(node.input[0]), shapes.get(node.output[0])
    if left and out is not None:
        total.add(2, *out, left[-1])


def _gemm(node: onnx.NodeProto, shapes: Shapes, total: Cost) -> None:
    left, out = shapes.get(node.input[0]), shapes.get(node.output[0])
    if left and out is not None:
        total.add(2, *out, left[0] if attribute(node, "transA", 0) else left[1])


def _conv(node: onnx.NodeProto, shapes: Shapes, total: Cost) -> None:
    weight = shapes.get(node.input[3] if node.op_type == "QLinearConv" else node.input[1])
    out = shapes.get(node.output[0])
    if weight and out is not None:
        total.add(2, *out, *weight[1:])  # a weight is (out, in / group, *kernel)


def _conv_transpose(node: onnx.NodeProto, shapes: Shapes, total: Cost) -> None:
    data, weight = shapes.get(node.input[0]), shapes.get(node.input[1])
    if data and weight:
        total.add(2, *data, *weight[1:])  # a weight is (in, out / group, *kernel)


def _einsum(node: onnx.NodeProto, shapes: Shapes, total: Cost) -> None:
    equation = next(a.s.decode() for a in node.attribute if a.name == "equation").replace(" ", "")
    sizes: dict[str, Dim] = {}
    for letters, name in zip(equation.partition("->")[0].split(","), node.input, strict=False):
        dims = shapes.get(name)
        if dims is None or "." in letters:
            return
        sizes.update(zip(letters, dims, strict=False))
    total.add(2, *sizes.values())


def _attention(node: onnx.NodeProto, shapes: Shapes, total: Cost) -> None:
    query, key = shapes.get(node.input[0]), shapes.get(node.input[1])
    if not query or not key or len(query) not in (3, 4):
        return
    # Q K' and A V: 2 * batch * heads * length * keys * head size, twice; heads * head size = width.
    if len(query) == 4:
        total.add(4, *query, key[2])
    else:
        total.add(4, *query, key[1])


def _packed_attention(node: onnx.NodeProto, shapes: Shapes, total: Cost) -> None:
    """ONNX Runtime's Attention: (batch, length, width) times (width, 3 * hidden), then attention over the length."""
    data, weight, out = (shapes.get(name) for name in (node.input[0], node.input[1], node.output[0]))
    if data and weight and out is not None:
        total.add(2, *data, weight[1])
        total.add(4, *out, data[1])


def _recurrent(node: onnx.NodeProto, shapes: Shapes, total: Cost) -> None:
    data, weight, recurrence = (shapes.get(name) for name in node.input[:3])
    if data and weight and recurrence:
        for matrix in (
            weight,
            recurrence,
        ):  # (directions, gates * hidden, in) at each of length * batch steps
            total.add(2, data[0], data[1], *matrix)


_COUNTERS = {
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "QLinearMatMul": _matmul,
    "FusedMatMul": _matmul,
    "Gemm": _gemm,
    "FusedGemm": _gemm,
    "Conv": _conv,
    "FusedConv": _conv,
    "ConvInteger": _conv,
    "QLinearConv": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "Attention": _attention,
    "MultiHeadAttention": _attention,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
}


def at(dims: Iterable[Dim], sizes: Mapping[str, int]) -> int:
    """Elements of a tensor of these dims at the given axis sizes."""
    return prod(d.at(sizes) for d in dims)
