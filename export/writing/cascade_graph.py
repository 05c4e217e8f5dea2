"""The whole cascade as one ONNX graph: every gate's decision, and the compaction after it, inside the graph.

After an exit's gate the rows that stay are gathered, and the next block runs on them inside an `If` that asks
whether any are left. One call of ONNX Runtime then does what a session a block did with Python in between:
measured, the way from one session to the next costs some 0.2 ms in cold caches, threads to be woken and
Python, which at batch 1 was a third of MiniLM's time.

    block 0 -> head 0 -> If(anybody left): gather -> block 1 -> head 1 -> If(anybody left): ...

One input beside the model's, with an entry for every exit but the last: the thresholds; at +inf an exit is closed
and its head doesn't run. Outputs, one entry a row in the order of the rows: label, score, the exit that the row left
from, and its logits there. So whoever has ONNX Runtime, in any language, has the whole cascade.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from offramp.runtime.bundle import CASCADE_INPUTS, CASCADE_OUTPUTS
from offramp.runtime.errors import ExportError
from onnx import TensorProto, helper

_KINDS = ("label", "score", "exit", "logits")  # as in CASCADE_OUTPUTS
_FIRST_AXIS = "cascade.first_axis"
_NEVER = "cascade.never"
_OWN = re.compile(r"cascade\.|(block|exit)_\d+\.")  # how the graph's own values begin
_LEAST_IR = 4  # before, every weight had to be an input as well, which a subgraph has none of


def _threshold(k: int) -> str:
    return f"exit_{k}.threshold"


def _open(k: int) -> str:
    return f"exit_{k}.open"


class CascadeGraphWriter:
    """Nests the graphs of a bundle's blocks into one."""

    def __init__(self, document: Mapping[str, Any], protos: list[onnx.ModelProto]) -> None:
        """document: the manifest. protos: one a block, in order, each ending in an exit with a plain gate."""
        self._document = document
        self._protos = protos
        self._classes = len(document["classes"])
        self._axes = {name: tensor["batch_axis"] for name, tensor in document["tensors"].items()} | {
            given["name"]: given["shape"].index("batch") for given in document["inputs"]
        }

    def proto(self) -> onnx.ModelProto:
        first = self._protos[0]
        given = {i.name: i for p in self._protos for i in p.graph.input}
        inputs = [given.get(i["name"]) or _unused(i) for i in self._document["inputs"]]
        taken = [i.name for i in inputs if i.name in (*CASCADE_INPUTS, *CASCADE_OUTPUTS) or _OWN.match(i.name)]
        if taken:
            raise ExportError(f"the model has an input {taken[0]!r}, which is what the cascade graph calls its own.")
        early = len(self._protos) - 1
        (bars,) = CASCADE_INPUTS
        inputs.append(helper.make_tensor_value_info(bars, TensorProto.FLOAT, [early]))
        switches = [
            helper.make_node("Less", [bars, _NEVER], ["cascade.open"]),
            helper.make_node("Split", [bars], [_threshold(j) for j in range(early)], axis=0, num_outputs=early),
            helper.make_node("Split", ["cascade.open"], [_open(j) for j in range(early)], axis=0, num_outputs=early),
        ]
        names = {i["name"]: i["name"] for i in self._document["inputs"]}
        nodes, weights = self._from_block(0, names, CASCADE_OUTPUTS)
        constants = [
            helper.make_tensor(_FIRST_AXIS, TensorProto.INT64, [1], [0]),
            helper.make_tensor(_NEVER, TensorProto.FLOAT, [], [math.inf]),
        ]
        body = helper.make_graph(
            [*switches, *nodes], "cascade", inputs, self._answers(CASCADE_OUTPUTS), [*weights, *constants]
        )
        return helper.make_model(
            body,
            producer_name="offramp",
            ir_version=max(first.ir_version, _LEAST_IR),
            opset_imports=first.opset_import,
        )

    def _answers(self, names: tuple[str, ...]) -> list[onnx.ValueInfoProto]:
        kinds = (TensorProto.INT64, TensorProto.FLOAT, TensorProto.INT32, TensorProto.FLOAT)
        shapes: list[list[Any]] = [["batch"], ["batch"], ["batch"], ["batch", self._classes]]
        if names != CASCADE_OUTPUTS:  # fewer rows than in the batch
            shapes = [[None], [None], [None], [None, self._classes]]
        return [helper.make_tensor_value_info(*v) for v in zip(names, kinds, shapes, strict=True)]

    def _from_block(
        self, k: int, names: Mapping[str, str], answers: tuple[str, ...]
    ) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
        """Nodes and weights from block k on. names: what the state in front of it is called in this scope.

        Weights stand in the very subgraph that uses them: ONNX Runtime doesn't pack those of an outer one.
        """
        proto, exit_ = self._protos[k].graph, self._document["exits"][k]
        rename = _Renamer(proto, f"block_{k}.", names)
        prefix = f"exit_{k}."
        nodes = [rename.node(n) for n in proto.node]
        label, score, logits = (rename(exit_[kind]) for kind in ("label", "score", "logits"))
        here = [label, score, f"{prefix}exit", logits]
        if k == len(self._protos) - 1:
            nodes = _needed(nodes, [label, score, logits])
            nodes += _same_for_all(k, label, here[2], prefix)
            nodes += [helper.make_node("Identity", [a], [b]) for a, b in zip(here, answers, strict=True)]
            return nodes, rename.weights(nodes)
        follow = {name: rename(name) for name in self._following(k)}
        trunk = _needed(nodes, follow.values())
        there = {id(n) for n in trunk}
        head = [n for n in _needed(nodes, [label, score, logits]) if id(n) not in there]
        # ONNX has a name once at all depths: what trunk and head both use gets another one in the head.
        again = {name: prefix + name for name in rename.weights_of(trunk) & rename.weights_of(head)}
        head = [_reading(n, again) for n in head]
        here = [again.get(name, name) for name in here]
        head += _same_for_all(k, here[0], here[2], prefix)
        asked, told = self._ask(k, prefix, head, here, next(iter(follow.items())), rename.weights(head, again))
        stays, *here = told
        left = helper.make_node("Size", [stays], [prefix + "left"])
        anybody = helper.make_node("Cast", [prefix + "left"], [prefix + "anybody"], to=TensorProto.BOOL)
        inner = {name: f"{prefix}stays.{name}" for name in follow}
        go_on = [
            helper.make_node("Gather", [now, stays], [inner[name]], axis=self._axes[name])
            for name, now in follow.items()
        ]
        later = tuple(f"{prefix}later.{kind}" for kind in _KINDS)
        more, weights = self._from_block(k + 1, inner, later)
        every = tuple(f"{prefix}every.{kind}" for kind in _KINDS)
        joined = self._join(k, prefix, stays, here, later, every)
        only = tuple(f"{prefix}only.{kind}" for kind in _KINDS)
        done = [helper.make_node("Identity", [a], [b]) for a, b in zip(here, only, strict=True)]
        branch = helper.make_node(
            "If",
            [prefix + "anybody"],
            list(answers),
            then_branch=helper.make_graph([*go_on, *more, joined], f"{prefix}on", [], self._answers(every), weights),
            else_branch=helper.make_graph(done, f"{prefix}done", [], self._answers(only)),
        )
        return [*trunk, asked, left, anybody, branch], rename.weights(trunk)

    def _join(
        self,
        k: int,
        prefix: str,
        stays: str,
        here: list[str],
        later: tuple[str, ...],
        every: tuple[str, ...],
    ) -> onnx.NodeProto:
        """The answers of the rows that left here, and in their places those of the rows that went on."""
        at = prefix + "places"
        mixed = tuple(f"{prefix}mixed.{kind}" for kind in _KINDS)
        places = [_constant(prefix + "column", TensorProto.INT64, [1], [1])]
        places += [helper.make_node("Unsqueeze", [stays, prefix + "column"], [at])]
        scattered = [helper.make_node("ScatterND", [a, at, b], [c]) for a, b, c in zip(here, later, mixed, strict=True)]
        passed = tuple(f"{prefix}passed.{kind}" for kind in _KINDS)
        identity = [helper.make_node("Identity", [a], [b]) for a, b in zip(later, passed, strict=True)]
        return helper.make_node(
            "If",
            [_open(k)],
            list(every),
            then_branch=helper.make_graph([*places, *scattered], f"{prefix}mix", [], self._answers(mixed)),
            else_branch=helper.make_graph(identity, f"{prefix}pass", [], self._answers(passed)),
        )

    def _following(self, k: int) -> list[str]:
        """The state behind block k, whatever later blocks take of it."""
        blocks = self._document["blocks"]
        made = {name for block in blocks[: k + 1] for name in block["outputs"]}
        made |= {given["name"] for given in self._document["inputs"]}
        return list(dict.fromkeys(name for block in blocks[k + 1 :] for name in block["inputs"] if name in made))

    def _ask(
        self,
        k: int,
        prefix: str,
        head: list[onnx.NodeProto],
        reached: list[str],
        state: tuple[str, str],
        weights: list[onnx.TensorProto],
    ) -> tuple[onnx.NodeProto, tuple[str, ...]]:
        """The head and the decision, if the exit is open; else everybody stays. Row numbers, then an answer's kinds."""
        score = reached[1]
        made = {name for n in head for name in n.output}
        # What the trunk made, as the logits of a head that a later one adds to, can't be given back as it is.
        given = [name if name in made else f"{prefix}given.{kind}" for kind, name in enumerate(reached)]
        asked = [
            *head,
            *(helper.make_node("Identity", [a], [b]) for a, b in zip(reached, given, strict=True) if a != b),
            helper.make_node("GreaterOrEqual", [score, _threshold(k)], [prefix + "leaves"]),
            helper.make_node("Not", [prefix + "leaves"], [prefix + "stay"]),
            helper.make_node("NonZero", [prefix + "stay"], [prefix + "rows"]),
            helper.make_node("Squeeze", [prefix + "rows", _FIRST_AXIS], [prefix + "stays"]),
        ]
        name, now = state
        axis = self._axes[name]
        passed = [prefix + "shut." + kind for kind in ("stays", *_KINDS)]
        shut = [
            helper.make_node("Shape", [now], [prefix + "shut.shape"], start=axis, end=axis + 1),
            helper.make_node("Squeeze", [prefix + "shut.shape", _FIRST_AXIS], [prefix + "shut.count"]),
            _constant(prefix + "shut.zero", TensorProto.INT64, [], [0]),
            _constant(prefix + "shut.one", TensorProto.INT64, [], [1]),
            helper.make_node("Range", [prefix + "shut.zero", prefix + "shut.count", prefix + "shut.one"], [passed[0]]),
            _constant(passed[1], TensorProto.INT64, [0], []),
            _constant(passed[2], TensorProto.FLOAT, [0], []),
            _constant(passed[3], TensorProto.INT32, [0], []),
            _constant(passed[4], TensorProto.FLOAT, [0, self._classes], []),
        ]
        told = tuple(prefix + kind for kind in ("who", *(f"here.{kind}" for kind in _KINDS)))

        def values(names: Iterable[str]) -> list[onnx.ValueInfoProto]:
            first, *rest = names
            return [helper.make_tensor_value_info(first, TensorProto.INT64, [None]), *self._answers(tuple(rest))]

        node = helper.make_node(
            "If",
            [_open(k)],
            list(told),
            then_branch=helper.make_graph(asked, f"{prefix}asked", [], values([prefix + "stays", *given]), weights),
            else_branch=helper.make_graph(shut, f"{prefix}shut", [], values(passed)),
        )
        return node, told


def _unused(given: Mapping[str, Any]) -> onnx.ValueInfoProto:
    """An input that the model takes and no block reads: whoever runs a bundle gives it all the same."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(given["dtype"]))
    return helper.make_tensor_value_info(given["name"], kind, given["shape"])


def _same_for_all(k: int, label: str, exit: str, prefix: str) -> list[onnx.NodeProto]:
    """Exit k, once for each label."""
    number = helper.make_tensor("number", TensorProto.INT32, [1], [k])
    return [
        helper.make_node("Shape", [label], [prefix + "count"]),
        helper.make_node("ConstantOfShape", [prefix + "count"], [exit], value=number),
    ]


class _Renamer:
    """Names of one block's graph, made its own: in nested graphs no name may be used twice."""

    def __init__(self, graph: onnx.GraphProto, prefix: str, names: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._outer = {**names, "": ""}
        self._weights = {w.name: w for w in graph.initializer}
        self._made = {name for n in graph.node for name in n.output} - {""}

    def __call__(self, name: str) -> str:
        if name in self._made or name in self._weights:
            return self._prefix + name
        return self._outer.get(name, self._prefix + name)

    def node(self, node: onnx.NodeProto) -> onnx.NodeProto:
        new = onnx.NodeProto()
        new.CopyFrom(node)
        new.name = ""
        new.input[:] = [self(name) for name in node.input]
        new.output[:] = [self(name) if name else "" for name in node.output]
        for attribute in new.attribute:
            for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                self._subgraph(graph)
        return new

    def _subgraph(self, graph: onnx.GraphProto) -> None:
        for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
            value.name = self(value.name)
        nodes = [self.node(n) for n in graph.node]
        del graph.node[:]
        graph.node.extend(nodes)

    def weights_of(self, nodes: Iterable[onnx.NodeProto]) -> set[str]:
        """New names of the block's weights that these nodes use."""
        used = {name for n in nodes for name in _reads(n)}
        return {self._prefix + name for name in self._weights} & used

    def weights(
        self, nodes: Iterable[onnx.NodeProto], again: Mapping[str, str] | None = None
    ) -> list[onnx.TensorProto]:
        """The block's weights that these nodes use. again: other names for some of them."""
        names = {self._prefix + name: name for name in self._weights} | {
            other: name.removeprefix(self._prefix) for name, other in (again or {}).items()
        }
        used = {name for n in nodes for name in _reads(n)}
        found = []
        for called, name in names.items():
            if called in used:
                new = onnx.TensorProto()
                new.CopyFrom(self._weights[name])
                new.name = called
                found.append(new)
        return found


def _reading(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """A node that reads some values by other names, in its subgraphs as well."""
    if not names:
        return node
    new = onnx.NodeProto()
    new.CopyFrom(node)
    new.input[:] = [names.get(name, name) for name in node.input]
    for attribute in new.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            inside = [_reading(n, names) for n in graph.node]
            del graph.node[:]
            graph.node.extend(inside)
    return new


def _reads(node: onnx.NodeProto) -> set[str]:
    """What a node reads, its subgraphs included."""
    names = set(node.input)
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            names |= {name for n in graph.node for name in _reads(n)} | {o.name for o in graph.output}
    return names - {""}


def _needed(nodes: list[onnx.NodeProto], wanted: Iterable[str]) -> list[onnx.NodeProto]:
    """The nodes that the wanted values need, in their order."""
    names, kept = set(wanted), []
    for node in reversed(nodes):
        if names & set(node.output):
            names |= _reads(node)
            kept.append(node)
    return kept[::-1]


def _constant(name: str, dtype: int, shape: list[int], values: list[int]) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, dtype, shape, values))
