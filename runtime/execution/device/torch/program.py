"""A bundle's ONNX graph as a list of torch operations.

Not by a converter: onnx2torch, the best-kept one, last saw a release in August 2024, imports torchvision, and doesn't
know the fused operations of com.microsoft; torch itself has no reader of ONNX.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from offramp.runtime.errors import BundleError
from offramp.runtime.execution.device.graphs import Tensors
from offramp.runtime.execution.device.torch.operations import (
    DTYPES,
    ON_HOST,
    OPERATIONS,
    Operation,
    Unsupported,
    out_of_range,
)
from offramp.runtime.files import inside
from torch import Tensor

_OLDEST = 13  # before it, axes and sizes stood elsewhere
_SHAPES = {("", "Shape"), ("", "Size")}  # they look at a tensor without reading it


class Weights:
    """Initialisers on a device, each once however many graphs use it: by where in which file it lies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._files: dict[Path, Any] = {}
        self._tensors: dict[tuple[Any, ...], Tensor] = {}

    def read(self, initializer: Any, graph: Path) -> tuple[Tensor, bool]:
        """An initialiser of a graph file, and whether it is small enough to be kept on the host as well."""
        kind = DTYPES.get(initializer.data_type)
        if kind is None:
            raise BundleError(f"{graph}: the weight {initializer.name!r} has a type that the torch executor lacks.")
        shape = tuple(initializer.dims)
        if initializer.data_location == 1:  # external
            entry = {pair.key: pair.value for pair in initializer.external_data}
            path = inside(graph.parent, entry["location"], where=f"{graph}: {initializer.name}")
            start = int(entry.get("offset", 0))
            key = (path, start, shape, kind)
            if key not in self._tensors:
                data = self._file(path)[start : start + int(entry["length"])]
                self._tensors[key] = self._whole(torch.from_numpy(data.copy()).view(kind), shape, initializer, graph)
            return self._tensors[key], False
        if initializer.raw_data:
            values = torch.frombuffer(bytearray(initializer.raw_data), dtype=kind)
        else:
            from onnx import numpy_helper

            values = torch.from_numpy(np.ascontiguousarray(numpy_helper.to_array(initializer)).reshape(-1).copy())
        return self._whole(values, shape, initializer, graph, keep=True), True

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = np.memmap(path, np.uint8, "r")
            except (OSError, ValueError) as error:
                raise BundleError(f"{path}: can't be read ({error}). Restore it, or export again.") from error
        return self._files[path]

    def _whole(self, flat: Tensor, shape: tuple[int, ...], initializer: Any, graph: Path, keep: bool = False) -> Tensor:
        try:
            return flat.reshape(shape) if keep else flat.reshape(shape).to(self._device)
        except RuntimeError as error:
            raise BundleError(f"{graph}: the weight {initializer.name!r} isn't of its own shape {shape}.") from error


@dataclass(frozen=True)
class Node:
    """One operation. on_host: it only reckons with shapes. checked: its indices come from a caller's values."""

    operation: Operation
    kind: tuple[str, str]
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    on_host: bool
    checked: bool
    host_inputs: frozenset[int]
    done_with: tuple[str, ...] = ()


@dataclass
class Program:
    """A graph, ready to run on a device. Values that shape the computation never touch the device."""

    path: Path
    device: torch.device
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple[Node, ...]
    constants: Tensors  # on the host
    weights: Tensors  # on the device
    _moved: dict[tuple[Any, ...], Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.plan = lru_cache(maxsize=64)(self._plan)
        self._weighty = {value.untyped_storage().data_ptr() for value in self.weights.values()}

    def _plan(self, outputs: tuple[str, ...]) -> tuple[Node, ...]:
        """The steps that some outputs need, each with the values that nobody wants after it."""
        wanted = set(outputs)
        chosen: list[Node] = []
        for step in reversed(self.steps):
            if wanted.intersection(step.outputs):
                chosen.append(step)
                wanted.update(name for name in step.inputs if name)
        seen = set(outputs) | set(self.constants) | set(self.weights)
        plan: list[Node] = []
        for step in chosen:
            last = tuple(name for name in {*step.inputs, *step.outputs} if name and name not in seen)
            seen.update(last)
            plan.append(replace(step, done_with=last))
        return tuple(reversed(plan))

    def run(self, feed: Mapping[str, Tensor], outputs: Sequence[str]) -> tuple[Tensors, Tensor | None]:
        """The outputs by name, contiguous and on the device, and whether an index was out of range (a tensor ()).

        feed: tensors on the device. Nothing waits for the device. Raises BundleError for what torch can't do.
        """
        device: Tensors = {name: feed[name] for name in self.inputs if name in feed}
        host: Tensors = dict(self.constants)
        outside: Tensor | None = None
        with torch.no_grad():
            for step in self.plan(tuple(outputs)):
                given = [self._value(name, k, step, device, host) for k, name in enumerate(step.inputs)]
                try:
                    made = step.operation(given, step.attributes, torch.device("cpu") if step.on_host else self.device)
                    if step.checked:
                        wrong = out_of_range(given, step.attributes)
                        outside = wrong if outside is None else outside | wrong
                except Unsupported as error:
                    raise BundleError(f"{self.path}: the torch executor lacks {error}.") from error
                values = made if isinstance(made, tuple | list) else (made,)
                to = host if step.on_host else device
                to.update((name, v) for name, v in zip(step.outputs, values, strict=False) if name and v is not None)
                for name in step.done_with:
                    device.pop(name, None)
                    host.pop(name, None)
            return self._own({name: self._device(name, device, host).contiguous() for name in outputs}, feed), outside

    def _own(self, made: Tensors, feed: Mapping[str, Tensor]) -> Tensors:
        """Outputs in memory of their own: what is gathered into one of them later must not change a weight."""
        shared = {value.untyped_storage().data_ptr() for value in (*feed.values(), *self.constants.values())}
        shared |= self._weighty
        return {n: v.clone() if v.untyped_storage().data_ptr() in shared else v for n, v in made.items()}

    def _value(self, name: str, k: int, step: Node, device: Tensors, host: Tensors) -> Tensor | None:
        if not name:
            return None
        if step.on_host or k in step.host_inputs:
            # A shape is read off a tensor wherever it is.
            return host[name] if name in host else device[name] if name in device else self.weights[name]
        return self._device(name, device, host)

    def _device(self, name: str, device: Tensors, host: Tensors) -> Tensor:
        if name in device:
            return device[name]
        if name in self.weights:
            return self.weights[name]
        value = host[name]
        if self.device.type == "cpu":
            return value
        # By value: one copy at the first run of these shapes, none afterwards (and none while a graph is captured).
        key = (value.dtype, tuple(value.shape), value.numpy().tobytes())
        if key not in self._moved:
            if len(self._moved) > 4096:
                self._moved.clear()
            self._moved[key] = value.to(self.device)
        return self._moved[key]


def read_program(path: Path, weights: Weights, device: torch.device) -> Program:
    """Read a graph. Every operation it has is known here before any is run.

    Raises BundleError naming the operations (or forms of them) that there is no torch for.
    """
    import onnx

    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:
        raise BundleError(f"{path}: onnx can't read it ({error}). Restore it, or export again.") from error
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if opset < _OLDEST:
        raise BundleError(f"{path}: opset {opset}; the torch executor reads {_OLDEST} and later. Export again.")
    graph = model.graph
    nodes = [(("" if n.domain == "ai.onnx" else n.domain, n.op_type), n) for n in graph.node]
    lacking = Counter(_spelled(kind) for kind, _ in nodes if kind not in OPERATIONS and kind != ("", "Constant"))
    lacking.update(form for kind, node in nodes for form in _odd_forms(kind, node))
    if lacking:
        raise BundleError(
            f"{path}: the torch executor lacks {', '.join(sorted(lacking))}. "
            "Run it with ONNX Runtime: pip install onnxruntime-gpu."
        )
    constants, on_device = _initial(graph, nodes, weights, path)
    names = {n.name for n in graph.input} - set(constants) - set(on_device)
    callers = _straight_from(names, nodes)
    on_host = _on_host([pair for pair in nodes if pair[0] != ("", "Constant")], names, path)
    steps = []
    for kind, node in nodes:
        if kind == ("", "Constant"):
            continue
        outputs = tuple(node.output)
        attributes = {a.name: _attribute(a) for a in node.attribute} | {"outputs": len(outputs)}
        steps.append(
            Node(
                operation=OPERATIONS[kind],
                kind=kind,
                name=node.name,
                inputs=tuple(node.input),
                outputs=outputs,
                attributes=attributes,
                on_host=kind in _SHAPES or bool(on_host.intersection(outputs)),
                checked=kind == ("", "Gather") and node.input[1] in callers,
                host_inputs=frozenset(ON_HOST.get(kind, ())),
            )
        )
    return Program(
        path=path,
        device=device,
        inputs=tuple(i.name for i in graph.input if i.name in names),
        outputs=tuple(o.name for o in graph.output),
        steps=tuple(steps),
        constants=constants,
        weights=on_device,
    )


def _spelled(kind: tuple[str, str]) -> str:
    return f"{kind[0]}.{kind[1]}" if kind[0] else kind[1]


def _odd_forms(kind: tuple[str, str], node: Any) -> list[str]:
    """Forms of known operations that are known not to be served."""
    named = [name for name in node.output if name]
    if kind == ("com.microsoft", "MultiHeadAttention") and (any(node.input[6:]) or len(named) > 1 or not node.input[1]):
        return ["com.microsoft.MultiHeadAttention with a past, or packed"]
    if kind in (("", "LayerNormalization"), ("", "MaxPool"), ("", "BatchNormalization")) and len(named) > 1:
        return [f"{kind[1]} with more than one output"]
    return []


def _initial(graph: Any, nodes: list[Any], weights: Weights, path: Path) -> tuple[Tensors, Tensors]:
    """Initialisers and constants: small ones on the host, to be copied where they are needed; weights on the device."""
    constants: Tensors = {}
    on_device: Tensors = {}
    for initializer in graph.initializer:
        value, small = weights.read(initializer, path)
        (constants if small else on_device)[initializer.name] = value
    for kind, node in nodes:
        if kind == ("", "Constant"):
            attribute = node.attribute[0]
            value = _attribute(attribute)
            if not isinstance(value, Tensor):
                value = torch.tensor(
                    value, dtype=torch.float32 if attribute.name.startswith("value_f") else torch.int64
                )
            constants[node.output[0]] = value
    return constants, on_device


def _attribute(attribute: Any) -> Any:
    from onnx import AttributeProto, numpy_helper
    from onnx.helper import get_attribute_value

    value = get_attribute_value(attribute)
    if attribute.type == AttributeProto.TENSOR:
        return torch.from_numpy(np.array(numpy_helper.to_array(value)))
    if attribute.type == AttributeProto.STRING:
        return value.decode()
    return list(value) if attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS) else value


def _on_host(nodes: list[Any], inputs: set[str], path: Path) -> set[str]:
    """Names of values that shape the computation, or that those are reckoned from.

    Raises BundleError where one depends on a caller's values: then the host would have to wait for the device.
    """
    maker = {name: (kind, node) for kind, node in nodes for name in node.output if name}
    needed = [name for kind, node in nodes for k, name in enumerate(node.input) if name and k in ON_HOST.get(kind, ())]
    found: set[str] = set()
    while needed:
        name = needed.pop()
        if name in found:
            continue
        found.add(name)
        if name in inputs:
            raise BundleError(
                f"{path}: {name!r} is a tensor and shapes the computation; the torch executor can't wait."
            )
        if name in maker:
            kind, node = maker[name]
            if kind not in _SHAPES:
                needed += [n for n in node.input if n]
    return found


def _straight_from(inputs: set[str], nodes: list[Any]) -> set[str]:
    """Names whose values are an input's own entries, reshaped or cast: a caller may have sent anything."""
    found = set(inputs)
    for kind, node in nodes:
        if (
            kind[1] in ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Slice", "Transpose")
            and node.input[0] in found
        ):
            found.update(node.output)
    return found
