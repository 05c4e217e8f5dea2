"""What kernels ask of a tensor's device: whose it is, whether Triton runs there, and how wide a launch is."""

import os
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Up to here the program that finishes last writes down who stays, beyond that it takes two more launches.
COMPACT_ROWS = 4096


def is_tensor(value: Any) -> bool:
    """Whether it's a torch tensor, without importing torch to ask."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, which takes CPU tensors (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def on_triton(tensor: "torch.Tensor") -> bool:
    """Whether Triton runs kernels on this tensor's device here."""
    return (tensor.is_cuda or interpreting()) and _has_triton()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def power_of_two(n: int) -> int:
    """The smallest power of two that isn't below n."""
    return 1 << max(0, n - 1).bit_length()


def as_bytes(flags: "torch.Tensor") -> "torch.Tensor":
    """A bool tensor as int8, over the same memory."""
    import torch

    return flags if flags.dtype == torch.int8 else flags.view(torch.int8)
