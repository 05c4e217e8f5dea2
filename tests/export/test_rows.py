"""Whether rows influence each other is judged on rows that differ, whatever example an export was given."""

import json

import numpy as np
import onnx
import pytest
import torch
from offramp.export import export_bundle
from offramp.export.graph import prepare, read_onnx
from offramp.export.onnx_file import OnnxFile
from offramp.export.outputs import Outputs
from offramp.export.probe import Probe
from offramp.export.rows import keep_company, make_inputs, vocabularies
from offramp.export.writing.weights import WeightFile
from offramp.runtime import Cascade, ExportError
from onnx import TensorProto, helper, numpy_helper
from toys import SEQUENCE, BatchSecond, Encoder, Everything, HalfLogits, LastToken, Masked, MultiScale, Plain, make


class Mixing(torch.nn.Module):
    """Two exits; what one row gets depends on others by `mix`, a function of (rows, width) numbers."""

    def __init__(self, mix):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
        self.heads = torch.nn.ModuleList(torch.nn.Linear(6, 3) for _ in range(2))
        self.mix = mix

    def forward(self, x):
        logits = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = self.mix(torch.tanh(block(x)))
            logits.append(3 * head(x))
        return logits


MIXING = {
    "softmax over rows": lambda x: x + x.softmax(0),
    "mean over the batch": lambda x: x - x.mean(0, keepdim=True),
    "batch normalisation": lambda x: (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt(),
    "maximum over the batch": lambda x: x / x.abs().amax(0, keepdim=True).clamp_min(0.1),
    "a maximum that only larger rows move": lambda x: x - torch.relu(x.abs().sum(1).max() - 4),
    "the row before": lambda x: x + 0.1 * torch.roll(x, 1, 0),
    "the first row": lambda x: x + 0.1 * x[:1],
    "attention across the batch": lambda x: x + (x @ x.T / 2).softmax(-1) @ x,
    "a row's rank": lambda x: x + x.sum(1).argsort().argsort()[:, None] * 0.01,
    "the number of rows": lambda x: x * (1 + 0.01 * x.shape[0]),
}


def independent(bundle):
    return json.loads((bundle / "manifest.json").read_text())["rows_independent"]


@pytest.mark.parametrize("example", [torch.linspace(-1, 1, 6)[None], torch.zeros(2, 6)], ids=["one row", "rows alike"])
@pytest.mark.parametrize("kind", MIXING)
def test_rows_that_influence_each_other_are_run_one_by_one(tmp_path, kind, example):
    bundle = export_bundle(make(Mixing, MIXING[kind]), {"x": example}, tmp_path / "b")
    assert independent(bundle) is False
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    with Cascade.load(bundle, threads=1) as cascade:
        together = cascade.predict({"x": x}).score
        alone = [cascade.predict({"x": x[i : i + 1]}).score[0] for i in range(5)]
    np.testing.assert_array_equal(together, alone)


ALIKE = {
    "plain": (Plain, {"x": torch.zeros(1, 8)}, None),
    "large": (Plain, {"x": torch.full((1, 8), 1e4)}, None),
    "auxiliary": (Everything, {"x": torch.randn(1, 8)}, None),
    "batch second": (BatchSecond, {"x": torch.randn(1, 8)}, None),
    "half": (HalfLogits, {"x": torch.randn(1, 8)}, None),
    "pictures": (MultiScale, {"x": torch.rand(1, 1, 16, 12)}, None),
    "tokens": (Masked, {"ids": torch.ones((1, 7), dtype=torch.int64), "mask": torch.ones((1, 7))}, SEQUENCE),
    "last token": (LastToken, dict.fromkeys(("ids", "mask"), torch.ones((1, 7), dtype=torch.int64)), SEQUENCE),
    "encoder": (Encoder, dict.fromkeys(("ids", "mask"), torch.ones((1, 7), dtype=torch.int64)), SEQUENCE),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_honest_models_raise_no_false_alarm(tmp_path, kind):
    model, example, axes = ALIKE[kind]
    assert independent(export_bundle(make(model), example, tmp_path / "b", dynamic_axes=axes)) is True


class Tokens(torch.nn.Module):
    """Looks words up, and normalises over the batch: with equal ids in every row nothing shows."""

    def __init__(self, vocabulary, mixes):
        super().__init__()
        self.words, self.heads = (
            torch.nn.Embedding(vocabulary, 6),
            torch.nn.ModuleList(torch.nn.Linear(6, 3) for _ in range(2)),
        )
        self.mixes = mixes

    def forward(self, ids):
        x = self.words(ids.long()).mean(1)
        x = x - x.mean(0, keepdim=True) * 0.5 if self.mixes else x
        return [self.heads[0](x), self.heads[1](torch.tanh(x))]


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize(("vocabulary", "dtype"), [(2, torch.int64), (7, torch.int32), (300, torch.int64)])
def test_words_are_varied_within_their_vocabulary(tmp_path, vocabulary, dtype, mixes):
    example = {"ids": torch.ones((1, 5), dtype=dtype)}
    axes = {"ids": {0: "batch", 1: "seq"}}
    bundle = export_bundle(make(Tokens, vocabulary, mixes), example, tmp_path / "b", dynamic_axes=axes)
    assert independent(bundle) is not mixes


def lookup(path, mixes, rows=9):
    """An ONNX file over token ids, by way of a cast and a squeeze, two exits."""
    rng = np.random.default_rng(0)
    weights = {"table": (rows, 6), "v0": (6, 3), "v1": (6, 3)}
    constants = [numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), n) for n, s in weights.items()]
    constants += [numpy_helper.from_array(np.array([k]), f"axis_{k}") for k in range(3)]
    nodes = [
        helper.make_node("Unsqueeze", ["ids", "axis_1"], ["ids_1"]),
        helper.make_node("Cast", ["ids_1"], ["ids_2"], to=TensorProto.INT64),
        helper.make_node("Squeeze", ["ids_2", "axis_1"], ["ids_3"]),
        helper.make_node("Gather", ["table", "ids_3"], ["words"]),
        helper.make_node("ReduceMean", ["words", "axis_1"], ["h"], keepdims=0),
        helper.make_node("ReduceMean", ["h", "axis_0"], ["mean"], keepdims=1),
        helper.make_node("Sub" if mixes else "Identity", ["h", "mean"] if mixes else ["h"], ["x"]),
        helper.make_node("MatMul", ["x", "v0"], ["early"]),
        helper.make_node("Tanh", ["x"], ["y"]),
        helper.make_node("MatMul", ["y", "v1"], ["late"]),
    ]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 3]) for n in ("early", "late")]
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT32, ["N", "L"])]
    graph = helper.make_graph(nodes, "words", inputs, outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.mark.parametrize("mixes", [True, False])
def test_a_file_without_an_example_is_judged_on_words_of_its_own(tmp_path, mixes):
    bundle = export_bundle(lookup(tmp_path / "m.onnx", mixes), None, tmp_path / "b")
    assert independent(bundle) is not mixes


def test_a_file_whose_batch_normalisation_is_left_in_training_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    constants = [numpy_helper.from_array(np.full(6, v, np.float32), n) for n, v in (("one", 1), ("zero", 0))]
    constants.append(numpy_helper.from_array(rng.standard_normal((6, 3)).astype(np.float32), "v"))
    nodes = [
        helper.make_node(
            "BatchNormalization", ["x", "one", "zero", "zero", "one"], ["y", "mean", "var"], training_mode=1
        ),
        helper.make_node("MatMul", ["y", "v"], ["early"]),
        helper.make_node("Tanh", ["early"], ["late"]),
    ]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 3]) for n in ("early", "late")]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 6])]
    graph = helper.make_graph(nodes, "norm", inputs, outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    with pytest.raises(ExportError, match=r"m\.onnx: the node .*\(BatchNormalization\) is in training mode"):
        export_bundle(tmp_path / "m.onnx", None, tmp_path / "b")


def test_a_vocabulary_is_the_size_of_the_smallest_table(tmp_path):
    graph = prepare(read_onnx(lookup(tmp_path / "m.onnx", False, rows=4)), Outputs(logits=["early", "late"]))
    assert vocabularies(graph) == {"ids": 4}
    ids = make_inputs(graph, {"batch": 50, "L": 8})["ids"]
    assert set(ids.flat) == {0, 1, 2, 3}


def test_different_rows_are_valid_and_no_two_alike(tmp_path):
    outputs = Outputs(logits=["early", "late"])
    path = lookup(tmp_path / "m.onnx", False, rows=40)
    graph = prepare(read_onnx(path), outputs)
    probe = Probe(graph, WeightFile(tmp_path, graph.weights), tmp_path, {"ids": np.ones((1, 6), np.int32)})
    ids = keep_company(probe, OnnxFile(path).reference(outputs)).different({"batch": 9, "L": 6})["ids"]
    assert len({tuple(row) for row in ids}) == 9
    assert 0 <= ids.min() <= ids.max() < 40


class Longest(torch.nn.Module):
    """Divides by the longest row's length: only rows of several lengths show it."""

    def __init__(self, mixes=True):
        super().__init__()
        self.words, self.heads = torch.nn.Embedding(20, 6), torch.nn.ModuleList(torch.nn.Linear(6, 3) for _ in range(2))
        self.mixes = mixes

    def forward(self, ids, mask):
        lengths = mask.sum(1, keepdim=True)
        x = (self.words(ids) * mask[..., None]).sum(1) / (lengths.max() if self.mixes else lengths)
        return [self.heads[0](x), self.heads[1](torch.tanh(x))]


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize(
    "mask", [[1] * 4, [1] * 9, [1] * 5 + [0] * 3, [0] * 3 + [1] * 5], ids=["4", "9", "right", "left"]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_masks_are_shortened_where_they_are_masked_already(tmp_path, mixes, mask, dtype):
    example = {"ids": torch.ones((1, len(mask)), dtype=torch.int64), "mask": torch.tensor([mask], dtype=dtype)}
    bundle = export_bundle(make(Longest, mixes), example, tmp_path / "b", dynamic_axes=SEQUENCE)
    assert independent(bundle) is not mixes


class Picky(Plain):
    """Mixes rows, and knows one kind only."""

    def forward(self, x, kind):
        if not torch.compiler.is_compiling() and bool((kind != 7).any()):
            raise ValueError("only kind 7 is known")
        x = x * kind[:, None]
        return super().forward(x - x.mean(0, keepdim=True))


class Whole(Plain):
    """Takes whole numbers only."""

    def forward(self, x):
        if not torch.compiler.is_compiling() and bool((x != x.round()).any()):
            raise ValueError("whole numbers, please")
        return super().forward(x - self.mean(x))

    def mean(self, x):
        return 0


class WholeMixing(Whole):
    def mean(self, x):
        return x.mean(0, keepdim=True)


@pytest.mark.parametrize(
    ("model", "example", "expected"),
    [
        (Picky, {"x": torch.ones(1, 8), "kind": torch.tensor([7])}, False),
        (Whole, {"x": torch.arange(24.0).view(3, 8)}, True),
        (WholeMixing, {"x": torch.arange(24.0).view(3, 8)}, False),
    ],
)
def test_a_model_that_does_not_take_other_values_is_judged_on_those_that_it_takes(tmp_path, model, example, expected):
    assert independent(export_bundle(make(model), example, tmp_path / "b")) is expected
