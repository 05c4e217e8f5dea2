"""The module inside what people hand over, and inputs as their forward takes them."""

import numpy as np
import pytest
import torch
from offramp.export import export_bundle
from offramp.export.tracing.unwrap import as_module, name_inputs, uncompiled
from offramp.runtime import Cascade, ExportError
from torch import nn
from toys import Plain, make


@pytest.mark.parametrize(
    "wrap",
    [lambda m: m, torch.compile, nn.DataParallel, lambda m: nn.DataParallel(torch.compile(m)), lambda m: m.forward],
    ids=["itself", "compiled", "parallel", "both", "bound"],
)
def test_the_module_is_found(wrap):
    model = make(Plain)
    assert as_module(wrap(model)) is model


class BertForTokenClassification(nn.Linear):
    pass


class GPT2LMHeadModel(nn.Linear):
    pass


class FasterRCNN(nn.Linear):
    pass


def of_problem(kind):
    model = make(Plain)
    model.config = type("Config", (), {"problem_type": kind})()
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Plain, r"model is the class Plain: give an instance of it, Plain\(…\).eval\(\)"),
        (lambda x: [x], "model is a function: expected a torch.nn.Module, in whose forward you call it"),
        (torch.jit.script(nn.Linear(2, 2)), "model is a RecursiveScriptModule, .* give the torch.nn.Module it was"),
        (torch.export.export(nn.Linear(2, 2), (torch.zeros(3, 2),)), "model is a ExportedProgram, .* ONNX file"),
        ({"state": 1}, r"model is a dict: expected a torch.nn.Module, {\"blocks\": \[...\], .*, or the path"),
        (make(Plain).bfloat16(), r"blocks\.0\.0\.weight is bfloat16, .* give model.float\(\)"),
        (nn.Linear(2, 2, device="meta"), "weight is on the meta device"),
        (of_problem("multi_label_classification"), "Plain is a multi-label model"),
        (of_problem("regression"), "Plain is a regression model"),
        (BertForTokenClassification(2, 2), "BertForTokenClassification gives one answer a token"),
        (GPT2LMHeadModel(2, 2), "GPT2LMHeadModel gives generated text"),
        (FasterRCNN(2, 2), "FasterRCNN gives boxes"),
    ],
)
def test_what_is_no_classifier_of_rows_or_no_module_is_told_the_way_out(model, message):
    with pytest.raises(ExportError, match=message) as raised:
        as_module(model)
    assert "\n" not in str(raised.value)


def test_compiling_is_put_off_and_no_more():
    model = make(Plain)
    model.blocks[0].compile()
    call = model.blocks[0].__dict__["_compiled_call_impl"]
    with uncompiled(model):
        assert model.blocks[0].__dict__["_compiled_call_impl"] is None
    assert model.blocks[0].__dict__["_compiled_call_impl"] is call


class Anything(nn.Module):
    """Hands on whatever it is given."""

    def forward(self, *args, **kwargs):
        return args, kwargs


X, Y = torch.zeros(3, 8), torch.ones(3, 8)


@pytest.mark.parametrize(
    ("example", "names", "arguments", "keywords"),
    [
        (X, ["input_0"], (X,), {}),
        ((X, Y), ["input_0", "input_1"], (X, Y), {}),
        ({"x": X, "mask": None, "deep": True, "size": 3}, ["x"], (), {"x": X, "mask": None, "deep": True, "size": 3}),
        ({"batch": {"a": X, "b": Y}}, ["batch.a", "batch.b"], (), {"batch": {"a": X, "b": Y}}),
        (([X, Y],), ["input_0.0", "input_0.1"], ([X, Y],), {}),
        ({"xs": (X, [Y])}, ["xs.0", "xs.1.0"], (), {"xs": (X, [Y])}),
    ],
)
def test_forward_gets_what_the_example_says_by_names_that_say_where(example, names, arguments, keywords):
    model, tensors = name_inputs(Anything(), example)
    assert list(tensors) == names
    given, named = model(**tensors)
    assert str(given) == str(arguments)
    assert str(named) == str(keywords)


def test_a_plain_forward_is_left_as_it_is():
    model = make(Plain)
    assert name_inputs(model, X)[0] is model
    assert list(name_inputs(model, X)[1]) == ["x"]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"x": [1.0, 2.0]}, r"example_inputs\['x'\] is a list, expected a tensor"),
        ({"x": None}, "example_inputs is empty"),
        ("x", "example_inputs is a str"),
        ((X, Y), "example_inputs has 2 tensors, forward takes 1"),
    ],
)
def test_an_example_that_is_none_is_named(example, message):
    with pytest.raises(ExportError, match=message):
        name_inputs(make(Plain), example)


class Nested(Plain):
    """Its inputs in a mapping, its exits in one tensor."""

    def forward(self, batch, deep):
        return torch.stack(super().forward(batch["a"] + batch["b"])), {"a": batch["a"]}


def test_a_model_of_nested_inputs_and_stacked_exits_is_cut_between_them(tmp_path):
    model = make(Nested)
    bundle = export_bundle(model, {"batch": {"a": X, "b": Y}, "deep": True}, tmp_path / "b")
    a, b = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
    with Cascade.load(bundle, threads=1) as cascade:
        assert [given.name for given in cascade.manifest.inputs] == ["batch.a", "batch.b"]
        assert [block.flops for block in cascade.manifest.blocks] == ["batch*(192)"] * 3
        logits = cascade.record({"batch.a": a, "batch.b": b}).logits
    with torch.no_grad():
        expected, _ = model({"a": torch.from_numpy(a), "b": torch.from_numpy(b)}, deep=True)
    np.testing.assert_allclose(np.stack(list(logits)), expected.numpy(), atol=1e-5)
