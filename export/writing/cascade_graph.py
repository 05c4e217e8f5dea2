"""The whole cascade as one ONNX graph: every gate's decision, and the compaction after it, inside the graph.

After an exit's gate the rows that stay are gathered, and the next block runs on them inside an `If` that asks
whether any are left. One call of ONNX Runtime then does what a session a block did with Python in between:
measured, the way from one session to the next costs some 0.2 ms in cold caches, threads to be woken and
Python, which at batch 1 was a third of MiniLM's time.

    block 0 -> head 0 -> If(anybody left): gather -> block 1 -> head 1 -> If(anybody left): ...

One input beside the model's, the thresholds: a row for each row of the batch or one for all of them, with an entry for
every exit but the last. At +inf a row doesn't leave there, and if none of those that got there may, the head doesn't
run; at -inf every row leaves, one with a NaN score too. Outputs, one entry a row in the order of the rows: label,
score, the exit that the row left from, and its logits there. So whoever has ONNX Runtime, in any language, has the
whole cascade.

The same graph with two outputs more keeps what every exit said of the rows that reached it, one exit after the other
and each exit's rows in the order of the batch: scores, and logits. Exit 0 stands there closed as well, with zeros. It
is another file over the same weights, for whoever doesn't ask would pay for it all the same: 2.5 us, of the 90 that a
row takes which leaves the digits' CNN at exit 0 (AMD EPYC VM, one thread, 2026-11-29).
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from offramp.export.writing.short_names import shorten
from offramp.runtime.bundle import CASCADE_INPUTS, CASCADE_OUTPUTS, EVERY_EXIT_OUTPUTS
from offramp.runtime.errors import ExportError
from onnx import TensorProto, helper

_KINDS = ("label", "score", "exit", "logits")  # as in CASCADE_OUTPUTS
_REACHED = {"reached_scores": "score", "reached_logits": "logits"}  # EVERY_EXIT_OUTPUTS, of which kind
_ALWAYS = "cascade.always"
_OWN = re.compile(r"cascade\.|(block|exit)_\d+\.")  # how the graph's own values begin
_LEAST_IR = 4  # before, every weight had to be an input as well, which a subgraph has none of


@dataclass(frozen=True)
class _Rows:
    """The rows in front of a block, by the names of their values in its scope.

    state: what the block takes, by the manifest's names. bars: their thresholds; as they were given in front of the
    first block, and a row for each behind it. places: (n, 1) where they are in the batch; "" in front of the first
    block, where they are all of it. so_far: the answers of the whole batch, to be written over for these rows, and what
    is kept of every exit before, to be appended to.
    """

    state: Mapping[str, str]
    bars: str
    places: str = ""
    so_far: tuple[str, ...] = ()


class CascadeGraphWriter:
    """Nests the graphs of a bundle's blocks into one."""

    def __init__(self, document: Mapping[str, Any], protos: list[onnx.ModelProto], *, every_exit: bool = False) -> None:
        """document: the manifest. protos: one a block, in order, each ending in an exit with a plain gate.

        every_exit: whether it gives EVERY_EXIT_OUTPUTS, too.
        """
        self._outputs = (*CASCADE_OUTPUTS, *(EVERY_EXIT_OUTPUTS if every_exit else ()))
        self._kinds = (*_KINDS, *(_REACHED if every_exit else ()))
        self._document = document
        self._protos = protos
        self._last = len(protos) - 1
        self._classes = len(document["classes"])
        self._axes = {name: tensor["batch_axis"] for name, tensor in document["tensors"].items()} | {
            given["name"]: given["shape"].index("batch") for given in document["inputs"]
        }

    def proto(self) -> onnx.ModelProto:
        first = self._protos[0]
        given = {i.name: i for p in self._protos for i in p.graph.input}
        inputs = [given.get(i["name"]) or _unused(i) for i in self._document["inputs"]]
        taken = [i.name for i in inputs if i.name in (*CASCADE_INPUTS, *self._outputs) or _OWN.match(i.name)]
        if taken:
            raise ExportError(f"the model has an input {taken[0]!r}, which is what the cascade graph calls its own.")
        (bars,) = CASCADE_INPUTS
        inputs.append(helper.make_tensor_value_info(bars, TensorProto.FLOAT, [None, self._last]))
        state = {i["name"]: i["name"] for i in self._document["inputs"]}
        try:
            nodes, weights = self._from_block(0, _Rows(state, bars), self._outputs)
        except DecodeError as error:  # protobuf reads messages inside messages to a depth of 100
            raise ExportError(
                f"{self._last + 1} exits, one inside the other, are more than an ONNX file holds."
            ) from error
        weights.append(helper.make_tensor(_ALWAYS, TensorProto.FLOAT, [], [-math.inf]))
        body = helper.make_graph(nodes, "cascade", inputs, self._answers(self._outputs), weights)
        shorten(body)
        return helper.make_model(
            body,
            producer_name="offramp",
            ir_version=max(first.ir_version, _LEAST_IR),
            opset_imports=first.opset_import,
        )

    def _answers(self, names: Iterable[str]) -> list[onnx.ValueInfoProto]:
        """The kinds of answer, each with an entry for every row of the batch, and what is kept of every exit."""
        made: dict[str, tuple[int, list[Any]]] = {
            "label": (TensorProto.INT64, ["batch"]),
            "score": (TensorProto.FLOAT, ["batch"]),
            "exit": (TensorProto.INT32, ["batch"]),
            "logits": (TensorProto.FLOAT, ["batch", self._classes]),
            "reached_scores": (TensorProto.FLOAT, [None]),
            "reached_logits": (TensorProto.FLOAT, [None, self._classes]),
        }
        return [helper.make_tensor_value_info(n, *made[kind]) for n, kind in zip(names, self._kinds, strict=True)]

    def _from_block(
        self, k: int, rows: _Rows, answers: tuple[str, ...]
    ) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
        """Nodes and weights from block k on, which make the answers of the whole batch. rows: those in front of it.

        Weights stand in the very subgraph that uses them: ONNX Runtime doesn't pack those of an outer one.
        """
        proto, exit_ = self._protos[k].graph, self._document["exits"][k]
        rename = _Renamer(proto, f"block_{k}.", rows.state)
        prefix = f"exit_{k}."
        nodes = [rename.node(n) for n in proto.node]
        label, score, logits = (rename(exit_[kind]) for kind in ("label", "score", "logits"))
        if any(o.name == exit_["logits"] and o.type.tensor_type.elem_type != TensorProto.FLOAT for o in proto.output):
            nodes.append(helper.make_node("Cast", [logits], [f"{prefix}float.logits"], to=TensorProto.FLOAT))
            logits = f"{prefix}float.logits"
        here = [label, score, f"{prefix}exit", logits]
        if k == self._last:
            nodes = _needed(nodes, [label, score, logits])
            nodes += [*_same_for_all(k, label, here[2], prefix), *_written(rows, here, answers)]
            return nodes, rename.weights(nodes)
        follow = {name: rename(name) for name in self._following(k)}
        trunk = _needed(nodes, follow.values())
        there = {id(n) for n in trunk}
        head = [n for n in _needed(nodes, [label, score, logits]) if id(n) not in there]
        # ONNX has a name once at all depths: what trunk and head both use gets another one in the head.
        again = {name: prefix + name for name in rename.weights_of(trunk) & rename.weights_of(head)}
        head = [_reading(n, again) for n in head]
        here = [again.get(name, name) for name in here]
        asked, stay, so_far = self._ask(k, rows, head, here, next(iter(follow.items())), rename.weights(head, again))
        count, go_on, onward = self._gather(k, rows, stay, follow, so_far)
        later, only = (tuple(f"{prefix}{which}.{kind}" for kind in self._kinds) for which in ("later", "only"))
        more, weights = self._from_block(k + 1, onward, later)
        done = [helper.make_node("Identity", [a], [b]) for a, b in zip(so_far, only, strict=True) if a]
        if not so_far[2]:
            done.append(_first_exit(stay, only[2]))
        branch = helper.make_node(
            "If",
            [prefix + "anybody"],
            list(answers),
            then_branch=helper.make_graph([*go_on, *more], f"{prefix}on", [], self._answers(later), weights),
            else_branch=helper.make_graph(done, f"{prefix}done", [], self._answers(only)),
        )
        return [*trunk, *asked, *count, branch], rename.weights(trunk)

    def _gather(
        self, k: int, rows: _Rows, stay: str, follow: Mapping[str, str], so_far: tuple[str, ...]
    ) -> tuple[list[onnx.NodeProto], list[onnx.NodeProto], _Rows]:
        """Nodes that find out whether anybody stays; nodes that gather those who do; and what they are called then.

        Compress takes the mask as it is: with row numbers for Gather each tensor would wait for two operations more.
        """
        prefix = f"exit_{k}."
        places, bars = prefix + "places", prefix + "bars"
        state = {name: f"{prefix}stays.{name}" for name in follow}
        go_on = [
            helper.make_node("Compress", [now, stay], [state[name]], axis=self._axes[name])
            for name, now in follow.items()
        ]
        if rows.so_far:
            counted = places
            count = [helper.make_node("Compress", [rows.places, stay], [places], axis=0)]
            thresholds = [helper.make_node("Compress", [rows.bars, stay], [bars], axis=0)]
        else:
            counted = prefix + "rows"
            count = [helper.make_node("NonZero", [stay], [counted])]
            go_on.append(helper.make_node("Transpose", [counted], [places]))
            so_far = (*so_far[:2], prefix + "exit", *so_far[3:])
            go_on.append(_first_exit(stay, so_far[2]))
            # One row for all: its number is what remains of any place divided by 1.
            thresholds = [
                helper.make_node("Shape", [rows.bars], [prefix + "bars.count"], end=1),
                helper.make_node("Mod", [places, prefix + "bars.count"], [prefix + "bars.places"]),
                helper.make_node("GatherND", [rows.bars, prefix + "bars.places"], [bars]),
            ]
        if k + 1 < self._last:
            go_on += thresholds
        count += [
            helper.make_node("Size", [counted], [prefix + "left"]),
            helper.make_node("Cast", [prefix + "left"], [prefix + "anybody"], to=TensorProto.BOOL),
        ]
        return count, go_on, _Rows(state, bars, places, so_far)

    def _following(self, k: int) -> list[str]:
        """The state behind block k, whatever later blocks take of it."""
        blocks = self._document["blocks"]
        made = {name for block in blocks[: k + 1] for name in block["outputs"]}
        made |= {given["name"] for given in self._document["inputs"]}
        return list(dict.fromkeys(name for block in blocks[k + 1 :] for name in block["inputs"] if name in made))

    def _ask(
        self,
        k: int,
        rows: _Rows,
        head: list[onnx.NodeProto],
        here: list[str],
        state: tuple[str, str],
        weights: list[onnx.TensorProto],
    ) -> tuple[list[onnx.NodeProto], str, tuple[str, ...]]:
        """The head and the decision, if the exit is open to any of the rows here; else everybody stays.

        Returns the nodes, the mask of who stays, and the answers of the whole batch so far. Behind exit 0 these lack
        the exit (""), which follows from the mask, and they are all that has been kept.
        """
        prefix = f"exit_{k}."
        threshold, lowest, closed = prefix + "threshold", prefix + "lowest", prefix + "closed"
        switch = [
            _constant(prefix + "column", TensorProto.INT64, [], [k]),
            helper.make_node("Gather", [rows.bars, prefix + "column"], [threshold], axis=1),
            helper.make_node("ReduceMin", [threshold], [lowest], keepdims=0),
            helper.make_node("IsInf", [lowest], [closed], detect_negative=0),
        ]
        first = not rows.so_far
        kinds = [kind for kind in self._kinds if not (first and kind in ("exit", *_REACHED))]
        given = {kind: name for kind, name in zip(_KINDS, here, strict=True) if kind in kinds}
        if first:  # what the trunk made, as the logits of a head that a later one adds to, can't be given back as it is
            made = {name for n in head for name in n.output}
            handed = {kind: name if name in made else f"{prefix}given.{kind}" for kind, name in given.items()}
            writes = [helper.make_node("Identity", [a], [handed[kind]]) for kind, a in given.items() if a not in made]
        else:
            handed = {kind: f"{prefix}given.{kind}" for kind in kinds}
            writes = [*_same_for_all(k, here[0], here[2], prefix), *_written(rows, here, tuple(handed.values()))]
        asked = [
            *head,
            *writes,
            # A NaN reaches no threshold but -inf, which no score is: they saturate at the largest float32.
            helper.make_node("IsNaN", [given["score"]], [prefix + "unknown"]),
            helper.make_node("Where", [prefix + "unknown", _ALWAYS, given["score"]], [prefix + "reached"]),
            helper.make_node("Less", [prefix + "reached", threshold], [prefix + "stay"]),
        ]
        stay = prefix + "stays"
        told, passed = ({kind: f"{prefix}{which}.{kind}" for kind in kinds} for which in ("here", "shut"))
        shut = self._pass_by(rows, state, prefix + "shut.", passed)
        node = helper.make_node(
            "If",
            [closed],
            [stay, *told.values()],
            then_branch=helper.make_graph(shut, f"{prefix}shut", [], self._told(prefix + "shut.stay", passed)),
            else_branch=helper.make_graph(asked, f"{prefix}asked", [], self._told(prefix + "stay", handed), weights),
        )
        so_far = {kind: told[of] for kind, of in _REACHED.items()} | told
        return [*switch, node], stay, tuple(so_far.get(kind, "") for kind in self._kinds)

    def _told(self, stay: str, answers: Mapping[str, str]) -> list[onnx.ValueInfoProto]:
        """The mask, and those kinds of answer that there are."""
        all_kinds = self._answers([answers.get(kind, "") for kind in self._kinds])
        return [helper.make_tensor_value_info(stay, TensorProto.BOOL, [None]), *(v for v in all_kinds if v.name)]

    def _pass_by(
        self, rows: _Rows, state: tuple[str, str], prefix: str, answers: Mapping[str, str]
    ) -> list[onnx.NodeProto]:
        """What a closed exit does: everybody stays, and the answers so far remain what they are.

        In front of the first open exit there are none: they are made, to be written over.
        """
        name, now = state
        axis, count, shape = self._axes[name], prefix + "count", prefix + "shape"
        everybody = helper.make_tensor("everybody", TensorProto.BOOL, [1], [True])
        stays = [
            helper.make_node("Shape", [now], [count], start=axis, end=axis + 1),
            helper.make_node("ConstantOfShape", [count], [prefix + "stay"], value=everybody),
        ]
        if rows.so_far:
            before = zip(rows.so_far, answers.values(), strict=True)
            return stays + [helper.make_node("Identity", [a], [b]) for a, b in before]
        whole = helper.make_tensor("whole", TensorProto.INT64, [1], [0])
        return [
            *stays,
            helper.make_node("ConstantOfShape", [count], [answers["label"]], value=whole),
            helper.make_node("ConstantOfShape", [count], [answers["score"]]),
            _constant(prefix + "classes", TensorProto.INT64, [1], [self._classes]),
            helper.make_node("Concat", [count, prefix + "classes"], [shape], axis=0),
            helper.make_node("ConstantOfShape", [shape], [answers["logits"]]),
        ]


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


def _first_exit(stay: str, exit: str) -> onnx.NodeProto:
    """Exit 0 for each row that leaves there. Whoever stays gets another number later."""
    return helper.make_node("Cast", [stay], [exit], to=TensorProto.INT32)


def _written(rows: _Rows, here: Sequence[str], answers: Sequence[str]) -> list[onnx.NodeProto]:
    """The answers of the whole batch, with those of the rows here in their places, and behind what is kept."""
    count = len(_KINDS)
    kept = [here[_KINDS.index(of)] for of in _REACHED.values()] if len(answers) > count else []
    return [
        helper.make_node("ScatterND", [a, rows.places, b], [c])
        for a, b, c in zip(rows.so_far[:count], here, answers[:count], strict=True)
    ] + [
        helper.make_node("Concat", [a, b], [c], axis=0)
        for a, b, c in zip(rows.so_far[count:], kept, answers[count:], strict=True)
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
