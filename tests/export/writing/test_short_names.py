"""Short names: everything inside is renamed, nothing that others refer to."""

import numpy as np
import onnx
import onnxruntime
from offramp.export.writing.short_names import shorten
from onnx import TensorProto, helper, numpy_helper


def nested():
    """y = b x + weight if the sum of b x isn't 0, else x: branches read outer values, the input has a short name."""
    number = {"b": 1.0, "weight of\nthe branch": 2.0}
    weights = [numpy_helper.from_array(np.full(1, v, np.float32), k) for k, v in number.items()]
    out = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in ("then.y", "else.y")]
    added = helper.make_node("Add", ["scaled by b", "weight of\nthe branch"], ["then.y"], name="add")
    then = helper.make_graph([added], "then", [], out[:1], weights[1:])
    other = helper.make_graph([helper.make_node("Identity", ["a"], ["else.y"])], "else", [], out[1:])
    nodes = [
        helper.make_node("Mul", ["a", "b"], ["scaled by b"]),
        helper.make_node("ReduceSum", ["scaled by b", ""], ["the sum"], keepdims=0),
        helper.make_node("Cast", ["the sum"], ["any"], to=TensorProto.BOOL),
        helper.make_node("If", ["any"], ["y"], then_branch=then, else_branch=other),
    ]
    given = helper.make_tensor_value_info("a", TensorProto.FLOAT, ["n"])
    body = helper.make_graph(
        nodes, "g", [given], [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])], weights[:1]
    )
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def run(model, x):
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["y"], {"a": np.array(x, np.float32)})[0].tolist()


def test_inputs_and_outputs_keep_their_names_and_the_rest_gets_short_ones():
    model = nested()
    shorten(model.graph)
    assert [i.name for i in model.graph.input] == ["a"]
    assert [o.name for o in model.graph.output] == ["y"]
    then = next(a.g for a in model.graph.node[-1].attribute if a.name == "then_branch")
    inner = [*(n for node in model.graph.node for n in node.output), then.initializer[0].name, then.output[0].name]
    assert all(len(name) == 1 for name in inner)
    assert len(set(inner)) == len(inner)
    assert model.graph.node[1].input[1] == ""  # an input that isn't given stays none


def test_it_computes_what_it_did():
    before, after = nested(), nested()
    shorten(after.graph)
    for x in ([1, 2], [0, 0], [-3]):
        assert run(after, x) == run(before, x)
