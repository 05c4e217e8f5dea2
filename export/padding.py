"""May rows of different lengths share a batch? Each sequence axis is tried with adversarial padding.

A row is run at its own length, then filled up: inputs with a pad value, carried tensors with what the
blocks themselves put there. Only if the answer stays the same whatever else stands in the padded places
are the pad values recorded.
"""

from typing import Any

import numpy as np
from offramp.export.probe import Inputs, Probe
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import OfframpError

_TOLERANCE = 1e-4
_CANDIDATES = (0.0, 1.0)


def pad_values(cascade: Cascade, probe: Probe, rng: np.random.Generator) -> dict[str, float]:
    """{tensor: pad value} for every input and carried tensor with a sequence axis; {} if padding shows.

    All axes beside the batch are padded together; an input or carried tensor without one needs no value.
    """
    axes = [a for a in cascade.manifest.axes if a != "batch"]
    if not axes:
        return {}
    return _Padding(cascade, probe, rng, axes).find()


class _Padding:
    def __init__(self, cascade: Cascade, probe: Probe, rng: np.random.Generator, axes: list[str]) -> None:
        self._cascade = cascade
        self._rng = rng
        self._axes = axes
        manifest = cascade.manifest
        self._shapes = {i.name: i.shape for i in manifest.inputs} | {n: t.shape for n, t in manifest.tensors.items()}
        longest = {a: max(sizes[a] for sizes, _ in probe.runs) for a in axes}
        shortest = {a: min(sizes[a] for sizes, _ in probe.runs) for a in axes}
        self._short = {**shortest, "batch": 4}
        self._long = {**longest, "batch": 4}
        self._inputs = probe.inputs(self._short)

    def find(self) -> dict[str, float]:
        if any(self._short[a] == self._long[a] for a in self._axes):
            return {}
        short = self._chain(self._inputs)
        if short is None:
            return {}
        padded_inputs = [n for n in self._inputs if self._has_axis(n)]
        for value in _CANDIDATES:
            pads = dict.fromkeys(padded_inputs, value)
            # What the network itself makes of padding is the pad value of each carried tensor.
            long = self._chain({n: self._pad(n, a, pads.get(n)) for n, a in self._inputs.items()})
            if long is None or not _same(short[-1], long[-1]):
                continue
            pads |= {n: self._value_in_padding(n, states) for n, states in self._carried(long).items()}
            if self._holds(pads, short):
                return pads
        return {}

    def _run(self, block: int, state: dict[str, Any]) -> dict[str, Any] | None:
        """One block; None where the values make it fail, as padding may (an index past the end)."""
        try:
            graph = self._cascade.manifest.blocks[block]
            return self._cascade.run_graph(graph, state, graph.outputs)
        except OfframpError:
            return None

    def _has_axis(self, name: str) -> bool:
        return any(isinstance(d, str) and d != "batch" for d in self._shapes[name])

    def _carried(self, chain: list[dict[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for outputs in chain:
            made |= {n: v for n, v in outputs.items() if n in self._cascade.manifest.tensors and self._has_axis(n)}
        return made

    def _chain(self, inputs: Inputs) -> list[dict[str, Any]] | None:
        """All blocks in series; the outputs of each, the last with every logits. None if they can't run."""
        manifest, state = self._cascade.manifest, dict(inputs)
        results = []
        logits: dict[str, Any] = {}
        for k in range(len(manifest.blocks)):
            made = self._run(k, state)
            if made is None:
                return None
            state |= made
            results.append(made)
            logits |= {e.logits: made[e.logits] for e in manifest.exits if e.logits in made}
        results.append(logits)
        return results

    def _target(self, name: str, sizes: dict[str, int]) -> list[int]:
        from offramp.runtime.cost import evaluate

        return [d if isinstance(d, int) else evaluate(d, sizes) for d in self._shapes[name]]

    def _pad(self, name: str, array: Any, value: float | None, noise: bool = False) -> Any:
        """The array filled up from its own size to the long one; `noise` puts anything in the new places."""
        target = self._target(name, {**self._long, "batch": self._short["batch"]})
        if list(array.shape) == target:
            return array
        out = np.full(target, value or 0, array.dtype)
        if noise:
            out = self._noise(out)
        out[tuple(slice(0, n) for n in array.shape)] = array
        return out

    def _noise(self, like: Any) -> Any:
        if like.dtype.kind == "f":
            return (self._rng.standard_normal(like.shape) * 30).astype(like.dtype)
        if like.dtype.kind == "b":
            return self._rng.random(like.shape) < 0.5
        highest = max(2, int(max(a.max(initial=1) for a in self._inputs.values() if a.dtype.kind in "iu")))
        return self._rng.integers(0, highest, like.shape).astype(like.dtype)

    def _value_in_padding(self, name: str, long: Any) -> float:
        inside = np.ones(long.shape, np.bool_)
        inside[tuple(slice(0, n) for n in self._target(name, self._short))] = False
        values = np.unique(long[inside])
        return float(values[0]) if len(values) == 1 else 0.0

    def _holds(self, pads: dict[str, float], short: list[dict[str, Any]]) -> bool:
        """The same answers after every cut, with pad values, and with noise wherever noise does no harm."""
        harmless = set()
        for name in pads:  # a mask's own padding must be what it is; everything under it may be anything
            noisy = self._restart(pads, short, {name})
            if noisy is not None and _same(short[-1], noisy):
                harmless.add(name)
        for _ in range(3):
            together = self._restart(pads, short, harmless)
            if together is None or not _same(short[-1], together):
                return False
        return True

    def _restart(self, pads: dict[str, float], short: list[dict[str, Any]], noisy: set[str]) -> dict[str, Any] | None:
        """Every block run on padded copies of what the short chain carried into it; all logits."""
        manifest = self._cascade.manifest
        state: dict[str, Any] = dict(self._inputs)
        logits: dict[str, Any] = {}
        for k, block in enumerate(manifest.blocks):
            padded = {n: self._pad(n, state[n], pads.get(n), n in noisy) for n in block.inputs}
            made = self._run(k, padded)
            if made is None:
                return None
            logits |= {e.logits: made[e.logits] for e in manifest.exits if e.logits in made}
            state |= short[k]
        return logits


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    for name, value in a.items():
        scale = max(1.0, float(np.abs(value).max(initial=0.0)))
        if not np.abs(value - b[name]).max(initial=0.0) <= _TOLERANCE * scale:
            return False
    return True
