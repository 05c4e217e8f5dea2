"""What a training goes on from: arrays of weights and of an optimiser's moments, in one .npz; no pickle."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

Arrays = Mapping[str, np.ndarray[Any, Any]]
_MOMENT = "moment."


def prefixed(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def tensors_under(prefix: str, arrays: Arrays) -> dict[str, torch.Tensor]:
    """What `prefixed` named, by its own names."""
    return {n.removeprefix(prefix): torch.from_numpy(a) for n, a in arrays.items() if n.startswith(prefix)}


def moments_of(optimiser: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{_MOMENT}{k}.{name}": torch.as_tensor(value)
        for k, moments in optimiser.state_dict()["state"].items()
        for name, value in moments.items()
    }


def restore_moments(optimiser: torch.optim.Optimizer, arrays: Arrays) -> None:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors_under(_MOMENT, arrays).items():
        number, _, kind = name.partition(".")
        state.setdefault(int(number), {})[kind] = tensor
    optimiser.load_state_dict({**optimiser.state_dict(), "state": state})
