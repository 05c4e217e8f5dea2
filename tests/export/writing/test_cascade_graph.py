"""The cascade graph that is written answers row by row, in one run of ONNX Runtime that needs nothing of offramp."""

import json
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.export import export_bundle
from offramp.export.writing.cascade_graph import CascadeGraphWriter
from offramp.runtime import Cascade, ExportError, OperatingPoint
from offramp.runtime.bundle import CASCADE_INPUTS, CASCADE_OUTPUTS, EVERY_EXIT_OUTPUTS
from onnx import TensorProto, helper, numpy_helper
from toys import SEQUENCE, BatchSecond, Everything, Masked, Plain, make

TOKENS = {"ids": torch.randint(1, 40, (3, 6)), "mask": torch.ones(3, 6, dtype=torch.int64)}
MODELS = {
    "plain": (Plain, torch.randn(4, 8), None),
    "two inputs": (Masked, TOKENS, SEQUENCE),
    "batch second": (BatchSecond, torch.randn(4, 8), None),
    "a head that adds to another": (Everything, torch.randn(4, 8), None),
}
ROWS = 12


def drawn(manifest, rows=ROWS, seed=0):
    rng, made = np.random.default_rng(seed), {}
    for wanted in manifest.inputs:
        shape = [{"batch": rows, "seq": 9}.get(d, d) for d in wanted.shape]
        whole = rng.integers(1, 40, shape) if wanted.name == "ids" else rng.integers(0, 2, shape)
        made[wanted.name] = (2 * rng.standard_normal(shape) if wanted.dtype == "float32" else whole).astype(
            wanted.dtype
        )
        if wanted.name == "mask":
            made["mask"][:, 0] = 1
    return made


class Written:
    """A written cascade graph, opened by itself, beside every exit's outputs for the same rows."""

    def __init__(self, bundle, unknown=()):
        """unknown: rows that are no numbers."""
        self.bundle, self.files = bundle, (bundle / "cascade.onnx", bundle / "cascade_every_exit.onnx")
        self.session, self.every_exit = (onnxruntime.InferenceSession(str(file)) for file in self.files)
        with Cascade.load(bundle, threads=1) as cascade:
            self.inputs = drawn(cascade.manifest)
            for row in unknown:
                self.inputs["x"][row] = np.nan
            self.records = cascade.record(self.inputs, allow_nonfinite=True)
        self.exits = len(self.records.logits)

    def run(self, bars, inputs=None):
        """bars: thresholds of all rows, or of each one."""
        return run(self.session, inputs or self.inputs, bars)

    def said(self, bars):
        """The answers, and scores and logits of all rows that reached each exit, one exit after the other."""
        *answers, scores, logits = run(self.every_exit, self.inputs, bars, (*CASCADE_OUTPUTS, *EVERY_EXIT_OUTPUTS))
        return answers, scores, logits

    def expected(self, bars):
        """Label, score, exit and logits of every row, found out one by one."""
        exits = [leaves_at(self.records.score[:, row], mine) for row, mine in enumerate(of_each_row(bars))]
        at = (np.array(exits), np.arange(ROWS))
        return self.records.label[at], self.records.score[at], exits, np.stack(self.records.logits)[at]


def run(session, inputs, bars, outputs=CASCADE_OUTPUTS):
    (name,) = CASCADE_INPUTS
    return session.run(list(outputs), {name: np.atleast_2d(np.float32(bars)), **inputs})


def leaves_at(scores, bars):
    """The exit that a row leaves from, in plain Python."""
    for j, bar in enumerate(bars):
        if scores[j] >= bar or bar == -np.inf:
            return j
    return len(bars)


def of_each_row(bars, rows=ROWS):
    return bars if isinstance(bars[0], list) else [bars] * rows


def check(found, expected):
    label, score, exits, logits = found
    assert exits.tolist() == expected[2]
    known = ~np.isnan(expected[1])
    assert label[known].tolist() == expected[0][known].tolist()
    np.testing.assert_allclose(score, expected[1], atol=1e-4)
    np.testing.assert_allclose(logits, expected[3], atol=1e-4)


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    @cache
    def write(name):
        kind, example, axes = MODELS[name]
        return Written(export_bundle(make(kind), example, tmp_path_factory.mktemp("cascade") / "b", dynamic_axes=axes))

    return write


@pytest.fixture(scope="module", params=MODELS)
def written(request, write):
    return write(request.param)


@pytest.fixture(scope="module")
def unknown(write):
    return Written(write("plain").bundle, unknown=(1, 2, 7))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_it_gives_every_row_the_answer_of_the_exit_that_it_leaves_from(written, data):
    early = written.exits - 1
    # Between two scores, beyond all of them or below all: a difference in the last bit moves nobody.
    places = data.draw(st.lists(st.integers(0, ROWS), min_size=early, max_size=early))
    opened = data.draw(st.lists(st.booleans(), min_size=early, max_size=early))
    edges = [np.concatenate([[-1e30], np.sort(s), [1e30]]) for s in written.records.score[:early]]
    bars = [
        float((e[k] + e[k + 1]) / 2) if open_ else np.inf for e, k, open_ in zip(edges, places, opened, strict=True)
    ]
    check(written.run(bars), written.expected(bars))


def rules(scores):
    """One exit's threshold: closed, open to all, or between two scores: a difference in the last bit moves nobody."""
    edges = np.concatenate([[-1e30], np.sort(scores[~np.isnan(scores)]), [1e30]])
    return st.one_of(
        st.sampled_from([np.inf, -np.inf]), st.integers(0, len(edges) - 2).map(lambda k: float(edges[k : k + 2].mean()))
    )


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_each_row_follows_its_own_thresholds(written, data):
    row = st.tuples(*(rules(s) for s in written.records.score[:-1])).map(list)
    bars = data.draw(st.lists(row, min_size=ROWS, max_size=ROWS))
    check(written.run(bars), written.expected(bars))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_every_exit_said_comes_one_exit_after_the_other_and_the_answers_are_the_same(written, data):
    row = st.tuples(*(rules(s) for s in written.records.score[:-1])).map(list)
    bars = data.draw(st.one_of(row, st.lists(row, min_size=ROWS, max_size=ROWS)))
    answers, scores, logits = written.said(bars)
    check(answers, written.expected(bars))
    mine, start = of_each_row(bars), 0
    for j in range(written.exits):
        came = [k for k in range(ROWS) if answers[2][k] >= j]
        asked = j == written.exits - 1 or any(mine[k][j] < np.inf for k in came)
        if not asked and j:
            continue
        here = slice(start, start := start + len(came))
        records = written.records
        np.testing.assert_allclose(scores[here], records.score[j][came] if asked else 0, atol=1e-4)
        np.testing.assert_allclose(logits[here], records.logits[j][came] if asked else 0, atol=1e-4)
    assert len(scores) == len(logits) == start


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_rows_without_a_number_leave_where_everybody_does_and_nowhere_before(unknown, data):
    row = st.tuples(*(rules(s) for s in unknown.records.score[:-1])).map(list)
    bars = data.draw(st.one_of(row, st.lists(row, min_size=ROWS, max_size=ROWS)))
    check(unknown.run(bars), unknown.expected(bars))


@pytest.mark.parametrize("exit", [0, 1])
def test_a_row_that_ties_with_its_own_threshold_leaves_and_one_just_below_it_stays(write, exit):
    written = write("plain")
    closed = [np.inf] * exit
    score = written.run([*closed, *[-np.inf] * (2 - exit)])[1]
    bars = [
        [*closed, s if row % 2 else np.nextafter(s, np.float32(np.inf)), *[np.inf] * (1 - exit)]
        for row, s in enumerate(score)
    ]
    assert written.run(bars)[2].tolist() == [exit if row % 2 else 2 for row in range(ROWS)]


@pytest.mark.parametrize("bars", [[0.3, 0.2], [np.inf, 0.4], [-1.0, np.inf], [-np.inf, 0.0], [np.inf, np.inf]])
def test_thresholds_that_are_the_same_for_all_rows_may_be_said_once(written, bars):
    bars = bars[: written.exits - 1]
    for one, each in zip(written.run(bars), written.run([bars] * ROWS), strict=True):
        assert np.array_equal(one, each)


@pytest.mark.parametrize(
    ("bars", "products"),
    [
        ([[-np.inf, 0.0]], 2),
        ([[np.inf, np.inf]], 4),
        ([[np.inf, -np.inf]], 3),
        ([[1e30, 1e30]], 6),
        ([[-np.inf, 0.0], [np.inf, np.inf]], 5),  # who would be asked at exit 1 isn't there any more
        ([[-np.inf, np.inf], [np.inf, 1e30]], 6),
    ],
    ids=str,
)
def test_nothing_is_run_for_rows_that_have_left_nor_a_head_that_nobody_asks(tmp_path, bars, products):
    """Each block and each head of the chain is one product."""
    bundle = export_bundle(chain(tmp_path), None, tmp_path / "b")
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = onnxruntime.InferenceSession(str(bundle / "cascade.onnx"), options)
    run(session, {"x": np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)}, bars)
    events = json.loads(Path(session.end_profiling()).read_text())
    assert sum(e.get("args", {}).get("op_name") == "MatMul" for e in events) == products


@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_it_takes_any_number_of_rows(write, rows):
    written = write("plain")
    inputs = {"x": written.inputs["x"][:rows]}
    for bars in ([-1e30, -1e30], [np.inf, np.inf], [1e30, np.inf], [np.inf, -1e30], [-np.inf, 0.0]):
        for given_ in (bars, np.tile(np.float32(bars), (rows, 1))):
            label, score, exits, logits = written.run(given_, inputs)
            assert (len(label), len(score), len(exits), logits.shape) == (rows, rows, rows, (rows, 4))
            assert set(exits.tolist()) <= {next(j for j, bar in enumerate([*bars, -np.inf]) if bar < 0)}


def test_when_everybody_left_the_deeper_blocks_are_not_entered(written):
    early = written.exits - 1
    _, _, exits, _ = written.run([-1e30] * early)
    assert exits.tolist() == [0] * ROWS


def test_a_row_that_is_not_a_number_reaches_no_threshold(write):
    written = write("plain")
    x = written.inputs["x"][:2].copy()
    x[1] = np.nan
    _, score, exits, _ = written.run([-1e30, -1e30], {"x": x})
    assert exits.tolist() == [0, 2]
    assert np.isnan(score).tolist() == [False, True]


def chain(folder, name="x", *, exits=3, opset=17, ir=8, weights_are_inputs=False):
    """An ONNX file of some layers with a head after each."""
    rng, nodes, weights, state = np.random.default_rng(0), [], [], name
    for j in range(exits):
        for kind, width in (("w", 4), ("v", 3)):
            values = rng.standard_normal((4, width)).astype(np.float32)
            weights.append(numpy_helper.from_array(values, f"{kind}{j}"))
        nodes += [
            helper.make_node("MatMul", [state, f"w{j}"], [f"m{j}"]),
            helper.make_node("Relu", [f"m{j}"], [f"h{j}"]),
            helper.make_node("MatMul", [f"h{j}", f"v{j}"], [f"logits_{j}"]),
        ]
        state = f"h{j}"
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4])]
    if weights_are_inputs:
        inputs += [helper.make_tensor_value_info(w.name, TensorProto.FLOAT, list(w.dims)) for w in weights]
    outputs = [helper.make_tensor_value_info(f"logits_{j}", TensorProto.FLOAT, ["N", 3]) for j in range(exits)]
    body = helper.make_graph(nodes, "chain", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", opset)]
    onnx.save(helper.make_model(body, opset_imports=opsets, ir_version=ir), folder / "model.onnx")
    return folder / "model.onnx"


def answers_right(bundle, name):
    """Whether the bundle's cascade graph is there, sound, and agrees with its blocks."""
    onnx.checker.check_model(str(bundle / "cascade.onnx"))
    x = {name: np.random.default_rng(1).standard_normal((9, 4)).astype(np.float32)}
    with Cascade.load(bundle, threads=1) as cascade:
        score = cascade.record(x).score
        bars = [float(np.sort(s)[4:6].mean()) for s in score[:-1]]
        out = cascade.at(OperatingPoint((*bars, -np.inf))).predict(x)
        exits = [next(j for j, bar in enumerate([*bars, -np.inf]) if score[j, row] >= bar) for row in range(9)]
        assert cascade.manifest.cascade is not None
        return out.exit.tolist() == exits


@pytest.mark.parametrize(
    "shape",
    [
        {"ir": 3, "opset": 9, "weights_are_inputs": True},
        {"ir": 3, "opset": 13, "weights_are_inputs": True},
        {"ir": 7, "opset": 13},
        {"ir": 8, "opset": 15, "weights_are_inputs": True},
        {"ir": 10, "opset": 21},
        {"exits": 2},
        {"exits": 12},
    ],
    ids=str,
)
def test_files_of_any_age_and_depth_have_one(tmp_path, shape):
    bundle = export_bundle(chain(tmp_path, **shape), None, tmp_path / "b")
    assert answers_right(bundle, "x")


def test_an_input_that_the_model_ignores_is_taken_and_ignored(tmp_path):
    example = {"x": torch.randn(3, 8), "extra": torch.randint(0, 9, (3, 2))}
    bundle = export_bundle(make(Ignoring), example, tmp_path / "b")
    onnx.checker.check_model(str(bundle / "cascade.onnx"))
    x = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    with Cascade.load(bundle, operating_point=OperatingPoint((0.5, 0.5, -np.inf))) as cascade:
        assert cascade.executor.opened == {"cascade.onnx"}
        one, two = (cascade.predict({"x": x, "extra": np.full((5, 2), k, np.int64)}) for k in (0, 7))
        assert one.exit.tolist() == two.exit.tolist()
        assert one.score.tolist() == two.score.tolist()


class Ignoring(Plain):
    def forward(self, x, extra):
        return super().forward(x)


def test_an_input_that_only_the_graph_of_every_exit_calls_its_own_costs_no_more_than_that_one(tmp_path):
    said = []
    bundle = export_bundle(chain(tmp_path, "reached_scores"), None, tmp_path / "b", progress=said.append)
    assert answers_right(bundle, "reached_scores")
    assert not (bundle / "cascade_every_exit.onnx").exists()
    assert [line for line in said if line.startswith("without cascade_every_exit.onnx: the model has an input")]


@pytest.mark.parametrize(
    "name",
    ["label", "score", "exit", "logits", "thresholds", "cascade.open", "exit_0.threshold", "exit_11.x", "block_0.h0"],
)
def test_a_model_that_calls_an_input_as_the_graph_does_its_own_goes_from_block_to_block(tmp_path, name):
    said = []
    bundle = export_bundle(chain(tmp_path, name), None, tmp_path / "b", progress=said.append)
    assert not (bundle / "cascade.onnx").exists()
    assert [line for line in said if repr(name) in line and "calls its own" in line]
    with Cascade.load(bundle) as cascade:
        assert len(cascade.predict({name: np.zeros((2, 4), np.float32)})) == 2


@pytest.mark.parametrize("name", ["batch", "exit_0", "block_0", "cascade", "exits.0", "scores"])
def test_names_that_only_look_like_its_own_do_no_harm(tmp_path, name):
    assert answers_right(export_bundle(chain(tmp_path, name), None, tmp_path / "b"), name)


def graphs_of(graph):
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs_of(attribute.g)


def named_twice(file, names_of):
    graphs = graphs_of(onnx.load(file, load_external_data=False).graph)
    return [name for name, count in Counter(n for graph in graphs for n in names_of(graph)).items() if count > 1]


def test_no_value_is_made_twice_at_any_depth(written):
    for file in written.files:
        assert named_twice(file, lambda g: [n for node in g.node for n in node.output if n]) == []


def test_no_weight_has_the_name_of_an_outer_one(write):
    for file in write("batch second").files:
        assert named_twice(file, lambda g: [w.name for w in g.initializer]) == []


@pytest.mark.parametrize("every_exit", [False, True])
def test_it_takes_the_models_inputs_and_the_gates_and_stores_no_weight_again(written, every_exit):
    file = written.files[every_exit]
    onnx.checker.check_model(str(file))
    model = onnx.load(file, load_external_data=False)
    assert {i.name for i in model.graph.input} == {*written.inputs, *CASCADE_INPUTS}
    assert [o.name for o in model.graph.output] == [*CASCADE_OUTPUTS, *(EVERY_EXIT_OUTPUTS if every_exit else ())]
    for graph in graphs_of(model.graph):
        for weight in graph.initializer:
            places = {e.key: e.value for e in weight.external_data}
            assert places.get("location", "weights.bin") == "weights.bin"
            assert places or len(weight.raw_data) < 1024


def test_a_model_with_one_exit_has_none(tmp_path):
    bundle = export_bundle(make(Plain, 8, 4, 1), torch.randn(3, 8), tmp_path / "b")
    assert not list(bundle.glob("cascade*"))


def nested(exits):
    """The graph of so many blocks that hand on what they get."""
    two = [TensorProto.FLOAT, ["batch", 2]]
    protos = []
    for k in range(exits):
        names = [f"h{k + 1}", f"label_{k}", f"score_{k}"]
        nodes = [helper.make_node("Identity", [f"h{k}"], [names[0]])]
        nodes += [helper.make_node("ArgMax", [names[0]], [names[1]], axis=1, keepdims=0)]
        nodes += [helper.make_node("ReduceMax", [names[0], "one"], [names[2]], keepdims=0)]
        one = [helper.make_tensor("one", TensorProto.INT64, [1], [1])]
        given = [helper.make_tensor_value_info(f"h{k}", *two)]
        protos.append(helper.make_model(helper.make_graph(nodes, "b", given, [], one), ir_version=8))
    document = {
        "classes": ["a", "b"],
        "inputs": [{"name": "h0", "dtype": "float32", "shape": ["batch", 2]}],
        "tensors": {f"h{k}": {"batch_axis": 0} for k in range(1, exits)},
        "blocks": [{"inputs": [f"h{k}"], "outputs": [f"h{k + 1}"]} for k in range(exits)],
        "exits": [{"logits": f"h{k + 1}", "label": f"label_{k}", "score": f"score_{k}"} for k in range(exits)],
    }
    return CascadeGraphWriter(document, protos).proto()


def test_more_exits_than_protobuf_nests_are_refused_in_a_line():
    assert onnx.ModelProto.FromString(nested(30).SerializeToString()).graph.name == "cascade"
    with pytest.raises(ExportError, match=r"^36 exits, one inside the other, are more than an ONNX file holds\.$"):
        nested(36)
