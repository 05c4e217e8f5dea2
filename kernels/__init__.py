"""offramp.kernels: what happens between two blocks on a GPU. numpy's form is beside each kernel, and is its oracle.

`exit_gate` decides, `compact` lists who goes on, `gather` moves their state. Arrays are served by numpy, CUDA tensors
by Triton; a machine without either never imports torch or triton.
"""

from offramp.kernels.compact import compact, gather
from offramp.kernels.exit_gate import exit_gate
from offramp.kernels.reference import GateOutput, Survivors

__all__ = ["GateOutput", "Survivors", "compact", "exit_gate", "gather"]
