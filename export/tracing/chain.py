"""Blocks and heads that lie apart, as the one module that they are together."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from offramp.runtime.errors import ExportError

_PARTS = {"blocks", "heads"}


class Chain(torch.nn.Module):
    """Each block takes what the one before it gave, and each head what its block gave; None is a block without an exit.

    An input of the model goes to every part whose forward has a parameter of its name, a mask that all layers take for
    instance; what nobody names goes to the first block, in the order of the inputs.
    """

    def __init__(self, blocks: Sequence[torch.nn.Module], heads: Sequence[torch.nn.Module | None]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)
        self.heads = torch.nn.ModuleDict({str(k): head for k, head in enumerate(heads) if head is not None})

    def forward(self, **inputs: Any) -> list[Any]:
        first, *rest = self.blocks
        named = {name for part in (*rest, *self.heads.values()) for name in _further(part)}
        own = _parameters(first)
        free = [value for name, value in inputs.items() if name not in own and name not in named]
        state = first(*free, **{name: value for name, value in inputs.items() if name in own})
        logits = []
        for k, block in enumerate(self.blocks):
            state = block(state, **_wanted(block, inputs)) if k else state
            if str(k) in self.heads:
                head = self.heads[str(k)]
                logits.append(head(state, **_wanted(head, inputs)))
        return logits


def as_chain(model: Any) -> Chain | None:
    """The module that {"blocks": […], "heads": […]} are; None for anything else.

    Raises ExportError for parts that aren't modules, or not as many heads as blocks.
    """
    if not isinstance(model, Mapping | torch.nn.ModuleDict) or set(model.keys()) != _PARTS:
        return None
    parts = {}
    for name in sorted(_PARTS):
        given = model[name]
        if not isinstance(given, Sequence | torch.nn.ModuleList | torch.nn.Sequential) or not len(given):
            raise ExportError(f"{name} is a {type(given).__name__}, expected a list of modules, one at least.")
        parts[name] = list(given)
        for k, part in enumerate(parts[name]):
            if not isinstance(part, torch.nn.Module) and not (part is None and name == "heads"):
                raise ExportError(f"{name}[{k}] is a {type(part).__name__}, expected a torch.nn.Module.")
    blocks, heads = parts["blocks"], parts["heads"]
    if len(blocks) != len(heads) or heads[-1] is None:
        raise ExportError(
            f"there are {len(blocks)} blocks and {len(heads)} heads: expected a head for each block, None where it has "
            "no exit; the last has one."
        )
    chain = Chain(blocks, heads)
    chain.training = False  # of its parts each is asked by itself
    return chain


def _parameters(part: torch.nn.Module) -> list[str]:
    """The names by which a forward takes what it is given."""
    taken = inspect.signature(part.forward).parameters.values()
    return [p.name for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _further(part: torch.nn.Module) -> list[str]:
    """Those beside the first, which is what the block before it gave."""
    return _parameters(part)[1:]


def _wanted(part: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: inputs[name] for name in _further(part) if name in inputs}
