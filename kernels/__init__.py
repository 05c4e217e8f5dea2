"""offramp.kernels: the exit gate outside a graph. For now its numpy form, which GPU kernels will be held to."""

from offramp.kernels.reference import GateOutput, exit_gate

__all__ = ["GateOutput", "exit_gate"]
