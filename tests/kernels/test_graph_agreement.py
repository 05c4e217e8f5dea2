"""Three forms of one gate: in the ONNX graph, in numpy, in Triton."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from offramp.kernels import exit_gate, reference

pytest.importorskip("onnx", reason="the graph's form needs onnx")
torch = pytest.importorskip("torch", reason="kernels take torch tensors")


def graph(classes: int):
    import onnx
    import onnxruntime
    from offramp.export.writing.gate_nodes import gate_inputs, gate_nodes
    from onnx import helper

    nodes, constants = gate_nodes("z", onnx.TensorProto.FLOAT, classes, "label", "score")
    body = helper.make_graph(
        nodes,
        "gate",
        [helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["batch", classes]), *gate_inputs(classes)],
        [
            helper.make_tensor_value_info("label", onnx.TensorProto.INT64, ["batch"]),
            helper.make_tensor_value_info("score", onnx.TensorProto.FLOAT, ["batch"]),
        ],
        constants,
    )
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 9)),
        elements=st.one_of(st.floats(-80, 80, width=32), st.sampled_from([0.0, 1e30, -1e30, np.inf, -np.inf])),
    ),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_graph_reference_and_kernel_give_one_label_and_one_score(device, z, inverse):
    if not np.isfinite(z).all():
        inverse = 1.0  # the graph holds infinities to the largest float after the temperature, the others before
    classes = z.shape[1]
    feed = {"gate.scale": np.ones(classes, np.float32), "gate.bias": np.zeros(classes, np.float32)}
    label, score = graph(classes).run(
        None, {"z": z, **feed, "gate.inv_temperature": np.full(classes, inverse, np.float32)}
    )
    want = reference.exit_gate(z, inv_temperature=inverse)
    got = exit_gate(torch.from_numpy(z).to(device), inv_temperature=inverse)
    assert label.tolist() == want.label.tolist() == got.label.tolist()
    np.testing.assert_allclose(score, want.score, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.score.cpu().numpy(), want.score, rtol=2e-6, atol=2e-6)
