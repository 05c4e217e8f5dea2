"""Blocks and heads that lie apart are a model."""

import numpy as np
import pytest
import torch
from offramp.export import export_bundle
from offramp.export.tracing.chain import as_chain
from offramp.runtime import Cascade, ExportError
from torch import nn
from toys import SEQUENCE, Plain, make


class Layer(nn.Module):
    """Takes the mask of the model's inputs beside what the block before it gave."""

    def __init__(self, out: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(8, out)

    def forward(self, state, mask):
        return torch.tanh(self.linear(state)) * mask[..., None]


class Pool(Layer):
    def forward(self, state, mask):
        return super().forward(state, mask).sum(1) / mask.sum(1, keepdim=True)


def apart():
    """Three blocks, the first of which has no exit."""
    torch.manual_seed(0)
    return {"blocks": [nn.Embedding(20, 8), Layer(), Layer()], "heads": [None, Pool(3), Pool(3)]}


MASK = (torch.arange(6)[None] < torch.tensor([[6], [4], [2]])).long()
INPUTS = {"ids": torch.randint(1, 20, (3, 6), generator=torch.Generator().manual_seed(0)), "mask": MASK}


def test_they_are_cut_and_answer_as_they_do_in_series(tmp_path):
    parts = apart()
    bundle = export_bundle(parts, INPUTS, tmp_path / "b", dynamic_axes=SEQUENCE)
    (embed, first, second), (_, early, late) = parts["blocks"], parts["heads"]
    with torch.no_grad():
        one = first(embed(INPUTS["ids"]), MASK)
        expected = early(one, MASK), late(second(one, MASK), MASK)
    with Cascade.load(bundle, threads=1) as cascade:
        assert [given.name for given in cascade.manifest.inputs] == ["ids", "mask"]
        logits = cascade.record({name: value.numpy() for name, value in INPUTS.items()}).logits
    np.testing.assert_allclose(np.stack(list(logits)), torch.stack(expected).numpy(), atol=1e-5)
    assert embed.training


@pytest.mark.parametrize("example", [torch.zeros(3, 8), {"x": torch.zeros(3, 8)}, (torch.zeros(3, 8),)])
def test_the_first_block_gets_what_nobody_names(tmp_path, example):
    model = make(Plain)
    parts = nn.ModuleDict({"blocks": model.blocks, "heads": model.heads})
    bundle = export_bundle(parts, example, tmp_path / "b")
    with Cascade.load(bundle, threads=1) as cascade:
        assert len(cascade.manifest.exits) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": []}, "heads is a list, expected a list of modules"),
        ({"blocks": 3}, "blocks is a int, expected a list of modules"),
        ({"blocks": [len, None, None]}, r"blocks\[0\] is a builtin_function_or_method, expected a torch.nn.Module"),
        ({"heads": [nn.Linear(2, 2)]}, "3 blocks and 1 heads: expected a head for each block, None where it has no"),
        ({"heads": [nn.Linear(2, 2), None, None]}, "the last has one"),
    ],
)
def test_parts_that_make_no_model_are_named(change, message):
    with pytest.raises(ExportError, match=message):
        as_chain(apart() | change)


@pytest.mark.parametrize("model", [{"blocks": []}, [], nn.Linear(2, 2), nn.ModuleDict({"a": nn.Linear(2, 2)})])
def test_nothing_else_is_taken_for_parts(model):
    assert as_chain(model) is None
