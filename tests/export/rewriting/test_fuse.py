"""Attention is fused where the exporter spelt it out, answers stay the same, and nothing depends on it."""

import json

import numpy as np
import onnx
import torch
from offramp.export import export_bundle, exporter
from offramp.runtime import Cascade
from torch import nn
from toys import SEQUENCE, Plain, make


class Attending(nn.Module):
    """Two exits over scaled_dot_product_attention, with a mask."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, dim)
        self.q, self.k, self.v = (nn.ModuleList(nn.Linear(dim, dim) for _ in range(2)) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(dim, 4) for _ in range(2))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor):
        x, (b, n) = self.embed(ids), ids.shape
        bias = (1.0 - mask.float())[:, None, None, :].expand(-1, 1, n, -1) * torch.finfo(torch.float32).min
        logits = []
        for q, k, v, head in zip(self.q, self.k, self.v, self.heads, strict=True):
            split = [f(x).view(b, n, 2, -1).transpose(1, 2) for f in (q, k, v)]
            a = nn.functional.scaled_dot_product_attention(*split, attn_mask=bias)
            x = x + a.transpose(1, 2).reshape(b, n, -1)
            logits.append(3 * head(x[:, 0]))
        return logits


IDS = torch.randint(1, 50, (3, 7), generator=torch.Generator().manual_seed(0))
INPUTS = {"ids": IDS, "mask": (torch.arange(7)[None] < torch.tensor([[7], [5], [3]])).long()}


def kinds(bundle) -> set[str]:
    return {node.op_type for node in onnx.load(bundle / "block_1.onnx", load_external_data=False).graph.node}


def flops(bundle) -> list[str]:
    return [block["flops"] for block in json.loads((bundle / "manifest.json").read_text())["blocks"]]


def test_attention_becomes_one_node_and_costs_and_answers_stay(tmp_path, monkeypatch):
    model = make(Attending)
    fused = export_bundle(model, INPUTS, tmp_path / "fused", dynamic_axes=SEQUENCE)
    monkeypatch.setattr(exporter, "fuse", lambda _: None)
    plain = export_bundle(model, INPUTS, tmp_path / "plain", dynamic_axes=SEQUENCE)
    assert "MultiHeadAttention" in kinds(fused)
    assert "MultiHeadAttention" not in kinds(plain)
    assert flops(fused) == flops(plain)
    arrays = {name: value.numpy() for name, value in INPUTS.items()}
    with Cascade.load(fused, threads=1) as one, Cascade.load(plain, threads=1) as other:
        np.testing.assert_allclose(one.record(arrays).score, other.record(arrays).score, atol=1e-4)


def test_a_fusion_that_fails_verification_is_given_up(tmp_path, monkeypatch):
    wrong = make(Plain, 8, 4, 3)
    broken: list[object] = []

    def spoil(model):
        copy = model.clone()
        for value in copy.graph.initializers.values():
            if value.const_value.dtype.is_floating_point() and value.const_value.size == 64:
                import onnx_ir as ir

                value.const_value = ir.Tensor(value.const_value.numpy() * 1.5, name=value.name)
                broken.append(value.name)
        return copy

    monkeypatch.setattr(exporter, "fuse", spoil)
    said: list[str] = []
    bundle = export_bundle(wrong, {"x": torch.randn(4, 8)}, tmp_path / "b", progress=said.append)
    assert broken
    assert any(line.startswith("without fused operations") for line in said)
    with torch.no_grad():
        x = torch.randn(5, 8)
        expected = np.stack([z.numpy() for z in wrong(x)])
    with Cascade.load(bundle, threads=1) as cascade:
        np.testing.assert_allclose(np.stack(cascade.record({"x": x.numpy()}).logits), expected, atol=1e-5)
