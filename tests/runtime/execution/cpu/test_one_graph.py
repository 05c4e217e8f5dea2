"""The cascade graph answers as the blocks in series do, row by row."""

import json
import math
import shutil
from itertools import pairwise

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.export import export_bundle
from offramp.runtime import BundleError, Cascade, OperatingPoint
from offramp.runtime.bundle import CascadeGraph
from offramp.runtime.execution.anytime import exit_by_exit
from offramp.runtime.execution.call import Call, not_again
from offramp.runtime.execution.cpu.executor import CpuExecutor
from offramp.runtime.execution.route import gates_that_ran, threshold_inputs, threshold_rows
from offramp.runtime.files import seal
from offramp.runtime.jobs.bundles.repack import repack
from offramp.runtime.predictions import Reached, Seen
from onnx import TensorProto, helper
from seeing import told_apart
from toys import SEQUENCE, BatchSecond, CrossRow, Everything, Masked, MultiScale, Plain, make

TOKENS = {"ids": torch.randint(1, 40, (3, 6)), "mask": torch.ones(3, 6, dtype=torch.int64)}
MODELS = {
    "plain": (Plain, torch.randn(4, 8), None),
    "sequences": (Masked, TOKENS, SEQUENCE),
    "batch second": (BatchSecond, torch.randn(4, 8), None),
    "several scales": (MultiScale, torch.randn(4, 1, 16, 16), None),
    "everything": (Everything, torch.randn(4, 8), None),
    "rows that mix": (CrossRow, torch.randn(4, 6), None),
}


@pytest.fixture(scope="module", params=MODELS)
def bundle(request, tmp_path_factory):
    kind, example, axes = MODELS[request.param]
    return export_bundle(make(kind), example, tmp_path_factory.mktemp("nested") / "b", dynamic_axes=axes)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return export_bundle(make(Plain), torch.randn(4, 8), tmp_path_factory.mktemp("plain") / "b")


def in_series(cascade):
    """The same cascade from block to block."""
    executor = CpuExecutor(cascade.bundle, threads=1, providers=["CPUExecutionProvider"], cascade_graph=False)
    return Cascade(cascade.bundle, cascade.calibration, cascade.operating_point, executor)


def inputs_of(cascade, rows, seed=0):
    rng, made = np.random.default_rng(seed), {}
    for want in cascade.manifest.inputs:
        shape = [{"batch": rows, "seq": 9}.get(d, d) for d in want.shape]
        made[want.name] = (rng.standard_normal(shape) * 2).astype(want.dtype)
        if want.name == "ids":
            made["ids"] = rng.integers(1, 40, shape)
        if want.name == "mask":
            made["mask"] = (np.arange(9) < rng.integers(2, 10, (rows, 1))).astype(np.int64)
    return made


def check(one, two):
    np.testing.assert_array_equal(one.exit, two.exit)
    np.testing.assert_array_equal(one.label, two.label)
    np.testing.assert_allclose(one.score, two.score, atol=1e-4)
    np.testing.assert_allclose(one.confidence, two.confidence, atol=1e-4)
    np.testing.assert_array_equal(one.flops, two.flops)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 40])
def test_it_answers_as_the_blocks_in_series(bundle, rows):
    with Cascade.load(bundle, threads=1, batch_rows=16) as cascade:
        assert cascade.manifest.cascade is not None
        inputs = inputs_of(cascade, rows, seed=rows)
        score = cascade.record(inputs_of(cascade, 60, seed=99)).score
        early = len(score) - 1
        rng = np.random.default_rng(rows)
        for turn in range(12):
            # Between two scores, so that a difference in the last bit moves nobody.
            bars = [
                float(np.mean(np.sort(s)[k : k + 2])) for s, k in zip(score, rng.integers(0, 59, early), strict=False)
            ]
            bars = [math.inf if turn > 6 and rng.random() < 0.5 else bar for bar in bars]
            at = cascade.at(OperatingPoint((*bars, -math.inf), abstain_below=1.0))
            one, two = (
                at.predict(inputs, fetch=("probabilities",)),
                in_series(at).predict(inputs, fetch=("probabilities",)),
            )
            check(one, two)
            check(at.predict(inputs), two)
            np.testing.assert_array_equal(one.abstain, two.abstain)
            np.testing.assert_allclose(one.probabilities, two.probabilities, atol=1e-5)


def test_only_what_survives_is_computed(plain):
    """One row of forty goes on: the next blocks are given one."""
    with Cascade.load(plain, threads=1) as cascade:
        inputs = inputs_of(cascade, 40)
        score = np.sort(cascade.record(inputs).score[0])
        at = cascade.at(OperatingPoint((float(score[:2].mean()), 1e9, -math.inf)))
        _, _, exits, _ = at.executor.run_cascade_graph(inputs, at.route.threshold_inputs)
        assert np.bincount(exits).tolist() == [39, 0, 1]
        whole = cascade.row_flops({})
        blocks = [int(whole[0]), *(int(b - a) for a, b in pairwise(whole))]
        executed = at.predict(inputs).executed
    assert executed == (40 * blocks[0], blocks[1], blocks[2])


def test_a_row_without_a_number_runs_to_the_end_and_has_no_label(plain):
    with Cascade.load(plain, threads=1) as cascade:
        inputs = inputs_of(cascade, 6)
        inputs["x"][2] = np.nan
        at = cascade.at(OperatingPoint((-1e30, 0.0, -math.inf)))
        for rows in (slice(0, 6), slice(2, 3)):
            answer = at.predict({"x": inputs["x"][rows]}, allow_nonfinite=True)
            row = 2 - rows.start
            assert (answer.exit[row], answer.label[row], answer.abstain[row]) == (2, -1, True)
            assert np.isnan(answer.score[row])
            assert np.isnan(answer.confidence[row])
            others = np.arange(len(answer)) != row
            assert (answer.exit[others] == 0).all()


def test_where_everybody_leaves_a_row_without_a_number_does_too(plain):
    with Cascade.load(plain, threads=1, operating_point=OperatingPoint((math.inf, -math.inf, -math.inf))) as cascade:
        inputs = inputs_of(cascade, 3)
        inputs["x"][1] = np.nan
        answer = cascade.predict(inputs, allow_nonfinite=True)
        assert answer.exit.tolist() == [1, 1, 1]
        assert answer.label[1] == -1
        assert answer.executed[2] == 0
        assert cascade.executor.opened == {"cascade.onnx"}


@pytest.mark.parametrize("exit", [0, 1, 2])
@pytest.mark.parametrize("rows", [0, 1, 30])
def test_going_no_further_than_an_exit_is_one_run_of_the_graph(plain, rows, exit):
    point = OperatingPoint((0.7, 0.7, -math.inf), abstain_below=1.0)
    with Cascade.load(plain, threads=1, operating_point=point) as cascade:
        inputs = inputs_of(cascade, rows)
        inputs["x"][1::5] = np.nan
        one = cascade.predict(inputs, max_exit=exit, allow_nonfinite=True)
        assert cascade.executor.opened == {"cascade.onnx"}
        two = in_series(cascade).predict(inputs, max_exit=exit, allow_nonfinite=True)
        check(one, two)
        np.testing.assert_array_equal(one.involuntary, two.involuntary)
        np.testing.assert_array_equal(one.abstain, two.abstain)
        assert not any(one.executed[exit + 1 :])
        assert one.involuntary.any() == (rows > 1 and exit < 2)


def test_rows_of_different_points_share_a_batch(bundle):
    with Cascade.load(bundle, threads=1) as cascade:
        if not cascade.manifest.rows_independent:
            pytest.skip("its rows are run one by one")
        inputs = inputs_of(cascade, 40)
        floats = "x" in inputs
        if floats:
            inputs["x"].reshape(40, -1)[::7] = np.nan
        score = cascade.record(inputs, allow_nonfinite=True).score
        rng = np.random.default_rng(0)
        for turn in range(8):
            points = [middling(score, rng) for _ in range(1 + turn % 4)]
            routes = [cascade.at(point).route for point in points]
            of_row = rng.integers(0, len(points), 40)
            given = threshold_rows(routes, of_row)
            assert given["thresholds"].shape == (40 if len(points) > 1 else 1, len(score) - 1)
            label, reached, exits, _ = cascade.executor.run_cascade_graph(inputs, given)
            for k, point in enumerate(points):
                mine = of_row == k
                alone = in_series(cascade.at(point)).predict(inputs, allow_nonfinite=floats)
                np.testing.assert_array_equal(routes[k].exit_of_gate(exits)[mine], alone.exit[mine])
                np.testing.assert_allclose(reached[mine], alone.score[mine], atol=1e-4)
                known = mine & (alone.label >= 0)
                np.testing.assert_array_equal(label[known], alone.label[known])


def test_what_every_exit_said_of_a_batch_of_different_points_is_told_apart(bundle):
    with Cascade.load(bundle, threads=1) as cascade:
        if not cascade.manifest.rows_independent:
            pytest.skip("its rows are run one by one")
        inputs = inputs_of(cascade, 40)
        records = cascade.record(inputs)
        rng = np.random.default_rng(1)
        for turn in range(8):
            points = [middling(records.score, rng) for _ in range(1 + turn % 4)]
            of_row = rng.integers(0, len(points), 40)
            given = threshold_rows([cascade.at(point).route for point in points], of_row)
            *_, gate, _, scores, logits = cascade.executor.run_cascade_graph(inputs, given, every_exit=True)
            gates = gates_that_ran(cascade.manifest.cascade, given, gate)
            found = told_apart(Reached(len(cascade.exits), gates, gate, scores, logits))
            came = [np.flatnonzero(gate >= j) for j in range(len(cascade.exits))]
            ran = [j for j, rows in enumerate(came) if any(j in points[k].exits for k in of_row[rows])]
            assert [j for j, *_ in found] == ran
            for j, rows, score, z in found:
                assert rows.tolist() == came[j].tolist()
                np.testing.assert_allclose(score, records.score[j][rows], atol=1e-4)
                np.testing.assert_allclose(z, records.logits[j][rows], atol=1e-4)


@pytest.mark.parametrize("rows", [0, 1, 2, 30])
@pytest.mark.parametrize("kept", [[0, 1, 2], [1, 2], [0, 2]], ids=str)
def test_a_call_that_keeps_what_every_exit_says_is_one_run_of_the_graph(plain, tmp_path, rows, kept):
    with Cascade.load(repack(plain, tmp_path / "b", kept), threads=1, batch_rows=16) as cascade:
        inputs = inputs_of(cascade, rows)
        score = cascade.record(inputs).score
        early = len(kept) - 1
        for turn in range(6):
            bars = [float(np.median(s)) + 1e-3 if rows else 0.0 for s in score[:-1]]
            bars[turn % early] = (math.inf, -math.inf, bars[turn % early])[turn // 2]
            at = cascade.at(OperatingPoint((*bars, -math.inf)))
            one, two = Seen(len(kept), rows), Seen(len(kept), rows)
            call = Call(at.route, inputs, {"batch": rows}, limit=16, seen=one)
            if not at.executor.fills(call):
                assert len(at.route.stages) == 1
                continue
            check(at.executor.answer(call, not_again), at.predict(inputs))
            again = Call(at.route, inputs, {"batch": rows}, limit=16, seen=two)
            list(exit_by_exit(again, at.executor))
            np.testing.assert_allclose(one.score, two.score, atol=1e-4)
            for z, same, ran in zip(one.logits, two.logits, ~np.isnan(two.score), strict=True):
                assert (z is None) == (same is None)
                if z is not None:
                    np.testing.assert_allclose(z[ran], same[ran], atol=1e-4)


def middling(score, rng):
    """A point with thresholds between two scores, closed, or open to all, that may go no further than some exit."""
    bars = []
    for s in score[:-1]:
        known = np.sort(s[~np.isnan(s)])
        k = rng.integers(len(known) - 1)
        bars.append(rng.choice([float(known[k : k + 2].mean()), math.inf, -math.inf], p=[0.7, 0.2, 0.1]))
    return OperatingPoint((*bars, -math.inf)).stopping_at(int(rng.integers(len(score))))


def test_a_point_that_runs_another_graph_by_itself_may_share_a_batch_all_the_same(plain):
    with Cascade.load(plain) as cascade:
        whole, early = cascade.route, cascade.at(OperatingPoint((0.5, -math.inf, -math.inf))).route
        assert whole.threshold_inputs is None
        given = threshold_rows([whole, early], np.array([1, 0]))["thresholds"]
    assert given.dtype == np.float32
    assert given.tolist() == [[0.5, -math.inf], [math.inf, math.inf]]


@given(st.floats(allow_nan=False, allow_infinity=True), st.floats(width=32, allow_nan=False))
@settings(max_examples=300, deadline=None)
def test_rounding_a_threshold_moves_no_score_across_it(threshold, score):
    made = threshold_inputs(CascadeGraph(file="x", gates=2, exits=[0, 1], outputs=[]), [threshold])
    assert made["thresholds"].shape == (1, 1)
    bar = made["thresholds"][0, 0]
    assert bar.dtype == np.float32
    score = np.float32(score)
    assert (score >= bar) == (float(score) >= threshold) or bar == np.inf
    assert bar < np.inf or threshold > float(np.finfo(np.float32).max)


@pytest.mark.parametrize("threshold", [3.4028235e38, 3.41e38, 1e300, math.inf])
def test_scores_that_saturate_do_not_reach_what_is_above_them(threshold):
    made = threshold_inputs(CascadeGraph(file="x", gates=2, exits=[0, 1], outputs=[]), [threshold])
    largest = np.finfo(np.float32).max
    assert bool(largest >= made["thresholds"][0, 0]) == (float(largest) >= threshold)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exits": [0, 1]}, "cascade.exits"),
        ({"exits": [0, 2, 1]}, "cascade.exits"),
        ({"exits": [-1, 1, 2]}, "cascade.exits"),
        ({"gates": 4}, "cascade.exits"),
        ({"file": "other.onnx"}, "cascade.file 'other.onnx' is not in files"),
        ({"file": "../cascade.onnx"}, "cascade.file"),
        ({"every_exit": "other.onnx"}, "cascade.every_exit 'other.onnx' is not in files"),
        ({"every_exit": "../cascade.onnx"}, "cascade.every_exit"),
    ],
)
def test_a_cascade_graph_that_makes_no_sense_is_refused(plain, tmp_path, change, message):
    folder = shutil.copytree(plain, tmp_path / "b")
    document = json.loads((folder / "manifest.json").read_text())
    document["cascade"].update(change)
    document.pop("digest")
    (folder / "manifest.json").write_bytes(seal(document))
    with pytest.raises(BundleError, match=message):
        Cascade.load(folder)


def test_a_bundle_without_one_still_answers(plain, tmp_path):
    folder = shutil.copytree(plain, tmp_path / "b")
    document = json.loads((folder / "manifest.json").read_text())
    del document["cascade"], document["digest"], document["files"]["cascade.onnx"]
    (folder / "manifest.json").write_bytes(seal(document))
    point = OperatingPoint((0.0, 0.5, -math.inf))
    with Cascade.load(folder, threads=1) as old, Cascade.load(plain, threads=1) as new:
        inputs = inputs_of(new, 20)
        check(old.at(point).predict(inputs), new.at(point).predict(inputs))


@pytest.mark.parametrize("missing", ["outputs", "thresholds_per_row"])
def test_a_graph_of_an_earlier_offramp_is_not_run_and_that_is_said(plain, tmp_path, missing):
    folder = shutil.copytree(plain, tmp_path / "b")
    document = json.loads((folder / "manifest.json").read_text())
    del document["cascade"][missing], document["digest"]
    (folder / "manifest.json").write_bytes(seal(document))
    point = OperatingPoint((0.0, 0.5, -math.inf))
    with pytest.warns(UserWarning, match=r"cascade\.onnx is of an earlier offramp"):
        old = Cascade.load(folder, threads=1, operating_point=point)
    with old, Cascade.load(plain, threads=1, operating_point=point) as new:
        assert old.executor.opened == {"block_0.onnx", "block_1.onnx", "block_2.onnx"}
        inputs = inputs_of(new, 20)
        check(old.predict(inputs), new.predict(inputs))


def test_weights_stand_where_they_are_used(plain):
    """ONNX Runtime packs a matrix for its kernels only if it belongs to the very graph that multiplies by it."""
    model = onnx.load(plain / "cascade.onnx", load_external_data=False)

    def subgraphs(graph):
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    yield from subgraphs(attribute.g)

    products = 0
    for graph in subgraphs(model.graph):
        own = {w.name for w in graph.initializer}
        for node in graph.node:
            if node.op_type in ("MatMul", "Gemm"):
                products += 1
                assert set(node.input[1:]) <= own
    assert products >= 6


def test_control_flow_inside_a_block_keeps_its_names(tmp_path):
    """An ONNX file whose blocks hold an If of their own, with the same names inside."""

    def branch(name, factor):
        return helper.make_graph(
            [
                helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", TensorProto.FLOAT, [], [factor])),
                helper.make_node("Mul", [name, "c"], ["d"]),
            ],
            "branch",
            [],
            [helper.make_tensor_value_info("d", TensorProto.FLOAT, ["N", 4])],
        )

    nodes, weights, state = [], [], "x"
    rng = np.random.default_rng(0)
    for j in range(3):
        weights += [
            onnx.numpy_helper.from_array(rng.standard_normal((4, 4)).astype(np.float32), f"w{j}"),
            onnx.numpy_helper.from_array(rng.standard_normal((4, 3)).astype(np.float32), f"v{j}"),
        ]
        nodes += [
            helper.make_node("MatMul", [state, f"w{j}"], [f"m{j}"]),
            helper.make_node("ReduceSum", [f"m{j}"], [f"s{j}"], keepdims=0),
            helper.make_node("Greater", [f"m{j}", "zero"], [f"g{j}"]),
            helper.make_node("Shape", [f"g{j}"], [f"n{j}"], start=1, end=2),
            helper.make_node("Squeeze", [f"n{j}"], [f"q{j}"]),
            helper.make_node("Equal", [f"q{j}", "four"], [f"k{j}"]),
            helper.make_node(
                "If", [f"k{j}"], [f"h{j}"], then_branch=branch(f"m{j}", 0.5), else_branch=branch(f"m{j}", 2.0)
            ),
            helper.make_node("MatMul", [f"h{j}", f"v{j}"], [f"logits_{j}"]),
        ]
        state = f"h{j}"
    weights += [
        onnx.numpy_helper.from_array(np.float32(0), "zero"),
        onnx.numpy_helper.from_array(np.int64(4), "four"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info(f"logits_{j}", TensorProto.FLOAT, ["N", 3]) for j in range(3)],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    bundle = export_bundle(tmp_path / "m.onnx", None, tmp_path / "b")
    with Cascade.load(bundle, threads=1) as cascade:
        assert cascade.manifest.cascade is not None
        x = rng.standard_normal((30, 4)).astype(np.float32)
        whole = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x})
        at = cascade.at(OperatingPoint((1.0, 0.5, -math.inf)))
        answer = at.predict({"x": x})
        assert len(set(answer.exit.tolist())) == 3
        for i, j in enumerate(answer.exit):
            assert answer.label[i] == whole[j][i].argmax()
