"""A block's FLOPs formula equals what torch's FlopCounterMode counts, at several sizes."""

import json

import numpy as np
import pytest
import torch
from offramp.export.dims import Dim
from offramp.export.flops import flops, uncounted
from offramp.export.graph import Op
from offramp.runtime import cost
from onnx import helper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def counted(model, inputs) -> int:
    # The counter knows no flops for the CPU's fused attention; the plain form's two bmm it counts.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    return counter.get_total_flops()


def formula(bundle, sizes) -> int:
    blocks = json.loads((bundle / "manifest.json").read_text())["blocks"]
    return sum(cost.evaluate(block["flops"], sizes) for block in blocks)


@pytest.mark.parametrize(("rows", "length"), [(2, 12), (3, 48), (1, 7)])
def test_minilm(minilm, minilm_bundle, rows, length):
    ids = torch.ones((rows, length), dtype=torch.int64)
    expected = counted(minilm.build(), {"input_ids": ids, "attention_mask": ids})
    assert formula(minilm_bundle, {"batch": rows, "seq": length}) == expected


def test_ar_vit_up_to_the_matrix_vector_products_that_torch_leaves_out(ar_vit, ar_vit_bundle):
    expected = counted(ar_vit.build(), {"x": torch.zeros(2, 3, 32, 32)})
    ours = formula(ar_vit_bundle, {"batch": 2})
    # Every Attention Residual multiplies its states by one query, 2 * 64 tokens * 64 a state; torch counts no mv.
    states = [1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 2, 3, 4]  # of the 12 sub-layers and the 3 exits
    assert ours - expected == 2 * 2 * 64 * 64 * sum(states)


def test_digits_convolutions(digits):
    blocks = json.loads((digits / "manifest.json").read_text())["blocks"]
    positions, width = 64, 48
    convolution, head = 2 * positions * width * 9, 2 * 16 * width * 10
    expected = [convolution + head, 2 * convolution * width + head, 4 * convolution * width + head]
    assert [cost.evaluate(b["flops"], {"batch": 1}) for b in blocks] == expected
    assert np.all(np.array(expected) > 0)


def test_what_cannot_be_counted_is_named_and_what_is_made_of_weights_costs_nothing():
    known = {"x": [Dim(1, ("batch",)), Dim(offset=4)], "w": [Dim(offset=4), Dim(offset=3)], "q": [Dim(offset=1)] * 3}

    def op(kind, *inputs, fixed=False):
        return Op(0, helper.make_node(kind, list(inputs), ["y"]), inputs, ("y",), fixed)

    product = op("MatMul", "x", "w")
    assert uncounted([product], known) == [product]
    assert uncounted([product], {**known, "y": [Dim(1, ("batch",)), Dim(offset=3)]}) == []
    assert uncounted([op("MultiHeadAttention", "q", "q"), op("GRU", "q", "w"), op("Tanh", "y")], known) == []
    folded = op("MatMul", "w", "w", fixed=True)
    assert uncounted([folded], known) == []
    assert str(flops([folded], {**known, "y": [Dim(offset=4)] * 2})) == "0"
