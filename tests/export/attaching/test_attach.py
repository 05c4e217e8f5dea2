"""Exits on a classifier of one exit: it stays as it is, bit for bit, and its blocks are found whatever its family."""

from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest
import torch
from classifiers import HUGGING_FACE, hugging_face, layers, library, rows
from offramp.export import attach_exits
from offramp.export.attaching.attached import logits_of
from offramp.export.attaching.blocks import Block, evenly, look
from offramp.runtime import Cascade, ExportError


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def check_last_exit_is_the_model(model, attached):
    before, hooks = state(model), [len(vars(part)["_forward_hooks"]) for part in model.modules()]
    with torch.no_grad():
        *early, last = attached(**attached.about.example_inputs)
        own = logits_of(model(**attached.about.example_inputs))
    assert torch.equal(last, own)
    assert all(exit_.shape == own.shape for exit_ in early)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [len(vars(part)["_forward_hooks"]) for part in model.modules()] == hooks


@pytest.mark.parametrize("family", HUGGING_FACE)
def test_every_family_of_hugging_faces_gets_exits_behind_its_blocks(family):
    model = hugging_face(family)
    attached = attach_exits(model)
    check_last_exit_is_the_model(model, attached)
    shares = [tap.share for tap in attached.taps]
    assert len(shares) >= 3
    assert shares == sorted(shares)
    assert attached.about.classes == ["LABEL_0", "LABEL_1", "LABEL_2"]


@pytest.mark.parametrize(("name", "heads"), [("resnet10t", 3), ("vit_tiny_patch16_224", 5), ("convnext_atto", 5)])
def test_timms_models_get_exits_and_their_data_config(name, heads):
    model = library("timm").create_model(name, num_classes=3).eval()
    attached = attach_exits(model)
    check_last_exit_is_the_model(model, attached)
    assert len(attached.taps) == heads
    assert attached.about.preprocess["mean"] == list(model.pretrained_cfg["mean"])


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_torchvisions_models_get_exits(name):
    model = getattr(library("torchvision.models"), name)(num_classes=3).eval()
    check_last_exit_is_the_model(model, attach_exits(model))


def test_any_module_gets_exits_where_it_is_told_and_only_the_heads_follow_train():
    model = layers()
    attached = attach_exits(model, ["layers.2", "layers.0"], list("abcd"), example_inputs={"x": rows()})
    check_last_exit_is_the_model(model, attached)
    assert [tap.name for tap in attached.taps] == ["layers.0", "layers.2"]
    attached.train()
    assert all(head.training for head in attached.heads)
    assert not model.training


def test_numbers_name_the_blocks_that_are_found():
    model = layers()
    blocks, _, _ = look(model, {"x": rows()})
    attached = attach_exits(model, [1], example_inputs=rows())
    assert [tap.name for tap in attached.taps] == [blocks[1].tap] == ["layers.1"]


def test_blocks_are_taken_where_the_flops_split_evenly():
    blocks = [Block(str(k), k / 10) for k in range(1, 10)]
    assert evenly(blocks, 4) == ["2", "4", "6", "8"]
    assert evenly(blocks[:2], 4) == ["1", "2"]


def test_an_attention_mask_decides_which_tokens_a_head_sees():
    attached = attach_exits(hugging_face("Bert"))
    ids = torch.randint(5, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    with torch.no_grad():
        padded = attached.pooled(input_ids=ids, attention_mask=mask)
        alone = attached.pooled(input_ids=ids[1:, :5], attention_mask=mask[1:, :5])
    for one, other in zip(padded, alone, strict=True):
        assert torch.allclose(one[1], other[0], atol=1e-5)


def test_a_shared_layer_is_told_by_its_calls():
    attached = attach_exits(hugging_face("Albert"))
    assert [tap.name.rpartition("#")[2] for tap in attached.taps] == ["0", "1", "2"]


def test_heads_start_alike_for_a_seed_and_the_random_generator_stays_where_it_was():
    before = torch.get_rng_state()
    one, same, other = (attach_exits(layers(), example_inputs=rows(), seed=seed) for seed in (0, 0, 1))
    after = torch.get_rng_state()
    layers()
    weights = [attached.heads[0].hidden.weight for attached in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert len(before) == len(after)


def test_a_model_with_heads_becomes_a_bundle_that_says_what_the_model_says(tmp_path):
    model = hugging_face("DistilBert", n_layers=2)
    attached = attach_exits(model)
    attached.export(tmp_path / "bundle")
    given = {name: tensor.numpy() for name, tensor in attached.about.example_inputs.items()}
    with torch.no_grad():
        expected = [exit_.numpy() for exit_ in attached(**attached.about.example_inputs)]
    with Cascade.load(tmp_path / "bundle") as cascade:
        assert cascade.classes == ["LABEL_0", "LABEL_1", "LABEL_2"]
        np.testing.assert_allclose(np.stack(cascade.record(given).logits), np.stack(expected), atol=1e-5)


class Several(torch.nn.Module):
    """A classifier that returns several tensors."""

    def __init__(self, returned):
        super().__init__()
        self.layers, self.head, self.returned = layers().layers, torch.nn.Linear(8, 4), returned

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.returned(x, self.head(x))


@pytest.mark.parametrize(
    "returned",
    [
        lambda x, z: (z, 2 * z, 3 * z),
        lambda x, z: [x, z, 2 * z][1:],
        lambda x, z: {"exit_0": z, "exit_1": 2 * z},
        lambda x, z: (z, {"more": x}, 2 * z),
    ],
)
def test_a_model_that_has_exits_already_is_not_taken_for_one_that_has_none(returned):
    with pytest.raises(ExportError, match=r"tensors of the shape \[\d+, 4\], so it has exits already: export it"):
        attach_exits(Several(returned).eval(), ["layers.0"], example_inputs={"x": rows()})


def test_what_a_model_returns_beside_its_logits_is_no_exit():
    model = Several(lambda x, z: (z, x)).eval()
    check_last_exit_is_the_model(model, attach_exits(model, ["layers.0"], example_inputs={"x": rows()}))


def test_one_logit_a_row_is_told_the_way_out():
    model = Several(lambda x, z: z[:, :1]).eval()
    with pytest.raises(ExportError, match=r"gives one logit a row.*torch\.zeros_like"):
        attach_exits(model, ["layers.0"], example_inputs={"x": rows()})


def part(*sizes):
    pairs = ((torch.nn.Linear(a, b), torch.nn.ReLU()) for a, b in pairwise(sizes))
    return torch.nn.Sequential(*(one for pair in pairs for one in pair))


@pytest.mark.parametrize(
    ("parts", "behind"),
    [
        ({"stem": (8, 8), "one": (8, 8, 8), "two": (8, 8, 8), "fc": (8, 4)}, ["stem", "one", "two"]),
        ({"stem": (8, 8), "body": (8, 8, 8, 8, 8, 8), "fc": (8, 4)}, [f"body.{k}" for k in (1, 3, 5, 7, 9)]),
        ({"only": (8, 8, 8, 8), "fc": (8, 4)}, ["only.1", "only.3", "only.5"]),
    ],
    ids=["stages", "a long part", "one part"],
)
def test_a_model_without_a_class_of_its_own_is_left_behind_its_parts(parts, behind):
    model = torch.nn.Sequential(OrderedDict((name, part(*sizes)) for name, sizes in parts.items())).eval()
    attached = attach_exits(model, example_inputs={"input": rows()})
    assert [tap.name for tap in attached.taps] == behind


def test_any_submodule_is_known_by_its_share_of_the_flops():
    stem, tail = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(2))
    model = torch.nn.Sequential(OrderedDict(stem=stem, tail=tail, fc=torch.nn.Linear(8, 4))).eval()
    attached = attach_exits(model, ["stem", "stem.0", "tail"], example_inputs={"input": rows()})
    shares = {tap.name: tap.share for tap in attached.taps}
    assert shares == pytest.approx({"stem.0": 0.4, "stem": 0.4, "tail": 0.8})  # of 64 + 64 + 32 products a row


def test_a_name_that_is_not_there_is_told_those_that_are():
    with pytest.raises(ExportError, match=r"'nope'.*Any submodule's name goes: .*layers.*found by themselves: layers"):
        attach_exits(layers(), ["nope"], example_inputs={"x": rows()})


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda t: t.BertForTokenClassification, "answers for each token"),
        (lambda t: t.BertForMaskedLM, "fills in words"),
        (lambda t: t.BertForQuestionAnswering, "marks places in a text"),
        (lambda t: t.BertModel, "has no classifier"),
    ],
)
def test_models_of_other_tasks_are_refused_by_name(make, named):
    transformers = library("transformers")
    config = transformers.BertConfig(**{k: v for k, v in HUGGING_FACE["Bert"].items() if k != "num_labels"})
    with pytest.raises(ExportError, match=named):
        attach_exits(make(transformers)(config).eval())


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"problem_type": "multi_label_classification"}, "several labels"), ({"num_labels": 1}, "estimates a number")],
)
def test_classifiers_of_several_labels_or_of_numbers_are_refused(settings, named):
    with pytest.raises(ExportError, match=named):
        attach_exits(hugging_face("Bert", **settings))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: attach_exits(layers().train(), example_inputs=rows()), "in training mode"),
        (lambda: attach_exits(layers()), "example_inputs is missing"),
        (lambda: attach_exits("checkpoint that is nowhere"), "no such folder"),
        (lambda: attach_exits(3), "expected a torch.nn.Module"),
        (lambda: attach_exits(layers(), ["layer.0"], example_inputs=rows()), "at names 'layer.0', which"),
        (lambda: attach_exits(layers(), [9], example_inputs=rows()), "at has the block 9"),
        (lambda: attach_exits(layers(), "layers.0", example_inputs=rows()), "expected a list"),
        (lambda: attach_exits(layers(), ["layers.0#2"], example_inputs=rows()), "or not so often"),
        (lambda: attach_exits(layers(), [0, "layers.0"], example_inputs=rows()), "names a block twice"),
        (lambda: attach_exits(layers(), classes=["a"], example_inputs=rows()), "1 names, the model gives 4"),
        (lambda: attach_exits(Tokens().eval(), example_inputs=torch.rand(2, 3, 4)), r"expected \[batch, classes\]"),
        (lambda: attach_exits(layers(), example_inputs=torch.rand(2, 3)), "fails on the example inputs"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(call, named):
    with pytest.raises(ExportError, match=named) as failure:
        call()
    assert "\n" not in str(failure.value)
