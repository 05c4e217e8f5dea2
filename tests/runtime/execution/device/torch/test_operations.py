"""Each ONNX operation in torch gives what ONNX Runtime gives."""
# ruff: noqa: E501 (a table of cases, a line each)

import numpy as np
import onnxruntime
import pytest

torch = pytest.importorskip("torch", reason="the operations are torch's")
onnx = pytest.importorskip("onnx", reason="the torch executor reads ONNX graphs")

from offramp.runtime import BundleError  # noqa: E402
from offramp.runtime.execution.device.torch.program import Weights, read_program  # noqa: E402
from onnx import helper, numpy_helper  # noqa: E402

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


X = floats(3, 4, 5)
IMAGE = floats(2, 4, 9, 7)
SMALL = (np.abs(floats(3, 4)) * 0.4).astype(np.float32)
WHOLE = RNG.integers(-7, 8, (3, 4)).astype(np.int64)
OTHER = np.array([[3], [-2], [5]], np.int64)
FLAGS = X > 0


def c(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


# name, inputs (those in the second list are constants of the graph), attributes
REDUCTIONS = [f"Reduce{n}" for n in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSumExp")]

CASES: list[tuple[str, list, list, dict]] = [
    *[(n, [X], [], {}) for n in ["Neg", "Abs", "Sign", "Exp", "Floor", "Ceil", "Round", "Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh", "Tanh", "Erf", "Sigmoid", "Relu"]],
    *[(n, [X], [], {}) for n in ["Softsign", "Softplus", "Mish", "HardSwish", "HardSigmoid", "Elu", "Celu", "Selu", "LeakyRelu", "Gelu", "Identity"]],
    *[(n, [SMALL], [], {}) for n in ["Asin", "Acos", "Log", "Sqrt", "Reciprocal"]],
    *[(n, [X, floats(5)], [], {}) for n in ["Add", "Sub", "Mul", "Div", "Pow", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "PRelu"]],
    *[(n, [X, floats(4, 1), floats(1)], [], {}) for n in ["Min", "Max", "Sum", "Mean"]],
    *[(n, [FLAGS, X > 0.5], [], {}) for n in ["And", "Or", "Xor"]],
    ("Gelu", [X], [], {"approximate": "tanh"}),
    ("Div", [WHOLE, OTHER], [], {}),
    ("Mod", [WHOLE, OTHER], [], {}),
    ("Mod", [X, floats(5)], [], {"fmod": 1}),
    ("Not", [FLAGS], [], {}),
    ("Where", [FLAGS, X, floats(5)], [], {}),
    ("Clip", [X], [np.float32(-0.5), np.float32(0.5)], {}),
    ("Clip", [X], [np.float32(-0.5)], {}),
    ("IsNaN", [np.array([1, np.nan], np.float32)], [], {}),
    ("IsInf", [np.array([1, -np.inf, np.inf], np.float32)], [], {"detect_negative": 0}),
    *[("Cast", [X], [], {"to": kind}) for kind in (6, 7, 9, 10, 11)],
    ("MatMul", [X, floats(5, 2)], [], {}),
    ("MatMul", [floats(5), floats(5, 2)], [], {}),
    ("Gemm", [floats(3, 4), floats(2, 4), floats(2)], [], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("Gemm", [floats(4, 3), floats(4, 2)], [], {"transA": 1}),
    ("Einsum", [floats(2, 3, 4), floats(2, 4, 5)], [], {"equation": "bij,bjk->bik"}),
    ("LayerNormalization", [X, floats(5), floats(5)], [], {"epsilon": 1e-3}),
    ("LayerNormalization", [X, floats(4, 5)], [], {"axis": 1}),
    ("BatchNormalization", [IMAGE, floats(4), floats(4), floats(4), np.abs(floats(4))], [], {}),
    ("InstanceNormalization", [IMAGE, floats(4), floats(4)], [], {}),
    ("LpNormalization", [X], [], {"axis": 1, "p": 2}),
    ("Softmax", [X], [], {"axis": 1}),
    ("LogSoftmax", [X], [], {}),
    ("Conv", [IMAGE, floats(6, 4, 3, 3), floats(6)], [], {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    ("Conv", [IMAGE, floats(6, 4, 3, 3)], [], {"pads": [0, 1, 2, 1]}),
    ("Conv", [IMAGE, floats(4, 1, 3, 3)], [], {"group": 4, "dilations": [2, 2]}),
    ("Conv", [IMAGE, floats(6, 4, 3, 2)], [], {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ("Conv", [IMAGE, floats(6, 4, 3, 2)], [], {"auto_pad": "SAME_LOWER"}),
    ("Conv", [X, floats(6, 4, 3)], [], {}),
    ("ConvTranspose", [IMAGE, floats(4, 3, 3, 3)], [], {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    ("MaxPool", [IMAGE], [], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("MaxPool", [IMAGE], [], {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    ("AveragePool", [IMAGE], [], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("AveragePool", [IMAGE], [], {"kernel_shape": [3, 3], "pads": [0, 0, 1, 2]}),
    ("AveragePool", [IMAGE], [], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    ("GlobalAveragePool", [IMAGE], [], {}),
    ("GlobalMaxPool", [IMAGE], [], {}),
    *[
        (n, [X], [c(1)], {"keepdims": keep})
        for n in REDUCTIONS
        for keep in (0, 1)
    ],
    ("ReduceSum", [X], [], {}),
    ("ReduceSum", [X], [], {"noop_with_empty_axes": 1}),
    ("ReduceSum", [WHOLE], [c(0, -1)], {"keepdims": 0}),
    ("ArgMax", [np.array([[1, 3, 3], [2, 2, 1]], np.float32)], [], {"axis": 1}),
    ("ArgMax", [np.array([[1, 3, 3], [2, 2, 1]], np.float32)], [], {"axis": -1, "keepdims": 0, "select_last_index": 1}),
    ("ArgMin", [X], [], {"axis": 0}),
    ("CumSum", [X], [np.int64(1)], {}),
    ("CumSum", [X], [np.int64(-1)], {"exclusive": 1, "reverse": 1}),
    ("TopK", [X], [c(3)], {}),
    ("TopK", [np.array([[1, 2, 2, 1]], np.float32)], [c(3)], {"largest": 0}),
    ("Reshape", [X], [c(0, -1)], {}),
    ("Flatten", [X], [], {"axis": 2}),
    ("Transpose", [X], [], {"perm": [2, 0, 1]}),
    ("Transpose", [X], [], {}),
    ("Squeeze", [floats(1, 3, 1)], [], {}),
    ("Squeeze", [floats(1, 3, 1)], [c(-1)], {}),
    ("Unsqueeze", [X], [c(0, -1)], {}),
    ("Expand", [floats(4, 1)], [c(3, 1, 5)], {}),
    ("Tile", [X], [c(2, 1, 3)], {}),
    ("Concat", [X, floats(3, 2, 5)], [], {"axis": 1}),
    ("Split", [X], [c(1, 3)], {"axis": 1}),
    ("Split", [X], [], {"axis": 2, "num_outputs": 2}),
    ("Slice", [X], [c(1, -3), c(100, -1), c(1, 2)], {}),
    ("Slice", [X], [c(-1), c(-100), c(2), c(-2)], {}),
    ("Pad", [X], [c(0, 1, 2, 1, 0, 0), np.float32(7)], {}),
    ("Pad", [X], [c(0, 1, 2, 0, 1, 1)], {"mode": "reflect"}),
    ("Pad", [X], [c(0, 1, 2, 0, 1, 1)], {"mode": "edge"}),
    ("Shape", [X], [], {"start": 1}),
    ("Size", [X], [], {}),
    ("ConstantOfShape", [], [c(2, 3)], {}),
    ("Range", [], [np.int64(2), np.int64(11), np.int64(3)], {}),
    ("Trilu", [X], [np.int64(1)], {}),
    ("Trilu", [X], [], {"upper": 0}),
    ("DepthToSpace", [IMAGE], [], {"blocksize": 2}),
    ("DepthToSpace", [IMAGE], [], {"blocksize": 2, "mode": "CRD"}),
    ("Gather", [X], [np.array([[0, -1], [2, 1]])], {"axis": 1}),
    ("GatherElements", [X, np.array([[[0, -1, 2, 1, 0]]])], [], {"axis": 1}),
    ("GatherND", [X, np.array([[0, 1], [2, -1]])], [], {}),
    ("GatherND", [X, np.array([[1], [-1], [0]])], [], {"batch_dims": 1}),
    ("ScatterElements", [floats(3, 5), np.array([[0, -1]]), floats(1, 2)], [], {"axis": 1}),
    ("ScatterND", [floats(4, 3), np.array([[1], [-1]]), floats(2, 3)], [], {}),
    ("OneHot", [np.array([0, 2, -1])], [np.int64(4), np.array([0, 1], np.float32)], {}),
    ("Dropout", [X], [], {}),
    *[("com.microsoft." + n, [X], [], {}) for n in ("Gelu", "FastGelu", "QuickGelu")],
    ("com.microsoft.BiasGelu", [X, floats(5)], [], {}),
    ("com.microsoft.FusedMatMul", [X, floats(3, 2, 5)], [], {"transB": 1, "alpha": 0.5}),
    ("com.microsoft.SkipLayerNormalization", [X, floats(3, 4, 5), floats(5), floats(5), floats(5)], [], {}),
    ("com.microsoft.MultiHeadAttention", [floats(2, 4, 6), floats(2, 5, 6), floats(2, 5, 6)], [], {"num_heads": 2}),
    (
        "com.microsoft.MultiHeadAttention",
        [floats(2, 4, 6), floats(2, 4, 6), floats(2, 4, 6), floats(18), None, floats(1, 2, 4, 4)],
        [],
        {"num_heads": 2, "scale": 0.3},
    ),
    (
        "com.microsoft.MultiHeadAttention",
        [floats(2, 4, 6), floats(2, 2, 5, 3), floats(2, 2, 5, 3)],
        [],
        {"num_heads": 2},
    ),
]  # fmt: skip


def save(path, name, given, constants, attributes) -> str:
    domain, _, kind = name.rpartition(".")
    feeds = [None if v is None else f"x{k}" for k, v in enumerate(given)]
    fixed = [f"c{k}" for k in range(len(constants))]
    outputs = ["y", "y1"] if kind in ("TopK",) or (kind == "Split") else ["y"]
    node = helper.make_node(kind, [f or "" for f in feeds] + fixed, outputs, domain=domain, **attributes)
    of = helper.np_dtype_to_tensor_dtype
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(f, of(v.dtype), v.shape) for f, v in zip(feeds, given, strict=True) if f],
        [helper.make_empty_tensor_value_info(o) for o in outputs],
        [numpy_helper.from_array(np.asarray(v), f) for f, v in zip(fixed, constants, strict=True)],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return str(path)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[3]}")
def test_an_operation_gives_what_onnx_runtime_gives(case, tmp_path):
    name, given, constants, attributes = case
    path = save(tmp_path / "one.onnx", name, given, constants, attributes)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs = [o.name for o in session.get_outputs()]
    feed = {f"x{k}": v for k, v in enumerate(given) if v is not None}
    want = session.run(outputs, feed)
    program = read_program(tmp_path / "one.onnx", Weights(torch.device("cpu")), torch.device("cpu"))
    got, _ = program.run({name: torch.from_numpy(value) for name, value in feed.items()}, outputs)
    for output, right in zip(outputs, want, strict=True):
        value = got[output].numpy()
        assert value.dtype == right.dtype
        assert value.shape == right.shape
        np.testing.assert_allclose(value, right, rtol=2e-5, atol=2e-5)


def test_every_operation_is_tested():
    from offramp.runtime.execution.device.torch.operations import OPERATIONS

    tested = {tuple(case[0].rpartition(".")[::2]) for case in CASES}
    # ONNX Runtime has no CPU kernel for these at opset 20, or they are trivial beside one that is tested.
    elsewhere = {"CastLike", "Swish", "RMSNormalization", "SimplifiedLayerNormalization", "GroupNormalization"}
    elsewhere |= {"ReduceLogSum", "BitwiseAnd", "BitwiseOr", "BitwiseNot"}
    assert {name for name in OPERATIONS if name[1] not in elsewhere} == tested


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        ([("Reshape", ["x", "n"], ["z"])], "'n' is a tensor and shapes the computation"),
        ([("MaxPool", ["x"], ["z", "i"])], "MaxPool with more than one output"),
    ],
)
def test_what_would_make_the_host_wait_is_refused_when_the_graph_is_read(nodes, match, tmp_path):
    made = [helper.make_node(k, i, o, **({"kernel_shape": [1]} if k == "MaxPool" else {})) for k, i, o in nodes]
    inputs = [
        helper.make_tensor_value_info("x", 1, [2, 2, 2]),
        helper.make_tensor_value_info("n", 7, [2]),
    ]
    graph = helper.make_graph(made, "g", inputs, [helper.make_empty_tensor_value_info("z")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "g.onnx")
    with pytest.raises(BundleError, match=match):
        read_program(tmp_path / "g.onnx", Weights(torch.device("cpu")), torch.device("cpu"))


def test_a_file_that_is_no_graph_and_an_old_opset_are_refused(tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"nothing of the kind")
    with pytest.raises(BundleError, match=r"bad\.onnx"):
        read_program(tmp_path / "bad.onnx", Weights(torch.device("cpu")), torch.device("cpu"))
    graph = helper.make_graph([], "g", [], [])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)]), tmp_path / "old.onnx")
    with pytest.raises(BundleError, match="opset 11"):
        read_program(tmp_path / "old.onnx", Weights(torch.device("cpu")), torch.device("cpu"))
