"""Submodules of a model as places to look at: what they give while it runs, without a change to it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from offramp.runtime.errors import ExportError

CALL = "#"
"""Between a submodule's name and the number of its call, from 0 on, where it is called more than once."""


def parse(tap: str) -> tuple[str, int]:
    """'encoder.layer.0' is its first call, 'albert.layers.0#3' its fourth."""
    name, found, call = tap.rpartition(CALL)
    if not found:
        return tap, 0
    if not (call.isascii() and call.isdecimal()):
        raise ExportError(f"at: {tap!r} ends in {CALL}{call}, expected the number of a call, such as {name}{CALL}0.")
    return name, int(call)


def tensor_of(output: Any) -> torch.Tensor | None:
    """The tensor that a block hands on: its output, or the first of several."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):  # Hugging Face's outputs are
        output = list(output.values())
    if isinstance(output, Sequence) and output:
        return tensor_of(output[0])
    return None


@contextmanager
def tapped(model: torch.nn.Module, taps: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    """What the taps gave, by name, once the model has run inside `with`; its hooks are as they were afterwards."""
    found: dict[str, torch.Tensor] = {}
    wanted: dict[str, dict[int, str]] = {}
    for tap in taps:
        name, call = parse(tap)
        wanted.setdefault(name, {})[call] = tap
    with ExitStack() as hooked:
        for name, calls in wanted.items():
            hook = _Hook(calls, found)
            hooked.callback(model.get_submodule(name).register_forward_hook(hook).remove)
        yield found


class _Hook:
    def __init__(self, calls: Mapping[int, str], found: dict[str, torch.Tensor]) -> None:
        self._calls, self._found, self._count = calls, found, 0

    def __call__(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        tap = self._calls.get(self._count)
        self._count += 1
        if tap is not None and (tensor := tensor_of(output)) is not None:
            self._found[tap] = tensor
