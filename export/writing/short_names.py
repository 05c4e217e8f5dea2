"""Short names for what only a graph itself refers to: of a small model, long ones are a third of the bundle."""

from collections.abc import Callable, Iterator
from itertools import count, product
from string import ascii_letters

import onnx
from offramp.export.graph import subgraphs


def shorten(graph: onnx.GraphProto, *, weights: bool = True) -> None:
    """Rename every value but the graph's own inputs and outputs, in its subgraphs as well, in order of appearance.

    weights: False leaves the graph's own initialisers their names.
    """
    kept = {value.name for value in (*graph.input, *graph.output)}
    kept |= set() if weights else {weight.name for weight in graph.initializer}
    names: dict[str, str] = {"": ""} | {name: name for name in kept}
    fresh = (name for name in _short() if name not in kept)

    def rename(name: str) -> str:
        if name not in names:
            names[name] = next(fresh)
        return names[name]

    _rename(graph, rename)


def _rename(graph: onnx.GraphProto, rename: Callable[[str], str]) -> None:
    for value in (*graph.input, *graph.initializer, *graph.output, *graph.value_info):
        value.name = rename(value.name)
    for node in graph.node:
        node.input[:] = [rename(name) for name in node.input]
        node.output[:] = [rename(name) for name in node.output]
        for inner in subgraphs(node):
            _rename(inner, rename)


def _short() -> Iterator[str]:
    for length in count(1):
        yield from ("".join(letters) for letters in product(ascii_letters, repeat=length))
