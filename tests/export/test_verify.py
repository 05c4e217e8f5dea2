"""A bundle is held against its model before it is kept: what differs is named, and what mixes rows is seen."""

import json
import shutil

import numpy as np
import onnx
import pytest
from offramp.export import export_bundle
from offramp.export.graph import prepare, read_onnx
from offramp.export.onnx_file import OnnxFile
from offramp.export.outputs import Outputs
from offramp.export.probe import Probe
from offramp.export.rows import keep_company
from offramp.export.verify import verify, verify_cascade_graph
from offramp.export.writing.weights import WeightFile
from offramp.runtime import ExportError
from offramp.runtime.files import seal, sha256_of_file
from onnx import TensorProto, helper

OUTPUTS = Outputs(logits=["logits_0", "logits_1"])


def model(path, seed=0):
    """Two exits on four numbers."""
    rng = np.random.default_rng(seed)
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        for name, shape in (("w0", (4, 4)), ("v0", (4, 3)), ("w1", (4, 4)), ("v1", (4, 3)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["m0"]),
        helper.make_node("Tanh", ["m0"], ["h0"]),
        helper.make_node("MatMul", ["h0", "v0"], ["logits_0"]),
        helper.make_node("MatMul", ["h0", "w1"], ["m1"]),
        helper.make_node("Tanh", ["m1"], ["h1"]),
        helper.make_node("MatMul", ["h1", "v1"], ["logits_1"]),
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3]) for name in OUTPUTS.names]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])]
    graph = helper.make_graph(nodes, "two", inputs, outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The bundle, the probe of its model, what the model says, and the company that its rows keep."""
    folder = tmp_path_factory.mktemp("verify")
    path = model(folder / "m.onnx")
    graph = prepare(read_onnx(path), OUTPUTS)
    example = {"x": np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)}
    probe = Probe(graph, WeightFile(folder, graph.weights), folder, example)
    reference = OnnxFile(path).reference(OUTPUTS)
    return export_bundle(path, None, folder / "b"), probe, reference, keep_company(probe, reference)


def off(reference, kind, k, change):
    """A model that says something else at one exit."""

    def other(inputs):
        said = reference(inputs)
        said[kind][k] = change(said[kind][k])
        return said

    return other


def test_a_bundle_of_its_model_passes_with_the_difference_seen(made):
    bundle, probe, reference, company = made
    found = verify(bundle, probe, reference, company)
    assert 0 <= found.summary["max_difference"] < 1e-5
    assert found.summary["sizes"] == [sizes for sizes, _ in probe.runs]
    assert found.pads == {}
    for every_exit in (False, True):
        verify_cascade_graph(bundle, probe, company, found.leaving, every_exit=every_exit)


@pytest.mark.parametrize(
    ("exit", "change"),
    [
        (0, lambda z: z + 0.1),
        (1, lambda z: -z),
        (1, lambda z: z[::-1]),
        (1, lambda z: np.where(z == z.max(), np.nan, z)),
        (0, lambda z: np.where(z == z.max(), np.inf, z)),
        (0, lambda z: z[:, :2]),
    ],
)
def test_a_bundle_of_another_model_is_refused_by_the_exit_that_differs(made, exit, change):
    bundle, probe, reference, company = made
    with pytest.raises(ExportError, match=rf"^logits\[{exit}\] of the cascade differs .* the bundle wasn't written"):
        verify(bundle, probe, off(reference, "logits", exit, change), company)


def test_who_is_to_blame_is_told_by_the_graph_before_it_was_cut(made, tmp_path):
    bundle, probe, reference, company = made
    with pytest.raises(ExportError, match=r"So does the graph before it was cut, by .*: it isn't what the model"):
        verify(bundle, probe, off(reference, "logits", 1, lambda z: -z), company)
    other = export_bundle(model(tmp_path / "m.onnx", seed=2), None, tmp_path / "b")
    with pytest.raises(ExportError, match=r"The graph before it was cut doesn't: this is offramp's fault"):
        verify(other, probe, reference, company)


def made_in(model, branch, output):
    """The node in a branch of the outermost If that makes what the graph gives as `output`."""
    chosen = next(a.g for a in model.graph.node[-1].attribute if a.name == branch)
    name = chosen.output[[o.name for o in model.graph.output].index(output)].name
    return next(node for node in chosen.node if name in node.output)


def scores_of_others(model):
    """Rows that reach exit 1 in the places of those that reach exit 0."""
    node = made_in(model, "then_branch", "reached_scores")
    assert node.op_type == "Concat"
    node.input[:] = node.input[::-1]


def logits_of_nobody(model):
    """Zeros for those that end at exit 0."""
    node = made_in(model, "else_branch", "reached_logits")
    node.CopyFrom(helper.make_node("Sub", [node.input[0]] * 2, node.output))


@pytest.mark.parametrize("fault", [scores_of_others, logits_of_nobody])
def test_a_graph_that_says_something_else_of_an_exit_than_its_block_is_refused(made, tmp_path, fault):
    bundle, probe, reference, company = made
    folder = shutil.copytree(bundle, tmp_path / "b")
    file, manifest = folder / "cascade_every_exit.onnx", folder / "manifest.json"
    model = onnx.load(file, load_external_data=False)
    fault(model)
    onnx.save(model, file)
    document = json.loads(manifest.read_text())
    del document["digest"]
    document["files"][file.name] = {"sha256": sha256_of_file(file), "bytes": file.stat().st_size}
    manifest.write_bytes(seal(document))
    leaving = verify(bundle, probe, reference, company).leaving
    with pytest.raises(ExportError, match=r"^it says of exit 0 what is off by"):
        verify_cascade_graph(folder, probe, company, leaving, every_exit=True)


def test_a_difference_of_rounding_is_none(made):
    bundle, probe, reference, company = made
    found = verify(bundle, probe, off(reference, "logits", 1, lambda z: z * np.float32(1 + 1e-5)), company)
    assert 0 < found.summary["max_difference"] < 1e-3


def test_rows_that_do_not_look_at_each_other_are_independent(made):
    _, probe, reference, _ = made
    company = keep_company(probe, reference)
    assert company.independent
    assert company.difference < 1e-5


@pytest.mark.parametrize(
    "mix",
    [
        lambda z: z - z.mean(axis=0),
        lambda z: z * np.abs(z).max(),
        lambda z: z + np.arange(len(z))[:, None],
        lambda z: np.roll(z, 1, axis=0),
    ],
)
def test_what_depends_on_the_rows_beside_it_or_on_its_place_is_seen(made, mix):
    _, probe, reference, _ = made
    company = keep_company(probe, off(reference, "logits", 1, mix))
    assert not company.independent
    assert company.difference > 1e-4


def test_a_model_that_answers_differently_each_time_is_refused_by_its_exit(made):
    _, probe, reference, _ = made
    rng = np.random.default_rng(0)
    noisy = off(reference, "logits", 1, lambda z: z + rng.standard_normal(z.shape))
    with pytest.raises(ExportError, match=r"exit 1 gives other logits for the same input: the model is random"):
        keep_company(probe, noisy)
