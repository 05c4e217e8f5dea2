"""A file that was written for a fixed number of rows answers any number of them as it does those."""

import contextlib
import io
import warnings

import numpy as np
import onnxruntime
import pytest
import torch
from offramp.export import export_bundle
from offramp.runtime import Cascade, ExportError
from torch import nn
from toys import make


class Tokens(nn.Module):
    """A class token beside the patches, positions, and heads taken apart: sizes that exporters write down."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))
        self.mixes = mixes

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        x = x - x.mean(0, keepdim=True) if self.mixes else x
        logits = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            q, k, v = layer(x).reshape(len(x), 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            x = x + ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)
            logits.append(head(x[:, 0]))
        return tuple(logits)


def written(path, rows, *, dynamo, mixes=False):
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            make(Tokens, mixes),
            (torch.randn(rows, 4, 8),),
            path,
            dynamo=dynamo,
            input_names=["x"],
            output_names=["early", "late"],
            opset_version=18,
        )
    return path


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_it_takes_any_number(tmp_path, rows, dynamo):
    path = written(tmp_path / "m.onnx", rows, dynamo=dynamo)
    x = np.random.default_rng(0).standard_normal((6, 4, 8)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    expected = np.concatenate([session.run(["early", "late"], {"x": x[k : k + rows]}) for k in range(0, 6, rows)], 1)
    bundle = export_bundle(path, None, tmp_path / "b")
    with Cascade.load(bundle, threads=1) as cascade:
        assert cascade.manifest.rows_independent
        np.testing.assert_allclose(np.stack(list(cascade.record({"x": x}).logits)), expected, atol=1e-5)
        np.testing.assert_allclose(np.stack(list(cascade.record({"x": x[:5]}).logits)), expected[:, :5], atol=1e-5)


def test_one_whose_rows_depend_on_each_other_is_refused(tmp_path):
    path = written(tmp_path / "m.onnx", 3, dynamo=False, mixes=True)
    with pytest.raises(ExportError, match=r"^the file takes 3 rows at a time, .* depends on the rows beside it .* dyn"):
        export_bundle(path, None, tmp_path / "b")
