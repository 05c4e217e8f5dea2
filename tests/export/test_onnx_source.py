"""An ONNX file with one output an exit becomes a bundle, whatever made it."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from offramp.export import export_bundle
from offramp.runtime import Cascade, ExportError
from onnx import TensorProto, helper, numpy_helper
from toys import Masked, make


def three_exits(opset: int = 17, batch: str | int = "N") -> onnx.ModelProto:
    """A hand-written model; exit 1's branch holds an If whose branches capture outer tensors."""
    rng = np.random.default_rng(0)
    weights = {f"w{k}": rng.standard_normal((6, 6)).astype(np.float32) for k in range(3)}
    heads = {f"h{k}": rng.standard_normal((6, 4)).astype(np.float32) for k in range(3)}

    def branch(name: str, kind: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        return helper.make_graph(
            [helper.make_node("Add" if kind == "add" else "Sub", ["a0", "m1"], [name])], name, [], [out]
        )

    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["m0"]),
        helper.make_node("Tanh", ["m0"], ["a0"]),
        helper.make_node("MatMul", ["a0", "h0"], ["early"]),
        helper.make_node("MatMul", ["a0", "w1"], ["m1"]),
        helper.make_node("If", ["yes"], ["a1"], then_branch=branch("then", "add"), else_branch=branch("else", "sub")),
        helper.make_node("MatMul", ["a1", "h1"], ["middle"]),
        helper.make_node("MatMul", ["a1", "w2"], ["m2"]),
        helper.make_node("Add", ["m2", "a0"], ["a2"]),
        helper.make_node("MatMul", ["a2", "h2"], ["late"]),
        helper.make_node("ReduceMean", ["a0"], ["mean"], axes=[1], keepdims=0)
        if opset < 18
        else helper.make_node("ReduceMean", ["a0", "one"], ["mean"], keepdims=0),
    ]
    constants = [numpy_helper.from_array(v, k) for k, v in {**weights, **heads}.items()]
    constants += [numpy_helper.from_array(np.array(True), "yes"), numpy_helper.from_array(np.array([1]), "one")]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [batch, 4]) for n in ("early", "middle", "late")]
    outputs.append(helper.make_tensor_value_info("mean", TensorProto.FLOAT, [batch]))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 6])]
    graph = helper.make_graph(nodes, "three", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("opset", [13, 17, 21])
def test_a_multi_output_file_is_cut_at_the_named_exits(tmp_path, opset):
    onnx.save(three_exits(opset), tmp_path / "m.onnx")
    bundle = export_bundle(
        str(tmp_path / "m.onnx"),
        None,
        tmp_path / "b",
        exits=["early", "middle", "late"],
        auxiliary={"routing": ["mean"]},
    )
    x = np.random.default_rng(1).standard_normal((5, 6)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    expected = session.run(["early", "middle", "late"], {"x": x})
    with Cascade.load(bundle, threads=1) as cascade:
        assert [e.name for e in cascade.manifest.exits] == ["early", "middle", "late"]
        records = cascade.record({"x": x})
        np.testing.assert_allclose(np.stack(records.logits), np.stack(expected), atol=1e-5)
        np.testing.assert_allclose(records.routing[0], session.run(["mean"], {"x": x})[0], atol=1e-6)


def test_a_torch_export_of_several_outputs_gives_the_same_bundle_as_the_module(tmp_path):
    model = make(Masked)
    ids = torch.randint(1, 50, (3, 7))
    inputs = {"ids": ids, "mask": torch.ones_like(ids)}
    axes = {"ids": {0: "batch", 1: "seq"}, "mask": {0: "batch", 1: "seq"}}
    program = torch.onnx.export(
        model, (), kwargs=inputs, dynamo=True, dynamic_shapes=axes, output_names=["a", "b", "c"], verbose=False
    )
    program.save(tmp_path / "m.onnx", external_data=True)
    arrays = {k: v.numpy() for k, v in inputs.items()}
    from_file = export_bundle(tmp_path / "m.onnx", arrays, tmp_path / "file", exits=["a", "b", "c"])
    from_module = export_bundle(model, inputs, tmp_path / "module", dynamic_axes=axes)
    flops = [
        [b["flops"] for b in json.loads((p / "manifest.json").read_text())["blocks"]] for p in (from_file, from_module)
    ]
    assert flops[0] == flops[1]
    with Cascade.load(from_file, threads=1) as one, Cascade.load(from_module, threads=1) as other:
        np.testing.assert_allclose(
            np.stack(one.record(arrays).logits), np.stack(other.record(arrays).logits), atol=1e-5
        )


def test_dynamic_int8_quantisation_is_seen_to_mix_rows(tmp_path):
    quantization = pytest.importorskip("onnxruntime.quantization")
    onnx.save(three_exits(21), tmp_path / "m.onnx")
    quantization.quantize_dynamic(tmp_path / "m.onnx", tmp_path / "q.onnx")
    example = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    bundle = export_bundle(tmp_path / "q.onnx", {"x": example}, tmp_path / "b", exits=["early", "middle", "late"])
    assert json.loads((bundle / "manifest.json").read_text())["rows_independent"] is False
    session = onnxruntime.InferenceSession(str(tmp_path / "q.onnx"), providers=["CPUExecutionProvider"])
    alone = np.concatenate([session.run(["late"], {"x": example[i : i + 1]})[0] for i in range(6)])
    with Cascade.load(bundle, threads=1) as cascade:
        np.testing.assert_allclose(cascade.record({"x": example}).logits[-1], alone, atol=1e-4)


@pytest.mark.parametrize(
    ("exits", "message"),
    [
        (["early", "nothing"], "no output 'nothing'"),
        (["early", "early"], "all different"),
        (["early", "mean"], "'mean' has the shape .* expected \\[batch, classes\\]"),
    ],
)
def test_exits_that_make_no_sense_are_refused_by_name(tmp_path, exits, message):
    onnx.save(three_exits(), tmp_path / "m.onnx")
    with pytest.raises(ExportError, match=message):
        export_bundle(tmp_path / "m.onnx", None, tmp_path / "b", exits=exits)


def answers(bundle, **inputs):
    with Cascade.load(bundle, threads=1) as cascade:
        return np.stack(list(cascade.record(inputs).logits))


def asked(path, names, **inputs):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(names, inputs)


X = np.random.default_rng(1).standard_normal((5, 6)).astype(np.float32)
EXITS = ["early", "middle", "late"]


def test_a_file_for_one_row_at_a_time_takes_many(tmp_path):
    model = three_exits(21, batch=1)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 6]), "shape"))
    model.graph.node.insert(2, helper.make_node("Reshape", ["a0", "shape"], ["flat"]))
    model.graph.node[3].input[0] = "flat"
    onnx.save(model, tmp_path / "m.onnx")
    bundle = export_bundle(tmp_path / "m.onnx", None, tmp_path / "b", exits=EXITS)
    singly = [asked(tmp_path / "m.onnx", EXITS, x=X[k : k + 1]) for k in range(5)]
    np.testing.assert_allclose(answers(bundle, x=X), np.concatenate(singly, axis=1), atol=1e-5)


def test_one_that_mixes_its_rows_when_there_are_many_is_refused(tmp_path):
    model = three_exits(21, batch=1)
    model.graph.node.insert(2, helper.make_node("ReduceMean", ["a0"], ["all"], keepdims=1))
    model.graph.node.insert(3, helper.make_node("Add", ["a0", "all"], ["mixed"]))
    model.graph.node[4].input[0] = "mixed"
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(
        ExportError, match=r"^the file takes 1 row at a time, .* answers a row otherwise at exit 0 than"
    ):
        export_bundle(tmp_path / "m.onnx", None, tmp_path / "b", exits=EXITS)


def test_an_exit_may_be_a_tensor_inside(tmp_path):
    onnx.save(three_exits(), tmp_path / "m.onnx")
    model = three_exits()
    del model.graph.output[:2]
    onnx.save(model, tmp_path / "inner.onnx")
    bundle = export_bundle(tmp_path / "inner.onnx", None, tmp_path / "b", exits=EXITS)
    np.testing.assert_allclose(answers(bundle, x=X), asked(tmp_path / "m.onnx", EXITS, x=X), atol=1e-5)


@pytest.mark.parametrize("opset", [11, 21])
def test_softmax_is_left_out_and_weights_may_lie_beside_the_file(tmp_path, opset):
    onnx.save(three_exits(max(opset, 13)), tmp_path / "m.onnx")
    model = three_exits(max(opset, 13))
    for output in model.graph.output[:3]:
        model.graph.node.append(helper.make_node("Softmax", [output.name], [f"p_{output.name}"], axis=1))
        output.name = f"p_{output.name}"
    onnx.save(model, tmp_path / "p.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    bundle = export_bundle(tmp_path / "p.onnx", None, tmp_path / "b", exits=[f"p_{name}" for name in EXITS])
    np.testing.assert_allclose(answers(bundle, x=X), asked(tmp_path / "m.onnx", EXITS, x=X), atol=1e-5)


def with_sigmoids(columns):
    """The exits are sigmoids of so many of the columns; 0: of one, without an axis of its own."""
    model = three_exits(18)
    index = np.array(0) if columns == 0 else np.arange(columns)
    model.graph.initializer.append(numpy_helper.from_array(index.astype(np.int64), "columns"))
    for output in model.graph.output[:3]:
        name = output.name
        model.graph.node.append(helper.make_node("Gather", [name, "columns"], [f"z_{name}"], axis=1))
        model.graph.node.append(helper.make_node("Sigmoid", [f"z_{name}"], [f"p_{name}"]))
        shape = ["N", columns] if columns else ["N"]
        output.CopyFrom(helper.make_tensor_value_info(f"p_{name}", TensorProto.FLOAT, shape))
    del model.graph.output[3]
    return model


@pytest.mark.parametrize("columns", [0, 1])
def test_the_sigmoid_of_one_logit_is_the_softmax_of_two_columns(tmp_path, columns):
    onnx.save(with_sigmoids(columns), tmp_path / "m.onnx")
    with pytest.warns(UserWarning, match="exits are one logit z, which says yes or no: they were made two columns"):
        bundle = export_bundle(tmp_path / "m.onnx", None, tmp_path / "b", classes=["no", "yes"])
    probabilities = asked(tmp_path / "m.onnx", [f"p_{name}" for name in EXITS], x=X)
    logits = answers(bundle, x=X)
    softmax = np.exp(logits[..., 1]) / np.exp(logits).sum(-1)
    np.testing.assert_allclose(softmax, np.stack(probabilities).reshape(3, 5), atol=1e-5)


def test_a_softmax_that_is_rounded_afterwards_is_left_out_too(tmp_path):
    model = three_exits()
    for k, name in enumerate(EXITS):
        model.graph.node.append(helper.make_node("Softmax", [name], [f"p{k}"], axis=-1))
        model.graph.node.append(helper.make_node("Cast", [f"p{k}"], [f"d{k}"], to=TensorProto.DOUBLE))
        model.graph.output[k].CopyFrom(helper.make_tensor_value_info(f"d{k}", TensorProto.DOUBLE, ["N", 4]))
    onnx.save(model, tmp_path / "m.onnx")
    onnx.save(three_exits(), tmp_path / "plain.onnx")
    bundle = export_bundle(tmp_path / "m.onnx", None, tmp_path / "b", exits=["d0", "d1", "d2"])
    np.testing.assert_allclose(answers(bundle, x=X), asked(tmp_path / "plain.onnx", EXITS, x=X), atol=1e-5)


def test_operations_of_onnx_runtime_are_carried_and_counted_as_others(tmp_path):
    model = three_exits()
    model.graph.node[1].CopyFrom(helper.make_node("FastGelu", ["m0"], ["a0"], domain="com.microsoft"))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, tmp_path / "m.onnx")
    bundle = export_bundle(tmp_path / "m.onnx", None, tmp_path / "b", exits=EXITS)
    np.testing.assert_allclose(answers(bundle, x=X), asked(tmp_path / "m.onnx", EXITS, x=X), atol=1e-5)
    with Cascade.load(bundle, threads=1) as cascade:
        assert "a0" in cascade.manifest.tensors
        assert [block.recomputed for block in cascade.manifest.blocks] == [0, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.graph.output.append(helper.make_tensor_value_info("a0", 1, ["N", 6])),
            r"have \[4, 4, 4, 6\] .* --exits",
        ),
        (lambda m: m.graph.input[0].type.tensor_type.__setattr__("elem_type", TensorProto.BFLOAT16), "'x' is bfloat16"),
    ],
)
def test_what_a_file_has_beside_its_exits_or_in_place_of_numbers_is_named(tmp_path, change, message):
    model = three_exits()
    change(model)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ExportError, match=message):
        export_bundle(tmp_path / "m.onnx", None, tmp_path / "b")


def test_sigmoids_of_several_columns_are_refused_as_several_labels(tmp_path):
    onnx.save(with_sigmoids(3), tmp_path / "m.onnx")
    with pytest.raises(ExportError, match="exit 'p_early' ends in a Sigmoid over 3 columns, as multi-label models do"):
        export_bundle(tmp_path / "m.onnx", None, tmp_path / "b")


def test_a_label_and_a_list_of_mappings_are_no_exits(tmp_path):
    """As scikit-learn's converters write a classifier."""
    model = three_exits(18)
    del model.graph.output[:]
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    model.graph.node.append(helper.make_node("ArgMax", ["late"], ["label"], axis=1, keepdims=0))
    keys = {"classlabels_int64s": [0, 1, 2, 3]}
    model.graph.node.append(helper.make_node("ZipMap", ["late"], ["output"], domain="ai.onnx.ml", **keys))
    model.graph.output.append(helper.make_tensor_value_info("label", TensorProto.INT64, ["N"]))
    mapping = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    model.graph.output.append(helper.make_value_info("output", helper.make_sequence_type_proto(mapping)))
    onnx.save(model, tmp_path / "m.onnx")
    onnx.save(three_exits(18), tmp_path / "plain.onnx")
    with pytest.warns(UserWarning, match="the model has one exit"):
        bundle = export_bundle(tmp_path / "m.onnx", None, tmp_path / "b")
    np.testing.assert_allclose(answers(bundle, x=X), asked(tmp_path / "plain.onnx", ["late"], x=X), atol=1e-5)


@pytest.mark.parametrize("name", ["batch size", "", "2*N"])
def test_an_axis_may_have_any_name_or_none(tmp_path, name):
    onnx.save(three_exits(batch=name or None), tmp_path / "m.onnx")
    bundle = export_bundle(tmp_path / "m.onnx", None, tmp_path / "b", exits=EXITS)
    np.testing.assert_allclose(answers(bundle, x=X), asked(tmp_path / "m.onnx", EXITS, x=X), atol=1e-5)


def test_weights_of_float16_get_a_cascade_graph_and_its_tolerance(tmp_path):
    model = three_exits(21)
    for weight in model.graph.initializer:
        if weight.data_type == TensorProto.FLOAT:
            weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).astype(np.float16), weight.name))
    for value in (
        *model.graph.input,
        *model.graph.output,
        *(o for n in model.graph.node for a in n.attribute for o in a.g.output),
    ):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(model, tmp_path / "m.onnx")
    bundle = export_bundle(tmp_path / "m.onnx", None, tmp_path / "b", exits=EXITS)
    assert json.loads((bundle / "manifest.json").read_text())["cascade"] is not None
    x = X.astype(np.float16)
    np.testing.assert_allclose(answers(bundle, x=x), asked(tmp_path / "m.onnx", EXITS, x=x), atol=0.05)


def test_something_that_is_not_onnx_is_refused(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"not a model")
    with pytest.raises(ExportError, match="not an ONNX model"):
        export_bundle(tmp_path / "m.onnx", None, tmp_path / "b")
