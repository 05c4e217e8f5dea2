"""Where a model is cut: every block has what it needs, nothing else is carried, and no cheaper cut exists."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.export.dims import Dim
from offramp.export.graph import ModelGraph, Op
from offramp.export.outputs import Outputs
from offramp.export.partition import Partition
from offramp.runtime.errors import ExportError
from onnx import helper

BATCH = Dim(1, ("batch",))
# What the module says a byte carried and a FLOP run again are worth, in bytes moved.
CARRIED, PER_FLOP = 4, 1 / 8

RULES = {
    "Tanh": np.tanh,
    "ReduceMax": lambda v: v.max(axis=1, keepdims=True),
    "Tile": lambda v: np.tile(v, (1, 5)),
    "Concat": lambda *v: np.concatenate(v, axis=1),
    "MatMul": np.matmul,
    "ConstantOfShape": lambda shape: np.full(shape, 0.5),
    "Reshape": lambda v: v.reshape(-1),
}


class Model:
    """A graph made by hand of operations on [batch, width], and what it computes."""

    def __init__(self, **inputs):
        self.ops, self.shapes, self.dtypes, self.weights = [], {}, {}, {}
        self.inputs = {name: (ir.DataType.FLOAT, ["batch", width]) for name, width in inputs.items()}
        self.shapes |= {name: [BATCH, Dim(offset=width)] for name, width in inputs.items()}

    def width(self, name):
        return self.shapes[name][-1].constant or 0

    def add(self, kind, *names, dims=None):
        """One more operation; the name of its value."""
        out, given = f"v{len(self.ops)}", list(names)
        width = sum(map(self.width, names))
        if kind == "MatMul":
            weight = f"w{len(self.ops)}"
            self.weights[weight] = np.random.default_rng(len(self.ops)).standard_normal((width, 4))
            self.shapes[weight] = [Dim(offset=width), Dim(offset=4)]
            given.append(weight)
        widths = {"ReduceMax": 1, "Tile": 5 * width, "MatMul": 4}
        sizes = [Dim(offset=2)] if kind == "Shape" else [BATCH, Dim(offset=widths.get(kind, width))]
        self.shapes[out] = dims or sizes
        self.dtypes[out] = ir.DataType.INT64 if kind == "Shape" else ir.DataType.FLOAT
        self.ops.append(Op(len(self.ops), helper.make_node(kind, given, [out]), tuple(given), (out,)))
        return out

    def filled_like(self, name):
        """A constant of another value's size, which is asked of the value when it runs."""
        return self.add("ConstantOfShape", self.add("Shape", name), dims=self.shapes[name])

    def partition(self, logits, banned=frozenset(), **auxiliary):
        graph = ModelGraph(
            ops=self.ops,
            inputs=self.inputs,
            weights={name: ir.tensor(value) for name, value in self.weights.items()},
            outputs=Outputs(logits=list(logits), **auxiliary),
            opsets={"": 18},
            ir_version=9,
            dtypes=self.dtypes,
        )
        return Partition(graph, self.shapes, {"batch": 4}, banned)

    def run(self, ops, state):
        """The values of the ops from the state alone: a name that isn't there is a KeyError."""
        values = dict(state)
        rows = len(next(iter(values.values())))
        for op in ops:
            if op.proto.op_type == "Shape":  # sizes are asked of whatever a block receives
                values[op.outputs[0]] = [d.at({"batch": rows}) for d in self.shapes[op.inputs[0]]]
            else:
                values[op.outputs[0]] = RULES[op.proto.op_type](*((values | self.weights)[n] for n in op.inputs))
        return values


@dataclass
class Drawn:
    model: Model
    logits: list[str]


@st.composite
def models(draw, exits, most):
    """Small models whose exits each end in an operation of their own."""
    model = Model(x=3, y=2)
    values, logits = ["x", "y"], []
    for _ in range(exits):
        for _ in range(draw(st.integers(1, most))):
            kind = draw(st.sampled_from(["Tanh", "ReduceMax", "Tile", "Concat", "MatMul", "Shape"]))
            names = [draw(st.sampled_from(values)) for _ in range(2 if kind == "Concat" else 1)]
            if kind == "Tile" and model.width(names[0]) > 100:
                continue
            values.append(model.filled_like(names[0]) if kind == "Shape" else model.add(kind, *names))
        logits.append(model.add("Concat", draw(st.sampled_from(values)), draw(st.sampled_from(values))))
    return Drawn(model, logits)


def inputs_of(model, rows=6):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((rows, shape[1])) for name, (_, shape) in model.inputs.items()}


def only(state, names):
    return {name: state[name] for name in names}


@given(models(exits=3, most=4))
@settings(max_examples=150, deadline=None)
def test_blocks_in_series_compute_the_model_from_what_is_carried_alone(drawn):
    plan = drawn.model.partition(drawn.logits).plan()
    inputs = inputs_of(drawn.model)
    whole = drawn.model.run(drawn.model.ops, inputs)
    state, rows = inputs, np.arange(6)
    for j, block in enumerate(plan.blocks):
        made = drawn.model.run(block.ops, only(state, block.inputs))
        # A product of fewer rows may add up in another order.
        np.testing.assert_allclose(made[drawn.logits[j]], whole[drawn.logits[j]][rows], rtol=1e-12)
        assert set(block.carried) <= {name for op in block.ops for name in op.outputs}
        # Every other row leaves; what is neither carried nor an input of the model is gone.
        rows = rows[::2]
        state = {name: (state | made)[name][::2] for name in {*plan.carried[j], *inputs}}
    assert plan.carried[-1] == []


@given(models(exits=3, most=4))
@settings(max_examples=150, deadline=None)
def test_nothing_is_carried_that_no_later_block_takes(drawn):
    plan = drawn.model.partition(drawn.logits).plan()
    for j, carried in enumerate(plan.carried):
        later = {name for block in plan.blocks[j + 1 :] for name in block.inputs}
        assert set(carried) <= later


@given(models(exits=3, most=4))
@settings(max_examples=100, deadline=None)
def test_merged_blocks_give_what_they_give_in_series(drawn):
    partition = drawn.model.partition(drawn.logits)
    plan = partition.plan()
    inputs = inputs_of(drawn.model)
    whole = drawn.model.run(drawn.model.ops, inputs)
    for first, last in combinations(range(len(plan.blocks)), 2):
        merged = partition.merge(plan, first, last)
        before = inputs | (only(whole, plan.carried[first - 1]) if first else {})
        assert set(merged.inputs) <= set(before)
        made = drawn.model.run(merged.ops, only(before, merged.inputs))
        for name in (drawn.logits[last], *merged.carried):
            np.testing.assert_allclose(made[name], whole[name], rtol=1e-12)
        assert set(plan.carried[last]) <= {*merged.carried, *before}
        runs = {op.index for block in plan.blocks[first : last + 1] for op in block.ops}
        assert {op.index for op in merged.ops} <= runs
        repeated = {op.index for block in plan.blocks[:first] for op in block.ops if op not in block.recomputed}
        assert {op.index for op in merged.recomputed} == repeated & {op.index for op in merged.ops}


class Oracle:
    """What a cut between two exits costs, and the least that any costs: every set of carried tensors is tried."""

    def __init__(self, model):
        self.model = model
        self.producer = {op.outputs[0]: op for op in model.ops}

    def bytes(self, name):
        size = 8 if self.model.dtypes.get(name) == ir.DataType.INT64 else 4
        return size * int(np.prod([d.at({"batch": 1}) for d in self.model.shapes[name]]))

    def carry(self, name):
        return CARRIED * self.bytes(name) if self.model.shapes[name][0] == BATCH else None

    def needs(self, op):
        return [] if op.proto.op_type == "Shape" else [n for n in op.inputs if n not in self.model.weights]

    def run(self, op):
        moved = sum(self.bytes(n) for n in {op.outputs[0], *self.needs(op)} if n in self.producer)
        width = self.model.width
        work = 2 * width(op.inputs[0]) * width(op.outputs[0]) if op.proto.op_type == "MatMul" else 0
        return 1 + moved + work * PER_FLOP

    def again(self, name):
        """May it be computed again? Not what can be carried and is multiplied, or costs as much to run."""
        op, carry = self.producer.get(name), self.carry(name)
        return op is not None and (carry is None or (op.proto.op_type != "MatMul" and self.run(op) < carry))

    def ancestors(self, names):
        found, waiting = set(), list(names)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self.producer[name].inputs if name in self.producer else ()
        return found - self.model.weights.keys()

    def price(self, plan):
        return sum(map(self.carry, plan.carried[0])) + sum(map(self.run, plan.blocks[1].recomputed))

    def least(self, first, second):
        earlier = self.ancestors([first])
        own = (self.ancestors([second]) - earlier) & self.producer.keys()
        needed = {n for name in own for n in self.needs(self.producer[name])} - own
        candidates = [n for n in self.ancestors(needed) if self.carry(n) is not None]
        every = (c for count in range(len(candidates) + 1) for c in combinations(candidates, count))
        return min(self.total(needed, carried) for carried in every)

    def total(self, needed, carried):
        cost, waiting, seen = sum(map(self.carry, carried)), list(needed), set(carried)
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            if not self.again(name):
                return float("inf")
            seen.add(name)
            cost += self.run(self.producer[name])
            waiting += self.needs(self.producer[name])
        return cost


@given(models(exits=2, most=4))
@settings(max_examples=200, deadline=None)
def test_no_other_cut_is_cheaper(drawn):
    oracle = Oracle(drawn.model)
    assert oracle.price(drawn.model.partition(drawn.logits).plan()) == oracle.least(*drawn.logits)


def test_a_large_tensor_that_is_cheap_to_make_is_made_again_from_its_small_cause():
    model = Model(x=3)
    small = model.add("Tanh", "x")
    large = model.add("Tile", small)
    logits = [model.add("Tanh", large), model.add("Concat", large, small)]
    plan = model.partition(logits).plan()
    assert plan.carried[0] == [small]
    assert [op.outputs[0] for op in plan.blocks[1].recomputed] == [large]


def test_what_was_multiplied_is_carried_and_not_multiplied_again():
    model = Model(x=1)
    product = model.add("MatMul", "x")  # four times as wide as what it was made of
    logits = [model.add("Tanh", product), model.add("ReduceMax", product)]
    plan = model.partition(logits).plan()
    assert plan.carried[0] == [product]
    assert plan.blocks[1].recomputed == []


@pytest.mark.parametrize("kind", ["RandomNormalLike", "Bernoulli"])
def test_what_is_random_is_not_drawn_a_second_time(kind):
    model = Model(x=1)
    drawn = model.add(kind, "x")
    large = model.add("Tile", drawn)
    logits = [model.add("Tanh", large), model.add("Concat", large, large)]
    plan = model.partition(logits).plan()
    assert plan.carried[0] == [drawn]


def test_a_banned_value_is_made_again_instead():
    model = Model(x=3)
    value = model.add("Tanh", "x")
    logits = [model.add("Tanh", value), model.add("Concat", value, value)]
    assert model.partition(logits).plan().carried[0] == [value]
    plan = model.partition(logits, banned={value}).plan()
    assert plan.carried[0] == ["x"]
    assert [op.outputs[0] for op in plan.blocks[1].recomputed] == [value]


def test_a_value_without_a_batch_axis_that_can_not_be_made_again_is_named():
    model = Model(x=3)
    drawn = model.add("Bernoulli", "x", dims=[Dim(3, ("batch",))])
    logits = [model.add("Tanh", drawn, dims=[BATCH, Dim(offset=3)]) for _ in range(2)]
    with pytest.raises(ExportError, match=rf"cut before exit 1 can't be made: '{drawn}' \[3\*batch\]"):
        model.partition(logits).plan()


def test_a_cut_that_would_compute_most_of_a_block_again_is_refused_with_the_tensors_name():
    model = Model(x=3)
    product = model.add("MatMul", "x", dims=[Dim(4, ("batch",))])
    logits = [model.add("Tanh", product, dims=[BATCH, Dim(offset=4)]) for _ in range(2)]
    with pytest.raises(ExportError, match=rf"cut before exit 1 would compute 100% .* '{product}' \[4\*batch\]"):
        model.partition(logits).plan()


def test_an_exit_that_computes_nothing_new_is_refused():
    model = Model(x=3)
    value = model.add("Tanh", "x")
    deep = model.add("Tanh", value)
    with pytest.raises(ExportError, match=rf"exit 1 \('{value}'\) computes nothing that an earlier exit hasn't"):
        model.partition([deep, value]).plan()


def test_auxiliary_outputs_go_to_the_first_block_that_has_all_they_need():
    model = Model(x=3)
    value = model.add("Tanh", "x")
    first = model.add("Tanh", value)
    deep = model.add("Tanh", first)
    second = model.add("Tanh", deep)
    routing = [model.add("ReduceMax", value), model.add("ReduceMax", deep)]
    plan = model.partition([first, second], routing=routing).plan()
    assert [plan.made_in[name] for name in routing] == [0, 1]
    assert [block.auxiliary for block in plan.blocks] == [[first, routing[0]], [second, routing[1]]]
    assert [op.outputs[0] for op in plan.blocks[0].ops] == [value, first, routing[0]]


def test_an_exits_own_output_may_use_no_deeper_layer():
    model = Model(x=3)
    first = model.add("Tanh", "x")
    second = model.add("Tanh", first)
    features = [model.add("ReduceMax", second), model.add("ReduceMax", second)]
    with pytest.raises(ExportError, match=rf"features\[0\] \('{features[0]}'\) needs block 1, which runs only after"):
        model.partition([first, second], features=features).plan()


def test_a_block_that_only_asks_for_a_size_is_given_something_that_has_it():
    model = Model(x=50, y=2)
    both = model.add("Concat", "x", "y")
    first = model.add("Tanh", both)
    second = model.add("Tanh", model.filled_like(both))
    plan = model.partition([first, second]).plan()
    assert plan.carried[0] == []
    assert plan.blocks[1].inputs == ["y"], "the smallest input with the axis"
    values = model.run(plan.blocks[1].ops, {"y": np.zeros((3, 2))})
    assert values[second].shape == (3, 52)
