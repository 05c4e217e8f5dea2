"""Kernels for GPUs, with their numpy reference beside them."""
