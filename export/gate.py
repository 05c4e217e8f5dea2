"""The exit gate inside a block's graph: logits -> label and log-odds score, as offramp.runtime.scores defines them.

    z' = scale * z + bias,  y = argmax z' (lowest index on a tie)
    score = t * (z'_y - m) - log sum_{k != y} exp(t * (z'_k - m)),  m = max_{k != y} z'_k,  t = inv_temperature[y]

Never -log(sum exp - 1), and no softmax: those round to infinity for confident rows. Logits and score are
clipped to the largest finite float32, so a score is never infinite; a NaN logit gives a NaN score.
"""

from typing import Any

import numpy as np
import onnx
from offramp.runtime.bundle import GATE_INPUTS
from onnx import helper, numpy_helper

_LIMIT = np.finfo(np.float32).max


def gate_inputs(classes: int) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [classes]) for name in GATE_INPUTS]


def gate_nodes(logits: str, dtype: int, label: str, score: str) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Nodes and constants from `logits` (batch, C) to `label` int64 (batch,) and `score` float32 (batch,)."""
    scale, bias, inv_temperature = GATE_INPUTS
    prefix = f"{score}."
    nodes: list[onnx.NodeProto] = []

    def node(kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{prefix}{kind.lower()}_{len(nodes)}"
        nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    constants = [
        numpy_helper.from_array(np.array(-_LIMIT, np.float32), prefix + "low"),
        numpy_helper.from_array(np.array(_LIMIT, np.float32), prefix + "high"),
        numpy_helper.from_array(np.array([1], np.int64), prefix + "axis"),
    ]
    low, high, axis = (c.name for c in constants)
    raw = logits if dtype == onnx.TensorProto.FLOAT else node("Cast", logits, to=onnx.TensorProto.FLOAT)
    z = node("Clip", node("Add", node("Mul", raw, scale), bias), low, high)
    top = node("ArgMax", z, axis=1, keepdims=1)
    temperature = node("Gather", inv_temperature, top)
    hole = node("ConstantOfShape", node("Shape", top), value=numpy_helper.from_array(np.array([-np.inf], np.float32)))
    rest = node("ScatterElements", z, top, hole, axis=1)
    # A sole class has no rest: its maximum is then the clipping limit, and the score saturates.
    runner_up = node("Max", node("ReduceMax", rest, axis, keepdims=1), low)
    lead = node("Mul", node("Sub", node("ReduceMax", z, axis, keepdims=1), runner_up), temperature)
    crowd = node("ReduceLogSumExp", node("Mul", node("Sub", rest, runner_up), temperature), axis, keepdims=1)
    node("Squeeze", node("Clip", node("Sub", lead, crowd), low, high), axis, output=score)
    node("Squeeze", top, axis, output=label)
    return nodes, constants
