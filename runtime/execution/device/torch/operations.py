"""ONNX operations as torch does them: one function an operation, on whatever device its tensors are.

A function takes (inputs, attributes, device); inputs that ONNX leaves out are None. Inputs listed in `ON_HOST` are
numbers that shape the computation (axes, sizes, counts): they come as CPU tensors, so that reading them never waits
for a device.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Inputs = Sequence[Any]
Attributes = Mapping[str, Any]
Operation = Callable[[Inputs, Attributes, torch.device], Any]

OPERATIONS: dict[tuple[str, str], Operation] = {}
ON_HOST: dict[tuple[str, str], tuple[int, ...]] = {}
MICROSOFT = "com.microsoft"

# By ONNX's numbers (TensorProto.DataType).
DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}


class Unsupported(Exception):
    """An operation, or a form of it, that this module doesn't have."""


def operation(*names: str, domain: str = "", host: tuple[int, ...] = ()) -> Callable[[Operation], Operation]:
    """Register a function for ONNX operations; host: positions of inputs that shape the computation."""

    def put(function: Operation) -> Operation:
        for name in names:
            OPERATIONS[domain, name] = function
            if host:
                ON_HOST[domain, name] = host
        return function

    return put


def ints(value: Tensor | None) -> list[int] | None:
    """A host tensor's integers."""
    return None if value is None else [int(v) for v in value.reshape(-1).tolist()]


def _simple(name: str, function: Callable[..., Any], domain: str = "") -> None:
    OPERATIONS[domain, name] = lambda x, a, d: function(*x)


# ------------------------------------------------------------------ elementwise

_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Abs": torch.abs,
    "Sign": torch.sign,
    "Exp": torch.exp,
    "Log": torch.log,
    "Sqrt": torch.sqrt,
    "Reciprocal": torch.reciprocal,
    "Floor": torch.floor,
    "Ceil": torch.ceil,
    "Round": torch.round,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Tan": torch.tan,
    "Asin": torch.asin,
    "Acos": torch.acos,
    "Atan": torch.atan,
    "Sinh": torch.sinh,
    "Cosh": torch.cosh,
    "Tanh": torch.tanh,
    "Erf": torch.erf,
    "Sigmoid": torch.sigmoid,
    "Relu": torch.relu,
    "Softsign": F.softsign,
    "Softplus": lambda x: torch.logaddexp(x, torch.zeros((), dtype=x.dtype, device=x.device)),
    "Mish": F.mish,
    "HardSwish": F.hardswish,
    "Identity": lambda x: x,
    "Not": torch.logical_not,
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Where": torch.where,
    "MatMul": torch.matmul,
    "IsNaN": torch.isnan,
    "PRelu": lambda x, slope: torch.where(x >= 0, x, x * slope),
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseNot": torch.bitwise_not,
}
for _name, _function in _ELEMENTWISE.items():
    _simple(_name, _function)


@operation("Div")
def _div(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return x[0] / x[1] if x[0].is_floating_point() else torch.div(x[0], x[1], rounding_mode="trunc")


@operation("Mod")
def _mod(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return torch.fmod(x[0], x[1]) if a.get("fmod", 0) else torch.remainder(x[0], x[1])


@operation("Pow")
def _pow(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return torch.pow(x[0], x[1]).to(x[0].dtype)


def _folded(function: Callable[..., Any]) -> Operation:
    def fold(x: Inputs, a: Attributes, d: torch.device) -> Any:
        result = x[0]
        for other in x[1:]:
            result = function(result, other)
        return result

    return fold


OPERATIONS["", "Min"], OPERATIONS["", "Max"] = _folded(torch.minimum), _folded(torch.maximum)
OPERATIONS["", "Sum"] = _folded(torch.add)
OPERATIONS["", "Mean"] = lambda x, a, d: _folded(torch.add)(x, a, d) / len(x)


@operation("Clip")
def _clip(x: Inputs, a: Attributes, d: torch.device) -> Any:
    low, high = (x[k] if len(x) > k else None for k in (1, 2))
    return x[0] if low is None and high is None else torch.clamp(x[0], low, high)


@operation("LeakyRelu")
def _leaky(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return F.leaky_relu(x[0], a.get("alpha", 0.01))


@operation("Elu")
def _elu(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return F.elu(x[0], a.get("alpha", 1.0))


@operation("Celu")
def _celu(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return F.celu(x[0], a.get("alpha", 1.0))


@operation("Selu")
def _selu(x: Inputs, a: Attributes, d: torch.device) -> Any:
    alpha, gamma = a.get("alpha", 1.6732632423543772), a.get("gamma", 1.0507009873554805)
    return gamma * torch.where(x[0] > 0, x[0], alpha * torch.expm1(x[0]))


@operation("HardSigmoid")
def _hard_sigmoid(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return (a.get("alpha", 0.2) * x[0] + a.get("beta", 0.5)).clamp(0, 1)


@operation("Gelu")
def _gelu(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return F.gelu(x[0], approximate=a.get("approximate", "none"))


OPERATIONS[MICROSOFT, "Gelu"] = lambda x, a, d: F.gelu(x[0])
OPERATIONS[MICROSOFT, "BiasGelu"] = lambda x, a, d: F.gelu(x[0] + x[1])
OPERATIONS[MICROSOFT, "FastGelu"] = lambda x, a, d: F.gelu(
    x[0] if len(x) < 2 or x[1] is None else x[0] + x[1], approximate="tanh"
)
OPERATIONS[MICROSOFT, "QuickGelu"] = lambda x, a, d: x[0] * torch.sigmoid(a.get("alpha", 1.702) * x[0])


@operation("Swish")
def _swish(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return x[0] * torch.sigmoid(a.get("alpha", 1.0) * x[0])


@operation("IsInf")
def _isinf(x: Inputs, a: Attributes, d: torch.device) -> Any:
    up, down = a.get("detect_positive", 1), a.get("detect_negative", 1)
    infinite = torch.isinf(x[0])
    return infinite if up and down else infinite & (x[0] > 0 if up else x[0] < 0) if up or down else infinite & False


@operation("Cast")
def _cast(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return x[0].to(DTYPES[a["to"]])


@operation("CastLike")
def _cast_like(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return x[0].to(x[1].dtype)


@operation("Dropout")
def _dropout(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return x[0], torch.ones_like(x[0], dtype=torch.bool)  # at inference nothing is dropped


# ------------------------------------------------------------------ linear algebra, attention


@operation("Gemm")
def _gemm(x: Inputs, a: Attributes, d: torch.device) -> Any:
    left = x[0].T if a.get("transA", 0) else x[0]
    right = x[1].T if a.get("transB", 0) else x[1]
    alpha, beta = a.get("alpha", 1.0), a.get("beta", 1.0)
    if len(x) > 2 and x[2] is not None:
        return torch.addmm(x[2], left, right, beta=beta, alpha=alpha)
    product = left @ right
    return product if alpha == 1.0 else alpha * product


@operation("FusedMatMul", domain=MICROSOFT)
def _fused_matmul(x: Inputs, a: Attributes, d: torch.device) -> Any:
    left = x[0].transpose(-1, -2) if a.get("transA", 0) else x[0]
    right = x[1].transpose(-1, -2) if a.get("transB", 0) else x[1]
    return torch.matmul(left, right) * a.get("alpha", 1.0)


@operation("Einsum")
def _einsum(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return torch.einsum(a["equation"], *x)


@operation("MultiHeadAttention", domain=MICROSOFT)
def _attention(x: Inputs, a: Attributes, d: torch.device) -> Any:
    """Query, key, value (batch, length, heads * width), or key and value (batch, heads, length, width)."""
    heads = a["num_heads"]
    query, key, value, bias, padding, added = (list(x) + [None] * 6)[:6]
    if bias is not None:
        widths = [t.shape[-1] if t.dim() == 3 else heads * t.shape[-1] for t in (query, key, value)]
        query, key, value = (t + b for t, b in zip((query, key, value), bias.split(widths), strict=True))

    def apart(t: Tensor) -> Tensor:
        return t if t.dim() == 4 else t.reshape(*t.shape[:2], heads, -1).transpose(1, 2)

    query, key, value = apart(query), apart(key), apart(value)
    if padding is not None:
        if padding.dim() != 2:
            raise Unsupported(f"com.microsoft.MultiHeadAttention with a key_padding_mask of rank {padding.dim()}")
        out_of_sight = torch.where(padding == 0, a.get("mask_filter_value", -10000.0), 0.0).to(query.dtype)
        added = out_of_sight[:, None, None, :] if added is None else added + out_of_sight[:, None, None, :]
    scale = a.get("scale", 0.0) or None
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=added, scale=scale, is_causal=bool(a.get("unidirectional", 0))
    )
    return mixed.transpose(1, 2).flatten(2)


# ------------------------------------------------------------------ normalisation


@operation("LayerNormalization")
def _layer_norm(x: Inputs, a: Attributes, d: torch.device) -> Any:
    axis = a.get("axis", -1)
    shape = x[0].shape[axis:]
    bias = x[2] if len(x) > 2 else None
    if x[1].shape == shape and (bias is None or bias.shape == shape):
        return F.layer_norm(x[0], shape, x[1], bias, a.get("epsilon", 1e-5))
    normal = F.layer_norm(x[0], shape, None, None, a.get("epsilon", 1e-5)) * x[1]
    return normal if bias is None else normal + bias


@operation("RMSNormalization", "SimplifiedLayerNormalization")
def _rms_norm(x: Inputs, a: Attributes, d: torch.device) -> Any:
    axis = a.get("axis", -1)
    axes = list(range(axis, 0)) if axis < 0 else list(range(axis, x[0].dim()))
    wide = x[0].float() if x[0].dtype in (torch.float16, torch.bfloat16) else x[0]
    normal = wide * torch.rsqrt(wide.square().mean(axes, keepdim=True) + a.get("epsilon", 1e-5))
    return normal.to(x[0].dtype) * x[1]


@operation("SkipLayerNormalization", domain=MICROSOFT)
def _skip_layer_norm(x: Inputs, a: Attributes, d: torch.device) -> Any:
    total, _skip, gamma, beta, bias = (list(x) + [None] * 5)[:5]
    total = total + x[1] if bias is None else total + x[1] + bias
    return F.layer_norm(total, total.shape[-1:], gamma, beta, a.get("epsilon", 1e-12)), None, None, total


@operation("BatchNormalization")
def _batch_norm(x: Inputs, a: Attributes, d: torch.device) -> Any:
    if a.get("training_mode", 0):
        raise Unsupported("BatchNormalization in training mode")
    return F.batch_norm(x[0], x[3], x[4], x[1], x[2], False, 0.0, a.get("epsilon", 1e-5))


@operation("InstanceNormalization")
def _instance_norm(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return F.instance_norm(x[0], weight=x[1], bias=x[2], eps=a.get("epsilon", 1e-5))


@operation("GroupNormalization")
def _group_norm(x: Inputs, a: Attributes, d: torch.device) -> Any:
    groups, channels = a["num_groups"], x[0].shape[1]
    weight, bias = (v if len(v) == channels else v.repeat_interleave(channels // groups) for v in (x[1], x[2]))
    return F.group_norm(x[0], groups, weight, bias, a.get("epsilon", 1e-5))


@operation("LpNormalization")
def _lp_norm(x: Inputs, a: Attributes, d: torch.device) -> Any:
    length = torch.linalg.vector_norm(x[0], a.get("p", 2), a.get("axis", -1), keepdim=True)
    return torch.where(length == 0, 0.0, x[0] / length)


@operation("Softmax")
def _softmax(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return torch.softmax(x[0], a.get("axis", -1))


@operation("LogSoftmax")
def _log_softmax(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return torch.log_softmax(x[0], a.get("axis", -1))


# ------------------------------------------------------------------ convolution, pooling

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_MAXIMUM = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def _pads(a: Attributes, spatial: Sequence[int], kernel: Sequence[int]) -> list[int]:
    """[begin…, end…], ONNX's `pads` or what `auto_pad` comes to at this size."""
    rank, mode = len(spatial), a.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID"):
        return list(a.get("pads", [0] * (2 * rank))) if mode == "NOTSET" else [0] * (2 * rank)
    strides, dilations = a.get("strides", [1] * rank), a.get("dilations", [1] * rank)
    begin, end = [], []
    for size, k, stride, dilation in zip(spatial, kernel, strides, dilations, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + dilation * (k - 1) + 1 - size)
        small, large = total // 2, total - total // 2
        begin.append(small if mode == "SAME_UPPER" else large)
        end.append(large if mode == "SAME_UPPER" else small)
    return begin + end


def _padded(x: Tensor, pads: Sequence[int], value: float) -> Tensor:
    rank = len(pads) // 2
    sides = [side for k in reversed(range(rank)) for side in (pads[k], pads[rank + k])]
    return F.pad(x, sides, value=value)


@operation("Conv")
def _conv(x: Inputs, a: Attributes, d: torch.device) -> Any:
    rank = x[0].dim() - 2
    pads = _pads(a, x[0].shape[2:], x[1].shape[2:])
    data, sides = x[0], pads[:rank]
    if pads[:rank] != pads[rank:]:
        data, sides = _padded(data, pads, 0.0), [0] * rank
    return _CONV[rank](
        data,
        x[1],
        x[2] if len(x) > 2 else None,
        a.get("strides", [1] * rank),
        sides,
        a.get("dilations", [1] * rank),
        a.get("group", 1),
    )


@operation("ConvTranspose")
def _conv_transpose(x: Inputs, a: Attributes, d: torch.device) -> Any:
    rank = x[0].dim() - 2
    pads = list(a.get("pads", [0] * (2 * rank)))
    if a.get("auto_pad", "NOTSET") != "NOTSET" or "output_shape" in a or pads[:rank] != pads[rank:]:
        raise Unsupported("ConvTranspose with auto_pad, output_shape or uneven pads")
    return _TRANSPOSED[rank](
        x[0],
        x[1],
        x[2] if len(x) > 2 else None,
        a.get("strides", [1] * rank),
        pads[:rank],
        a.get("output_padding", [0] * rank),
        a.get("group", 1),
        a.get("dilations", [1] * rank),
    )


@operation("MaxPool")
def _max_pool(x: Inputs, a: Attributes, d: torch.device) -> Any:
    kernel = a["kernel_shape"]
    rank = len(kernel)
    pads = _pads(a, x[0].shape[2:], kernel)
    data = _padded(x[0], pads, -math.inf if x[0].is_floating_point() else torch.iinfo(x[0].dtype).min)
    return _MAXIMUM[rank](
        data if any(pads) else x[0],
        kernel,
        a.get("strides", [1] * rank),
        0,
        a.get("dilations", [1] * rank),
        bool(a.get("ceil_mode", 0)),
    )


@operation("AveragePool")
def _average_pool(x: Inputs, a: Attributes, d: torch.device) -> Any:
    kernel = a["kernel_shape"]
    rank = len(kernel)
    if any(k != 1 for k in a.get("dilations", [1])):
        raise Unsupported("AveragePool with dilations")
    strides, ceil, all_count = a.get("strides", [1] * rank), bool(a.get("ceil_mode", 0)), a.get("count_include_pad", 0)
    pads = _pads(a, x[0].shape[2:], kernel)
    even = pads[:rank] == pads[rank:] and all(2 * p <= k for p, k in zip(pads, kernel, strict=False))
    if even:
        return _AVERAGE[rank](x[0], kernel, strides, pads[:rank], ceil, bool(all_count))
    summed = _AVERAGE[rank](_padded(x[0], pads, 0.0), kernel, strides, 0, ceil)
    if all_count:
        return summed
    here = _padded(torch.ones_like(x[0][:1, :1]), pads, 0.0)
    return summed / _AVERAGE[rank](here, kernel, strides, 0, ceil)


@operation("GlobalAveragePool")
def _global_average(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return x[0].mean(list(range(2, x[0].dim())), keepdim=True)


@operation("GlobalMaxPool")
def _global_max(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return x[0].amax(list(range(2, x[0].dim())), keepdim=True)


# ------------------------------------------------------------------ reduction


def _reduction(function: Callable[[Tensor, list[int], bool], Tensor]) -> Operation:
    def reduce(x: Inputs, a: Attributes, d: torch.device) -> Any:
        axes = ints(x[1]) if len(x) > 1 and x[1] is not None else a.get("axes")
        if not axes:
            if a.get("noop_with_empty_axes", 0):
                return x[0]
            axes = list(range(x[0].dim()))
        return function(x[0], list(axes), bool(a.get("keepdims", 1)))

    return reduce


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


for _name, _reduce in {
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keepdim=keep).to(x.dtype),
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "ReduceProd": _product,
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: x.square().sum(axes, keepdim=keep).sqrt(),
    "ReduceSumSquare": lambda x, axes, keep: x.square().sum(axes, keepdim=keep),
    "ReduceLogSum": lambda x, axes, keep: x.sum(axes, keepdim=keep).log(),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep),
}.items():
    OPERATIONS["", _name] = _reduction(_reduce)
    ON_HOST["", _name] = (1,)


def _extreme(best: Callable[..., Tensor]) -> Operation:
    def find(x: Inputs, a: Attributes, d: torch.device) -> Any:
        """torch doesn't promise which of several equal entries it names; ONNX does."""
        axis = a.get("axis", 0) % x[0].dim()
        size = x[0].shape[axis]
        places = torch.arange(size, device=x[0].device).view(-1, *[1] * (x[0].dim() - axis - 1))
        top = x[0] == best(x[0], axis, keepdim=True)
        last = a.get("select_last_index", 0)
        where = torch.where(top, places, -1 if last else size)
        found = where.amax(axis, keepdim=True) if last else where.amin(axis, keepdim=True)
        found = found.clamp(0, size - 1)  # a NaN equals nothing
        return found if a.get("keepdims", 1) else found.squeeze(axis)

    return find


OPERATIONS["", "ArgMax"], OPERATIONS["", "ArgMin"] = _extreme(torch.amax), _extreme(torch.amin)


@operation("CumSum", host=(1,))
def _cumsum(x: Inputs, a: Attributes, d: torch.device) -> Any:
    axis = int(x[1])
    data = x[0].flip(axis) if a.get("reverse", 0) else x[0]
    total = data.cumsum(axis).to(x[0].dtype)
    if a.get("exclusive", 0):
        total = total - data
    return total.flip(axis) if a.get("reverse", 0) else total


@operation("TopK", host=(1,))
def _topk(x: Inputs, a: Attributes, d: torch.device) -> Any:
    axis, count = a.get("axis", -1), int(x[1])
    ordered, index = torch.sort(x[0], dim=axis, descending=bool(a.get("largest", 1)), stable=True)
    return ordered.narrow(axis, 0, count), index.narrow(axis, 0, count)


# ------------------------------------------------------------------ shapes


@operation("Reshape", host=(1,))
def _reshape(x: Inputs, a: Attributes, d: torch.device) -> Any:
    wanted = ints(x[1]) or []
    if not a.get("allowzero", 0):
        wanted = [x[0].shape[k] if size == 0 else size for k, size in enumerate(wanted)]
    return x[0].reshape(wanted)


@operation("Flatten")
def _flatten(x: Inputs, a: Attributes, d: torch.device) -> Any:
    axis = a.get("axis", 1)
    axis += x[0].dim() if axis < 0 else 0
    return x[0].reshape(math.prod(x[0].shape[:axis]), -1)


@operation("Transpose")
def _transpose(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return x[0].permute(a.get("perm", list(reversed(range(x[0].dim())))))


@operation("Squeeze", host=(1,))
def _squeeze(x: Inputs, a: Attributes, d: torch.device) -> Any:
    axes = ints(x[1]) if len(x) > 1 and x[1] is not None else a.get("axes")
    return x[0].squeeze() if axes is None else x[0].squeeze(tuple(axes))


@operation("Unsqueeze", host=(1,))
def _unsqueeze(x: Inputs, a: Attributes, d: torch.device) -> Any:
    axes = ints(x[1]) if len(x) > 1 else list(a["axes"])
    rank = x[0].dim() + len(axes or [])
    result = x[0]
    for axis in sorted(axis % rank for axis in axes or []):
        result = result.unsqueeze(axis)
    return result


@operation("Expand", host=(1,))
def _expand(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return x[0].expand(torch.broadcast_shapes(x[0].shape, tuple(ints(x[1]) or ())))  # type: ignore[no-untyped-call]


@operation("Tile", host=(1,))
def _tile(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return x[0].repeat(ints(x[1]) or [])


@operation("Concat")
def _concat(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return torch.cat(list(x), a["axis"])


@operation("Split", host=(1,))
def _split(x: Inputs, a: Attributes, d: torch.device) -> Any:
    axis = a.get("axis", 0)
    sizes = ints(x[1]) if len(x) > 1 and x[1] is not None else a.get("split")
    if sizes is None:
        count = a.get("num_outputs", a["outputs"])
        return x[0].split(-(-x[0].shape[axis] // count), axis)
    return x[0].split(list(sizes), axis)


@operation("Slice", host=(1, 2, 3, 4))
def _slice(x: Inputs, a: Attributes, d: torch.device) -> Any:
    starts, ends = ints(x[1]) or [], ints(x[2]) or []
    axes = ints(x[3]) if len(x) > 3 and x[3] is not None else list(range(len(starts)))
    steps = ints(x[4]) if len(x) > 4 and x[4] is not None else [1] * len(starts)
    result = x[0]
    for start, end, axis, step in zip(starts, ends, axes or [], steps or [], strict=True):
        axis %= result.dim()
        here = slice(start, end, step).indices(result.shape[axis])
        if step > 0:
            result = result[(slice(None),) * axis + (slice(*here),)]
        else:
            result = result.index_select(axis, torch.arange(*here, device=result.device))
    return result


@operation("Pad", host=(1, 3))
def _pad(x: Inputs, a: Attributes, d: torch.device) -> Any:
    amounts, mode = ints(x[1]) or [], a.get("mode", "constant")
    axes = ints(x[3]) if len(x) > 3 and x[3] is not None else list(range(x[0].dim()))
    result = x[0]
    for k, axis in enumerate(axes or []):
        axis %= result.dim()
        before, after, size = amounts[k], amounts[len(amounts) // 2 + k], result.shape[axis]
        if mode == "constant":
            if before or after:
                sides = [0, 0] * (result.dim() - axis - 1) + [before, after]
                filled = F.pad(result, sides)
                if len(x) > 2 and x[2] is not None:  # a tensor: its value isn't read by the host
                    there = F.pad(torch.ones(size, dtype=torch.bool, device=result.device), [before, after])
                    there = there.view(-1, *[1] * (result.dim() - axis - 1))
                    filled = torch.where(there, filled, x[2].reshape(()).to(result.dtype))
                result = filled
            continue
        places = torch.arange(-before, size + after, device=result.device)
        if mode == "edge":
            places = places.clamp(0, size - 1)
        elif mode == "reflect":
            places = (size - 1) - ((size - 1) - places.abs()).abs()
        elif mode == "wrap":
            places = places % size
        else:
            raise Unsupported(f"Pad with the mode {mode!r}")
        result = result.index_select(axis, places)
    return result


@operation("Shape")
def _shape(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return torch.tensor(list(x[0].shape)[a.get("start", 0) : a.get("end")], dtype=torch.int64)


@operation("Size")
def _size(x: Inputs, a: Attributes, d: torch.device) -> Any:
    return torch.tensor(x[0].numel(), dtype=torch.int64)


@operation("ConstantOfShape", host=(0,))
def _constant_of_shape(x: Inputs, a: Attributes, d: torch.device) -> Any:
    value = a.get("value")
    if value is None:
        return torch.zeros(ints(x[0]) or [], device=d)
    return torch.full(ints(x[0]) or [], value.reshape(-1).tolist()[0], dtype=value.dtype, device=d)


@operation("Range", host=(0, 1, 2))
def _range(x: Inputs, a: Attributes, d: torch.device) -> Any:
    start, limit, step = (v.tolist() for v in x)
    return torch.arange(start, limit, step, dtype=x[0].dtype, device=d)


@operation("Trilu", host=(1,))
def _trilu(x: Inputs, a: Attributes, d: torch.device) -> Any:
    diagonal = int(x[1]) if len(x) > 1 and x[1] is not None else 0
    return torch.triu(x[0], diagonal) if a.get("upper", 1) else torch.tril(x[0], diagonal)


@operation("DepthToSpace")
def _depth_to_space(x: Inputs, a: Attributes, d: torch.device) -> Any:
    if a.get("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x[0], a["blocksize"])
    b, c, h, w = x[0].shape
    block = a["blocksize"]
    apart = x[0].reshape(b, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return apart.reshape(b, c // block**2, h * block, w * block)


# ------------------------------------------------------------------ indexing


def _from_start(index: Tensor, size: int) -> Tensor:
    """ONNX counts negative indices from the end."""
    index = index.long()
    return torch.where(index < 0, index + size, index)


@operation("Gather")
def _gather(x: Inputs, a: Attributes, d: torch.device) -> Any:
    axis = a.get("axis", 0) % x[0].dim()
    size = x[0].shape[axis]
    # An index out of range would end the whole CUDA context; `Program` looks for it apart.
    index = _from_start(x[1], size).clamp(0, size - 1)
    taken = x[0].index_select(axis, index.reshape(-1))
    return taken.reshape(x[0].shape[:axis] + index.shape + x[0].shape[axis + 1 :])


def out_of_range(x: Inputs, a: Attributes) -> Tensor:
    """Whether a Gather asks for an entry that isn't there, as a tensor ()."""
    size = x[0].shape[a.get("axis", 0)]
    wrong: Tensor = ((x[1] < -size) | (x[1] >= size)).any()
    return wrong


@operation("GatherElements")
def _gather_elements(x: Inputs, a: Attributes, d: torch.device) -> Any:
    axis = a.get("axis", 0)
    return torch.gather(x[0], axis, _from_start(x[1], x[0].shape[axis]))


@operation("GatherND")
def _gather_nd(x: Inputs, a: Attributes, d: torch.device) -> Any:
    shared = a.get("batch_dims", 0)
    data, index = x[0], x[1].long()
    deep = index.shape[-1]
    columns = [_from_start(index[..., k], data.shape[shared + k]) for k in range(deep)]
    for k in range(shared):
        places = torch.arange(data.shape[k], device=data.device)
        columns.insert(k, places.view(-1, *[1] * (index.dim() - 2 - k)).expand(index.shape[:-1]))
    return data[tuple(columns)]


_COMBINE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operation("ScatterElements")
def _scatter_elements(x: Inputs, a: Attributes, d: torch.device) -> Any:
    axis, how = a.get("axis", 0), a.get("reduction", "none")
    index = _from_start(x[1], x[0].shape[axis])
    return x[0].scatter(axis, index, x[2]) if how == "none" else x[0].scatter_reduce(axis, index, x[2], _COMBINE[how])


@operation("ScatterND")
def _scatter_nd(x: Inputs, a: Attributes, d: torch.device) -> Any:
    how = a.get("reduction", "none")
    if how not in ("none", "add"):
        raise Unsupported(f"ScatterND with the reduction {how!r}")
    index = x[1].long()
    columns = tuple(_from_start(index[..., k], x[0].shape[k]) for k in range(index.shape[-1]))
    return x[0].index_put(columns, x[2], accumulate=how == "add")


@operation("OneHot", host=(1,))
def _one_hot(x: Inputs, a: Attributes, d: torch.device) -> Any:
    depth, axis = int(x[1].reshape(-1)[0]), a.get("axis", -1)
    hot = _from_start(x[0], depth)[..., None] == torch.arange(depth, device=x[0].device)
    return torch.where(hot, x[2][1], x[2][0]).movedim(-1, axis)
