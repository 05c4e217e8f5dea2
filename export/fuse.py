"""Attention, layer norms and activations as the single operations that ONNX Runtime has kernels for.

The exporter spells attention out in some twenty nodes; at small batches a node costs as much as its work.
onnxscript keeps the rewrites; what they make is verified like everything else, and given up if it fails.
"""

import contextlib
import io
import logging

import onnx_ir as ir
from onnx_ir.passes import common as passes

_LARGEST_FOLD = 1 << 31


def fuse(model: ir.Model) -> ir.Model | None:
    """A fused copy of the model; None where there is nothing to fuse, or the rewriter can't handle it."""
    from onnxscript import optimizer
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    copy = model.clone()
    names = [value.name for value in copy.graph.outputs]
    quiet = logging.getLogger("onnxscript")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            copy, counts = optimize_for_ort(copy)
            # Queries, keys and values become one matrix: their weights are joined here, once.
            optimizer.fold_constants(copy, input_size_limit=_LARGEST_FOLD, output_size_limit=_LARGEST_FOLD)
    except Exception:  # a rewriter's own trouble is no reason to refuse a model
        return None
    finally:
        quiet.setLevel(level)
    passes.RemoveUnusedNodesPass()(copy)
    _sink_expands(copy.graph)
    _drop_unused_outputs(copy.graph)
    if not any(counts.values()) or [value.name for value in copy.graph.outputs] != names:
        return None
    return copy


def _drop_unused_outputs(graph: ir.Graph) -> None:
    """Optional outputs that nobody reads (a fused layer norm's statistics) aren't computed."""
    kept = set(graph.outputs)
    for node in graph:
        if node.domain != "com.microsoft" or len(node.outputs) == 1:
            continue
        for value in node.outputs[1:]:
            if not value.uses() and value not in kept:
                value.name = ""


def _sink_expands(graph: ir.Graph) -> None:
    """Scale a mask before it is broadcast: Mul(Expand(x), constant) becomes Expand(Mul(x, constant)).

    What crosses a cut is then the small scaled mask, and a block only broadcasts it again.
    """
    for node in list(graph):
        if node.op_type != "Expand" or node.domain or len(node.outputs[0].uses()) != 1:
            continue
        use, _ = next(iter(node.outputs[0].uses()))
        if use.op_type not in ("Mul", "Add", "Sub", "Div") or use.domain or node.outputs[0] in graph.outputs:
            continue
        expanded, scaled = node.outputs[0], use.outputs[0]
        source, other = node.inputs[0], next((v for v in use.inputs if v is not expanded), None)
        if source is None or other is None or other.const_value is None:
            continue
        if other.const_value.size != 1 or len(other.const_value.shape) > 1:
            continue
        inputs = [source if v is expanded else v for v in use.inputs]
        small = ir.node(use.op_type, inputs=inputs)
        small.outputs[0].name = f"{scaled.name}.small"
        small.outputs[0].type = scaled.type
        small.outputs[0].shape = source.shape
        broad = ir.node("Expand", inputs=[small.outputs[0], node.inputs[1]])
        broad.outputs[0].name = f"{scaled.name}.broad"
        broad.outputs[0].type, broad.outputs[0].shape = scaled.type, scaled.shape
        graph.insert_before(use, [small, broad])
        ir.convenience.replace_all_uses_with(scaled, broad.outputs[0], replace_graph_outputs=True)
        graph.remove([use, node], safe=True)
