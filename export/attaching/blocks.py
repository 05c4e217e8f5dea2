"""Where a model can be left: its blocks, found by running it once, with the FLOPs spent until then."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from offramp.export.attaching.taps import CALL, tensor_of
from offramp.runtime.errors import ExportError
from torch.utils.flop_counter import FlopCounterMode

Inputs = Mapping[str, torch.Tensor]
# Stages of a picture network are fewer; an encoder's layers are more.
_FEW = 6
# An exit later than this saves nothing.
_LATEST = 0.95
# Of a stage's FLOPs, what its inner blocks must have for them to be taken in its place.
_MOST = 0.8
EXITS = 5
"""Heads that are attached where nobody says how many."""


@dataclass(frozen=True)
class Block:
    """A call of a submodule: its tap, and the share of the model's FLOPs that is spent when it ends, in [0, 1]."""

    tap: str
    share: float


@dataclass(frozen=True)
class Call:
    """A call of a submodule, and the FLOPs that the model had spent when it began and when it ended."""

    name: str
    number: int
    module: torch.nn.Module
    begun: int
    ended: int
    rows: bool  # whether it gives a float tensor with the batch first

    @property
    def flops(self) -> int:
        return self.ended - self.begun


def look(model: torch.nn.Module, inputs: Inputs) -> tuple[list[Block], dict[str, float], int]:
    """The model's blocks (see `find_blocks`); the share of its FLOPs that is spent when a tap ends, of every tap; and
    the FLOPs of all rows.

    Raises ExportError if the model fails on the inputs.
    """
    calls, total = _run(model, inputs)
    ends = {f"{call.name}{CALL}{call.number}": call.ended / total for call in calls} if total else {}
    first = {name.removesuffix(f"{CALL}0"): share for name, share in ends.items() if name.endswith(f"{CALL}0")}
    return find_blocks(calls, total), ends | first, total


def find_blocks(calls: Sequence[Call], total: int) -> list[Block]:
    """The model's blocks in the order in which they run, those that end too late to save anything left out.

    calls: of its submodules, in the order of their ends. total: the model's FLOPs.

    Blocks are the outermost parts of a class that the model uses several times: an encoder's layers, a network's
    residual units. Where these are a few stages made of blocks, they are the stages' blocks. A model without such a
    class has the parts of the module in it that has most places to leave from.
    """
    if not total:
        return []
    chosen = _repeated(calls) or _listed(calls, total)
    often = Counter(call.name for call in calls)
    blocks: dict[int, Block] = {}
    for call in sorted(chosen, key=lambda c: c.ended):
        if call.flops and call.rows and call.ended <= _LATEST * total:
            tap = f"{call.name}{CALL}{call.number}" if often[call.name] > 1 else call.name
            blocks[call.ended] = Block(tap, call.ended / total)
    return list(blocks.values())


def evenly(blocks: Sequence[Block], exits: int = EXITS) -> list[str]:
    """Taps of the blocks that split the FLOPs most evenly: nearest to 1/(exits + 1), 2/(exits + 1), … of them."""
    count = min(exits, len(blocks))
    left = list(blocks)
    chosen = []
    for k in range(1, count + 1):
        nearest = min(left, key=lambda b: abs(b.share - k / (count + 1)))
        chosen.append(nearest)
        left.remove(nearest)
    return [block.tap for block in sorted(chosen, key=lambda b: b.share)]


def _run(model: torch.nn.Module, inputs: Inputs) -> tuple[list[Call], int]:
    """Every call of a submodule, in the order of their ends, and the FLOPs of all."""
    counter = FlopCounterMode(display=False)
    rows = next(iter(inputs.values())).shape[0]
    begun: dict[str, list[int]] = {}
    numbers: Counter[str] = Counter()
    calls: list[Call] = []
    handles = []

    def hook(name: str, part: torch.nn.Module) -> None:
        def enter(*_: Any) -> None:
            begun.setdefault(name, []).append(counter.get_total_flops())

        def leave(_: Any, __: Any, output: Any) -> None:
            tensor = tensor_of(output)
            fits = tensor is not None and tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape[0] == rows
            calls.append(Call(name, numbers[name], part, begun[name].pop(), counter.get_total_flops(), fits))
            numbers[name] += 1

        handles.append(part.register_forward_pre_hook(enter))
        handles.append(part.register_forward_hook(leave))

    for name, part in model.named_modules():
        if name:
            hook(name, part)
    try:
        with torch.no_grad(), counter:
            model(**inputs)
    except Exception as error:  # the user's own code may raise anything
        raise ExportError(f"the model fails on the example inputs: {type(error).__name__}: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    return calls, counter.get_total_flops()


def _repeated(calls: Sequence[Call]) -> list[Call]:
    """Outermost calls of classes that are called several times and are made of parts; stages taken apart."""
    own = [call for call in calls if _is_made(call.module)]
    often = Counter(type(call.module) for call in own)
    several = [call for call in own if often[type(call.module)] > 1]
    names = {call.name for call in several}
    outer = [call for call in several if not any(above in names for above in _above(call.name))]
    if len(outer) >= _FEW:
        return outer
    return [part for stage in outer for part in _inside(stage, several)]


def _is_made(module: torch.nn.Module) -> bool:
    """Whether it is of a class of the model's own, with parts."""
    return not type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is not None


def _inside(stage: Call, several: Sequence[Call]) -> list[Call]:
    """The blocks listed in a stage, if they are most of it; else the stage itself."""
    listed = [
        call
        for call in several
        if call.name.startswith(f"{stage.name}.")
        and call.name.rpartition(".")[2].isdecimal()
        and call.name.count(".") - stage.name.count(".") <= 2
    ]
    return listed if listed and sum(call.flops for call in listed) >= _MOST * stage.flops else [stage]


def _listed(calls: Sequence[Call], total: int) -> list[Call]:
    """The parts of that module which has most places to leave from, or of several, of that which spends most FLOPs.

    Each part with what follows it up to the next that spends any. A module that spends less than half of the FLOPs
    isn't asked, unless all do.
    """
    within: dict[str, list[Call]] = {}
    for call in calls:
        within.setdefault(call.name.rpartition(".")[0], []).append(call)
    spent = {name: sum(call.flops for call in parts) for name, parts in within.items()}
    large = {name: parts for name, parts in within.items() if 2 * spent[name] >= total} or within
    if not large:
        return []

    def places(parts: Sequence[Call]) -> int:
        return len({call.ended for call in parts if call.flops and call.rows and call.ended <= _LATEST * total})

    chosen = max(large, key=lambda name: (min(places(large[name]), EXITS), spent[name]))
    # What ends at the same count of FLOPs comes later and is preferred: the activation behind a convolution.
    last = {call.ended: call for call in large[chosen]}
    begun = {call.ended: call.begun for call in large[chosen] if call.flops}
    return [Call(c.name, c.number, c.module, begun.get(c.ended, c.begun), c.ended, c.rows) for c in last.values()]


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(1, len(parts))]
