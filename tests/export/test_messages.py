"""What an export says before, and about, what it does: missing libraries, fields that don't exist, odd models."""

import json
import subprocess
import sys
import warnings

import numpy as np
import onnx
import pytest
import torch
from offramp.export import export_bundle
from offramp.runtime import Cascade, ExportError
from offramp.runtime.cli import main
from onnx import TensorProto, helper, numpy_helper
from toys import SEQUENCE, Masked, MultiScale, Plain, make

TEXT = {"kind": "text", "tokenizer": "t.json", "ids": "ids", "mask": "mask", "max_length": 8}
IMAGE = {"kind": "image", "height": 8, "width": 8, "channels": "L"}


@pytest.fixture
def nothing_is_traced(monkeypatch):
    def traced(*_, **__):
        raise AssertionError("traced")

    monkeypatch.setattr(torch.onnx, "export", traced)


@pytest.fixture
def tokenizer(tmp_path):
    library = pytest.importorskip("tokenizers")
    words = {word: k for k, word in enumerate(["[PAD]", "[UNK]", "a", "b"])}
    made = library.Tokenizer(library.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "t.json"))
    return tmp_path / "t.json"


def export_tokens(out, **options):
    ids = torch.ones((2, 6), dtype=torch.int64)
    return export_bundle(make(Masked), {"ids": ids, "mask": ids}, out, dynamic_axes=SEQUENCE, **options)


@pytest.mark.parametrize(
    ("library", "preprocess", "command"),
    [
        ("torch", None, '".[export]"'),
        ("onnxscript", None, '".[export]"'),
        ("tokenizers", TEXT, '".[text]"'),
        ("PIL", IMAGE, '".[image]"'),
    ],
)
def test_a_missing_library_is_named_before_the_model_is_traced(
    tmp_path, monkeypatch, nothing_is_traced, library, preprocess, command
):
    model, ids = make(Masked), torch.ones((2, 6), dtype=torch.int64)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ExportError, match=rf"needs {library}, which isn't installed") as raised:
        export_bundle(model, {"ids": ids, "mask": ids}, tmp_path / "b", preprocess=preprocess)
    assert f"pip install {command}" in str(raised.value)


LIBRARIES = ["onnx", "onnx_ir", "networkx", "torch", "onnxscript", "tokenizers", "onnxruntime"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_command_names_it_before_the_users_file_is_run(tmp_path, library):
    (tmp_path / "model.py").write_text("raise SystemExit('was run')")
    (tmp_path / "pre.json").write_text(json.dumps(TEXT))
    command = ["export", "model.py:build", "--example", "model.py:x", "--preprocess", "pre.json", "--out", "b"]
    code = (
        f"import sys; sys.modules[{library!r}] = None\n"
        f"from offramp.runtime.cli import main\nraise SystemExit(main({command!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    name = "ONNX Runtime isn't installed" if library == "onnxruntime" else f"needs {library}"
    assert name in done.stderr
    assert "pip install" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "txt"}, "preprocess.kind is 'txt', expected \"text\" or \"image\". Did you mean 'text'?"),
        ({"kind": None}, 'preprocess.kind is None, expected "text" or "image".'),
        (
            {"max_lenght": 8},
            "preprocess has no field 'max_lenght'. Did you mean 'max_length'? The kind 'text' has tokenizer, ids, "
            "mask, type_ids, max_length, truncation, padding, pad_id, pad_type_id, special_tokens, sample.",
        ),
        ({"height": 8}, "preprocess has no field 'height'."),
        ({"padding": "rigth"}, "preprocess.padding is 'rigth', expected \"right\" or \"left\". Did you mean 'right'?"),
        ({"truncation": "middle"}, 'preprocess.truncation is \'middle\', expected "right", "left" or null.'),
        ({"max_length": "long"}, "preprocess.max_length is 'long', expected int."),
        ({"max_length": None}, "preprocess.max_length is None, expected int."),
        ({"pad_id": 1.5}, "preprocess.pad_id is 1.5, expected int."),
        ({"sample": [3]}, "preprocess.sample is [3], expected str."),
        ({"sample": "a"}, "preprocess.sample is 'a', expected array."),
        ({"special_tokens": "yes"}, "preprocess.special_tokens is 'yes', expected bool."),
        ({"tokenizer": "nowhere.json"}, "preprocess.tokenizer is 'nowhere.json', expected the path of a file."),
        ({"ids": "nothing"}, "the model also takes ['ids']"),
        ({"max_length": 0}, "preprocess.max_length is 0"),
        ({"sample": ["a " * 50], "truncation": None}, "has 50 tokens, expected at most 8"),
    ],
)
def test_a_wrong_field_is_named_with_the_right_ones_before_the_model_is_traced(
    tmp_path, tokenizer, nothing_is_traced, change, message
):
    with pytest.raises(ExportError) as raised:
        export_tokens(tmp_path / "b", preprocess=TEXT | {"tokenizer": str(tokenizer)} | change)
    assert message in str(raised.value)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"heigth": 8},
            "preprocess has no field 'heigth'. Did you mean 'height'? The kind 'image' has input, height, ",
        ),
        ({"layout": "NCWH"}, 'preprocess.layout is \'NCWH\', expected "NCHW", "NHWC" or "NHW". Did you mean \'NCHW\'?'),
        ({"resize": "squeeze"}, 'expected "stretch", "crop", "pad" or null.'),
        ({"interpolation": 3}, 'expected "nearest", "box", "bilinear", "bicubic" or "lanczos".'),
        ({"mean": 0.5}, "preprocess.mean is 0.5, expected array."),
        ({"background": [1, 2]}, "preprocess.background is [1, 2], expected array of length 3."),
        ({"height": 9}, "preprocess makes [batch, 1, 9, 8]"),
        ({"sample": __file__}, "preprocess: its sample can't be answered: row 0"),
    ],
)
def test_a_wrong_field_for_pictures_is_named_before_the_model_is_traced(tmp_path, nothing_is_traced, change, message):
    pytest.importorskip("PIL")
    with pytest.raises(ExportError) as raised:
        export_bundle(make(MultiScale), {"x": torch.rand(2, 1, 8, 8)}, tmp_path / "b", preprocess=IMAGE | change)
    assert message in str(raised.value)


@pytest.mark.parametrize("given", ["pre.json", ["text"], 3])
def test_a_spec_that_is_none_is_named(tmp_path, nothing_is_traced, given):
    with pytest.raises(ExportError, match=rf"preprocess is a {type(given).__name__}, expected a mapping"):
        export_tokens(tmp_path / "b", preprocess=given)


@pytest.mark.parametrize("classes", ["abcde", [1, 2, 3, 4, 5], [None] * 5])
def test_class_names_that_are_no_texts_are_named(tmp_path, nothing_is_traced, classes):
    with pytest.raises(ExportError, match=r"classes is .*, expected a list of one string a logit"):
        export_tokens(tmp_path / "b", classes=classes)


@pytest.mark.parametrize(
    "example",
    [
        torch.zeros(2, 8, dtype=torch.bfloat16),
        torch.zeros(2, 8, device="meta"),
        torch.eye(8).to_sparse(),
        np.array([["a"] * 8]),
        np.array([[None] * 8]),
    ],
    ids=["bfloat16", "meta", "sparse", "texts", "objects"],
)
def test_an_example_that_is_no_plain_array_is_named(tmp_path, nothing_is_traced, example):
    with pytest.raises(ExportError, match=r"example_inputs\['x'\] can't be a request's array") as raised:
        export_bundle(make(Plain), {"x": example}, tmp_path / "b")
    assert "\n" not in str(raised.value)


class Normalised(Plain):
    """Softmax at some exits, as a model made for plain inference has it."""

    def __init__(self, where, function=torch.softmax):
        super().__init__()
        self.where, self.function = where, function

    def forward(self, x):
        return [self.function(z, -1) if j in self.where else z for j, z in enumerate(super().forward(x))]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ((0, 1, 2), "exits 0, 1, 2 of the model seem to return probabilities"),
        ((2,), "exit 2 of the model seems to return probabilities"),
    ],
)
def test_probabilities_instead_of_logits_are_said_once_and_why(tmp_path, where, message):
    with pytest.warns(UserWarning, match=message) as warned:
        bundle = export_bundle(make(Normalised, where), {"x": torch.zeros(1, 8)}, tmp_path / "b")
    (only,) = [w for w in warned if w.category is UserWarning]
    assert "Return logits, without the last softmax" in str(only.message)
    assert "in float32 the surest rows are all 1" in str(only.message)
    assert only.filename == __file__
    with Cascade.load(bundle, threads=1) as cascade:
        assert len(cascade.predict({"x": np.zeros((2, 8), np.float32)})) == 2


def quiet(*arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return export_bundle(*arguments, **options)


@pytest.mark.parametrize("function", [torch.log_softmax, lambda z, _: z.sigmoid(), lambda z, _: z.relu()])
def test_other_scales_are_no_probabilities(tmp_path, function):
    quiet(make(Normalised, (0, 1, 2), function), {"x": torch.randn(3, 8)}, tmp_path / "b")


@pytest.mark.parametrize("exits", [1, 2])
def test_a_model_of_one_exit_is_said_to_save_nothing(tmp_path, exits):
    model = make(Plain, 8, 4, exits)
    if exits > 1:
        quiet(model, {"x": torch.randn(3, 8)}, tmp_path / "b")
        return
    with pytest.warns(UserWarning, match="the model has one exit: no row can leave early"):
        export_bundle(model, {"x": torch.randn(3, 8)}, tmp_path / "b")


def test_the_softmax_that_a_file_ends_in_is_left_out(tmp_path, capsys):
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal((6, 3)).astype(np.float32), "w")]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Softmax", ["z"], ["y"], axis=-1)]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 6])]
    graph = helper.make_graph(
        nodes, "one", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])], weights
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    assert main(["export", str(tmp_path / "m.onnx"), "--out", str(tmp_path / "b")]) == 0
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert said.startswith("offramp: warning: the model has one exit")
    x = rng.standard_normal((4, 6)).astype(np.float32)
    with Cascade.load(tmp_path / "b", threads=1) as cascade:
        np.testing.assert_allclose(cascade.record({"x": x}).logits[0], x @ numpy_helper.to_array(weights[0]), atol=1e-5)


@pytest.mark.parametrize("exits", [1, 2, 3])
def test_one_column_of_logits_is_warned_of(tmp_path, exits):
    with pytest.warns(UserWarning, match=r"exits have one class: every row gets it, with certainty.*zeros_like"):
        export_bundle(make(Plain, 8, 1, exits), torch.randn(3, 8), tmp_path / "b")


@pytest.mark.parametrize("text", ["..", ".", "a/../b", "./a", "a/."])
@pytest.mark.parametrize("field", ["name", "version"])
def test_a_name_that_no_url_can_have_is_refused_before_tracing(tmp_path, nothing_is_traced, field, text):
    with pytest.raises(ExportError, match=rf"the model's {field} is .*clients take the dots out of a URL"):
        export_bundle(make(Plain, 8, 4, 2), torch.randn(3, 8), tmp_path / "b", **{field: text})
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("options", [{"name": 5}, {"version": 2}, {"version": None}], ids=str)
def test_so_is_one_that_is_no_string(tmp_path, nothing_is_traced, options):
    ((field, given),) = options.items()
    with pytest.raises(ExportError, match=f"{field} is {given}, expected a string"):
        export_bundle(make(Plain, 8, 4, 2), torch.randn(3, 8), tmp_path / "b", **options)


class DearHead(Plain):
    """Its first exit has a head larger than the rest of the network."""

    def __init__(self):
        super().__init__(8, 4, 2)
        self.heads[0] = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.Tanh(), torch.nn.Linear(256, 4))


def test_an_exit_that_costs_more_than_a_later_one_is_named(tmp_path):
    with pytest.warns(UserWarning, match=r"exit 0 alone costs 6,272 FLOPs, more than exit 1, which takes 320"):
        export_bundle(make(DearHead), torch.randn(3, 8), tmp_path / "b")
    assert "| exit_1 |" in (tmp_path / "b" / "MODEL_CARD.md").read_text()
