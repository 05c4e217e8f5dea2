"""Small multi-exit models, each with one trait that has broken exporters."""

from typing import Any

import torch
from torch import nn


class Plain(nn.Module):
    """Three exits over a vector: the simplest multi-exit model there is."""

    def __init__(self, width: int = 8, classes: int = 4, exits: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(exits))
        self.heads = nn.ModuleList(nn.Linear(width, classes) for _ in range(exits))

    def forward(self, x: torch.Tensor) -> Any:
        logits = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = x + block(x)
            logits.append(3 * head(x))
        return logits


# The axes of a model that takes ids and their mask.
SEQUENCE = {"ids": {0: "batch", 1: "seq"}, "mask": {0: "batch", 1: "seq"}}


class Masked(nn.Module):
    """A small transformer with an attention mask bias that broadcasts to [batch, 1, seq, seq]."""

    def __init__(self, dim: int = 16, heads: int = 2, vocab: int = 50, classes: int = 5, exits: int = 3) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, dim), nn.Embedding(64, dim)
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(exits))
        self.out = nn.ModuleList(nn.Linear(dim, dim) for _ in range(exits))
        self.heads = nn.ModuleList(nn.Linear(dim, classes) for _ in range(exits))
        self.count = heads

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        b, n = ids.shape
        x = self.embed(ids) + self.position(torch.arange(n, device=ids.device))
        keep = mask.to(x.dtype)
        bias = (1 - keep)[:, None, None, :].expand(b, 1, n, n) * -1e9
        logits = []
        for qkv, out, head in zip(self.qkv, self.out, self.heads, strict=True):
            q, k, v = qkv(x).view(b, n, 3, self.count, -1).permute(2, 0, 3, 1, 4).unbind(0)
            attended = ((q @ k.transpose(-1, -2)) / 4 + bias).softmax(-1) @ v
            x = x + out(attended.transpose(1, 2).reshape(b, n, -1))
            logits.append(4 * head((x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)))
        return tuple(logits)


class Unmasked(nn.Module):
    """Sequence in, mean over all positions out: padding shows."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(dim, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        logits = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = torch.relu(block(x))
            logits.append(head(x.mean(1)))
        return logits


class BatchSecond(nn.Module):
    """States are stacked in front, so the batch is axis 1 of what is carried."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(dim, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        states = x[None]  # [T, batch, dim]
        logits, routing = [], []
        for mix, head in zip(self.mix, self.heads, strict=True):
            weight = states.sum(-1, keepdim=True).softmax(0)
            h = (weight * states).sum(0)
            routing.append(-(weight * weight.clamp_min(1e-9).log()).sum((0, 2)))
            states = torch.cat([states, torch.tanh(mix(h))[None]])
            logits.append(2 * head(states.sum(0)))
        return {"logits": logits, "routing": routing}


class Flattened(nn.Module):
    """Tokens of all rows in one long axis from the start to the end: no cut has a batch axis."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(dim, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        b, n, d = x.shape
        flat = x.reshape(b * n, d)
        logits = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            flat = torch.relu(block(flat))
            logits.append(head(flat.view(b, n, d).mean(1)))
        return logits


class Everything(nn.Module):
    """All kinds of auxiliary outputs, a boosted head (exit 1 adds to exit 0's logits) and shared weights."""

    def __init__(self, dim: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.shared, self.heads = nn.Linear(dim, dim), nn.ModuleList(nn.Linear(dim, classes) for _ in range(2))
        self.sure = nn.Linear(dim, 1)

    def forward(self, x: torch.Tensor) -> Any:
        from offramp.export import MultiExitOutput

        first = torch.tanh(self.shared(x))
        second = torch.tanh(self.shared(first))
        zero = self.heads[0](first)
        return MultiExitOutput(
            logits=[zero, zero + self.heads[1](second)],
            features=[first, second],
            routing=[first.mean(1), second.mean(1)],
            external=[self.sure(first)[:, 0], self.sure(second)[:, 0]],
            reservation=[first[:, 0], second[:, 0]],
        )


class HalfLogits(Plain):
    """Logits in float16, as a mixed-precision head gives them."""

    def forward(self, x: torch.Tensor) -> Any:
        return [z.half() for z in super().forward(x)]


class CrossRow(nn.Module):
    """Normalises over the batch, as a BatchNorm left in training mode does."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.norm, self.blocks = nn.BatchNorm1d(dim), nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(dim, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        x = x - x.mean(0, keepdim=True) * 0.5
        logits = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = torch.relu(block(x))
            logits.append(head(x))
        return logits


class Dropping(Plain):
    """Random at every call."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(nn.functional.dropout(x, 0.5, training=True))


class LastToken(nn.Module):
    """Reads each row at its own last position: an index made of the row's number and its length."""

    def __init__(self, dim: int = 8, vocab: int = 50, exits: int = 3) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(vocab, dim), nn.ModuleList(nn.Linear(dim, dim) for _ in range(exits))
        self.heads = nn.ModuleList(nn.Linear(dim, 4) for _ in range(exits))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        x, rows, last = self.embed(ids), torch.arange(ids.shape[0]), mask.sum(1) - 1
        logits = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = x + torch.tanh(block(x)).cumsum(1) / 10
            logits.append(3 * head(x[rows, last]))
        return logits


class Encoder(nn.Module):
    """torch's own encoder layers, whose padding mask is a bias of -inf."""

    def __init__(self, dim: int = 16, exits: int = 2) -> None:
        super().__init__()
        self.embed, self.heads = nn.Embedding(50, dim), nn.ModuleList(nn.Linear(dim, 4) for _ in range(exits))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 2, 2 * dim, batch_first=True, norm_first=True) for _ in range(exits)
        )

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        x, logits = self.embed(ids), []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x, src_key_padding_mask=mask == 0)
            logits.append(3 * head(x[:, 0]))
        return logits


class Windows(nn.Module):
    """Attention in windows: [batch * windows, tokens, width] inside a block, rows of their own between blocks."""

    def __init__(self, dim: int = 8, exits: int = 2) -> None:
        super().__init__()
        self.mix, self.heads = (
            nn.ModuleList(nn.Linear(dim, dim) for _ in range(exits)),
            nn.ModuleList(nn.Linear(dim, 3) for _ in range(exits)),
        )

    def forward(self, x: torch.Tensor) -> Any:
        b, h, w, d = x.shape
        logits = []
        for mix, head in zip(self.mix, self.heads, strict=True):
            windows = x.view(b, h // 2, 2, w // 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, d)
            windows = windows + torch.tanh(mix(windows.mean(1, keepdim=True)))
            x = windows.view(b, h // 2, w // 2, 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, d)
            logits.append(head(x.mean((1, 2))))
        return logits


class MultiScale(nn.Module):
    """Two resolutions carried at once, growing lists of states, convolutions: an MSDNet in small."""

    def __init__(self, width: int = 4, classes: int = 3, depth: int = 3) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, 2, 1)
        self.fine = nn.ModuleList(nn.Conv2d(width * (i + 1), width, 3, padding=1) for i in range(depth))
        self.coarse = nn.ModuleList(nn.Conv2d(width * (2 * i + 1), width, 3, padding=1) for i in range(depth))
        self.skip = nn.ModuleList(nn.Conv2d(width * (i + 1), width, 3, 2, 1) for i in range(depth))
        self.heads = nn.ModuleList(nn.Linear(width, classes) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> Any:
        fine = [torch.relu(self.stem(x))]
        coarse = [torch.relu(self.down(fine[0]))]
        logits = []
        for a, b, c, head in zip(self.fine, self.coarse, self.skip, self.heads, strict=True):
            everything = torch.cat(fine, 1)
            low = torch.cat(coarse, 1)
            fine.append(torch.relu(a(everything)))
            new = torch.relu(b(low))
            coarse += [new, torch.relu(c(everything))]
            logits.append(head(new.mean((2, 3))))
        return logits


def make(kind: type[nn.Module], *args: Any) -> nn.Module:
    """The model with seeded weights, in eval mode."""
    torch.manual_seed(0)
    return kind(*args).eval()
