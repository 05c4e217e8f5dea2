"""The exit gate in torch's own operations: for CUDA machines without Triton, and what the kernel is timed against."""

import math
from typing import Any

import torch
from offramp.kernels.reference import GateOutput

_LARGEST = torch.finfo(torch.float32).max


def exit_gate(
    logits: torch.Tensor,
    scale: Any = 1.0,
    bias: Any = 0.0,
    inv_temperature: Any = 1.0,
    threshold: float = -math.inf,
    *,
    live: torch.Tensor | None = None,
) -> GateOutput:
    """As `offramp.kernels.exit_gate`, by some thirty operations that each read and write their tensors."""

    def wide(value: Any) -> torch.Tensor:
        return torch.as_tensor(value, dtype=torch.float32, device=logits.device)

    z = logits.float() * wide(scale) + wide(bias)
    unknown = z.isnan().any(1)
    z = z.nan_to_num(-math.inf, math.inf, -math.inf).clamp(-_LARGEST, _LARGEST)
    top, label = _lowest_argmax(z)
    t = wide(inv_temperature).expand(z.shape[1])[label].double()
    rest = z.scatter(1, label[:, None], -math.inf)
    runner_up = rest.amax(1).clamp_min(-_LARGEST)
    behind = ((rest - runner_up[:, None]) * t.float()[:, None]).clamp_min(-200.0)
    odds = torch.where(rest > -math.inf, behind.exp(), 0.0)
    total, weighted = odds.sum(1).double(), (odds * behind).sum(1).double()
    alone = total == 0
    d = torch.where(alone, -_LARGEST, t * (runner_up.double() - top.double()))
    s = torch.where(alone, 1.0, total)
    score = torch.where(alone, _LARGEST, -(d + s.log())).clamp(-_LARGEST, _LARGEST)
    whole = 1 + torch.where(alone, 0.0, d.exp() * s)
    confidence = 1 / whole
    entropy = whole.log() - torch.where(alone, 0.0, d.exp() * (weighted + d * s) / whole)
    margin = (1 - d.exp()) / whole
    single = score.float().masked_fill(unknown, math.nan)
    leave = single.double() >= threshold
    return GateOutput(
        label=label.masked_fill(unknown, -1),
        confidence=confidence.masked_fill(unknown, math.nan),
        score=single,
        entropy=entropy.masked_fill(unknown, math.nan),
        margin=margin.masked_fill(unknown, math.nan),
        leave=leave if live is None else leave & live.bool(),
    )


def _lowest_argmax(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's max doesn't promise which of several equal entries it gives on CUDA."""
    top = z.amax(1)
    places = torch.arange(z.shape[1], device=z.device)
    return top, torch.where(z == top[:, None], places, z.shape[1]).amin(1)
