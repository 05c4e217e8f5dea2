"""torch's TransformerEncoder has a path of its own for padded rows: what it makes of padding is nobody's fault."""

import warnings

import numpy as np
import pytest
import torch
from offramp.export import export_bundle
from offramp.runtime import Cascade
from torch import nn

EXAMPLE = {
    "ids": torch.randint(1, 50, (3, 6)),
    "mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 2 + [0] * 4]),
}
AXES = {name: {0: "batch", 1: "seq"} for name in EXAMPLE}


class Padded(nn.Module):
    def __init__(self, *, nested, batch_first, norm_first, depth):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.batch_first = nn.Embedding(50, 16), batch_first

        def encoder():
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first, norm_first=norm_first)
            return layer if not depth else nn.TransformerEncoder(layer, depth, enable_nested_tensor=nested)

        self.encoders = nn.ModuleList(encoder() for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))

    def forward(self, ids, mask):
        x, logits = self.words(ids), []
        share = (mask / mask.sum(1, keepdim=True))[..., None].to(x.dtype)
        for encoder, head in zip(self.encoders, self.heads, strict=True):
            y = encoder(x if self.batch_first else x.transpose(0, 1), src_key_padding_mask=mask == 0)
            x = y if self.batch_first else y.transpose(0, 1)
            logits.append(head((x * share).sum(1)))
        return logits


@pytest.mark.parametrize(
    ("nested", "batch_first", "norm_first", "depth"),
    [
        pytest.param(True, True, False, 1, marks=pytest.mark.slow),
        (True, True, False, 2),
        pytest.param(False, True, False, 1, marks=pytest.mark.slow),
        (False, False, False, 1),
        (False, True, True, 1),
        (False, True, False, 0),
    ],
)
def test_padded_rows_of_an_encoder_go_through(tmp_path, nested, batch_first, norm_first, depth):
    model = Padded(nested=nested, batch_first=batch_first, norm_first=norm_first, depth=depth).eval()
    fast = torch.backends.mha.get_fastpath_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of nested tensors
        bundle = export_bundle(model, EXAMPLE, tmp_path / "b", dynamic_axes=AXES)
        with torch.no_grad():
            expected = model(**EXAMPLE)
    assert torch.backends.mha.get_fastpath_enabled() == fast
    with Cascade.load(bundle) as cascade:
        records = cascade.record({name: value.numpy() for name, value in EXAMPLE.items()})
    for got, wanted in zip(records.logits, expected, strict=True):
        np.testing.assert_allclose(got, wanted.numpy(), atol=1e-4)
