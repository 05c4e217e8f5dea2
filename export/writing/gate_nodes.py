"""The exit gate inside a block's graph: logits -> label and log-odds score, as offramp.runtime.scores defines them.

    z' = scale * z + bias,  y = argmax z' (lowest index on a tie)
    score = t z'_y - m - log sum_{k != y} exp(t z'_k - m),  t = inv_temperature[y],  m = max_{k != y} t z'_k

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


def gate_nodes(
    logits: str, dtype: int, classes: int, label: str, score: str, *, plain: bool = False
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Nodes and constants from `logits` (batch, C) to `label` int64 (batch,) and `score` float32 (batch,).

    plain: scale 1, bias 0 and temperature 1, without the operations that they would take.
    """
    scale, bias, inv_temperature = GATE_INPUTS
    prefix = f"{score}."
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def node(kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{prefix}{kind.lower()}_{len(nodes)}"
        nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def constant(name: str, value: Any, kind: type[np.generic]) -> str:
        constants.append(numpy_helper.from_array(np.array(value, kind), prefix + name))
        return prefix + name

    low, high = constant("low", -_LIMIT, np.float32), constant("high", _LIMIT, np.float32)
    axis = constant("axis", [1], np.int64)
    raw = logits if dtype == onnx.TensorProto.FLOAT else node("Cast", logits, to=onnx.TensorProto.FLOAT)
    if plain:
        top = node("ArgMax", raw, axis=1, keepdims=0, output=label)
        scaled = node("Clip", raw, low, high)
        masked = node(
            "OneHot", top, constant("depth", classes, np.int64), constant("mask", [0, -np.inf], np.float32), axis=1
        )
        rest = node("Add", scaled, masked)
    else:
        z = node("Add", node("Mul", raw, scale), bias)
        top = node("ArgMax", z, axis=1, keepdims=1)
        # Scaled before the differences are taken; a temperature of 1, the usual one, rounds nothing.
        scaled = node("Clip", node("Mul", z, node("Gather", inv_temperature, top)), low, high)
        nothing = constant("nothing", -np.inf, np.float32)
        rest = node("Where", node("Equal", constant("classes", range(classes), np.int64), top), nothing, scaled)
        node("Squeeze", top, axis, output=label)
    runner_up = node("ReduceMax", rest, axis, keepdims=1)
    if classes == 1:  # a sole class has no rest: with the clipping limit for its maximum the score saturates
        runner_up = node("Max", runner_up, low)
    lead = node("Sub", node("ReduceMax", scaled, axis, keepdims=1), runner_up)
    crowd = node("ReduceLogSumExp", node("Sub", rest, runner_up), axis, keepdims=1)
    node("Squeeze", node("Clip", node("Sub", lead, crowd), low, high), axis, output=score)
    return nodes, constants
