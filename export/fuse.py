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
