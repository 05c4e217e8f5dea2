"""Heads: a feature is pooled without weights, then classified by two layers."""

from typing import Literal

import torch
from torch import nn
from torch.nn import functional

Pooling = Literal["masked", "tokens", "map", "map_last", "vector"]
# A head of more than this share of the model's FLOPs would eat up what leaving early saves.
_SHARE = 0.01
_LEAST, _MOST = 64, 512


class Head(nn.Module):
    """Pooled features (batch, width) to logits (batch, classes): LayerNorm, a hidden layer, GELU, a linear layer.

    The norm makes features of any block alike, so that one learning rate fits all.
    """

    def __init__(self, width: int, hidden: int, classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, hidden)
        self.classes = nn.Linear(hidden, classes)
        self.dropout = dropout

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(self.norm(pooled), self.dropout, self.training)
        x = functional.dropout(functional.gelu(self.hidden(x)), self.dropout, self.training)
        logits: torch.Tensor = self.classes(x)
        return logits


def hidden_width(width: int, classes: int, flops: int) -> int:
    """As wide as the features, but no head of more than a hundredth of the model's FLOPs, nor narrower than 64."""
    affordable = int(_SHARE * flops / (2 * (width + classes)))
    return max(_LEAST, min(width, _MOST, affordable // 32 * 32))


def pool(feature: torch.Tensor, pooling: Pooling, mask: torch.Tensor | None) -> torch.Tensor:
    """(batch, width) in float32.

    "masked": the mean of a row's tokens (batch, seq, width) that its mask (batch, seq) keeps; "tokens": of all;
    "map": of a map (batch, width, h, w); "map_last": of (batch, h, w, width); "vector": as it is.
    """
    x = feature.float()
    if pooling == "masked":
        assert mask is not None
        keep = mask.to(x.dtype)
        share = keep / keep.sum(1, keepdim=True).clamp(min=1)
        return (x * share[..., None]).sum(1)
    if pooling == "tokens":
        return x.mean(1)
    if pooling == "map":
        return x.mean((2, 3))
    if pooling == "map_last":
        return x.mean((1, 2))
    return x


def pooling_of(shape: list[int], mask: list[int] | None, *, channels_last: bool) -> Pooling | None:
    """How a feature of this shape is pooled; None if it is no vector, tokens or map. mask: the attention mask's shape.

    channels_last: of maps whose shape doesn't tell, since height, width and channels are the same.
    """
    if len(shape) == 2:
        return "vector"
    if len(shape) == 3:
        return "masked" if mask == shape[:2] else "tokens"
    if len(shape) == 4:
        _, first, second, third = shape
        if first == second != third:
            return "map_last"
        return "map_last" if first == second == third and channels_last else "map"
    return None


def width_of(shape: list[int], pooling: Pooling) -> int:
    return shape[1] if pooling in ("map", "vector") else shape[-1]
