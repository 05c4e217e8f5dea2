"""Attention as the single operation that ONNX Runtime has a kernel for.

The exporter spells attention out in some twenty nodes; at small batches a node costs as much as its work.
onnxscript keeps the rewrites; what they make is verified like everything else, and given up if it fails.
Only the attention proper is fused: with its projections packed in as well (com.microsoft.Attention) MiniLM took
1.24 of the plain time on one thread, with them apart 0.89. Norms and activations ONNX Runtime fuses by itself.
"""

import onnx_ir as ir
from offramp.export.rewriting.quiet import quietly
from onnx_ir.passes import common as passes


def fuse(model: ir.Model) -> ir.Model | None:
    """A fused copy of the model; None where there is nothing to fuse, or the rewriter can't handle it."""
    names = [value.name for value in model.graph.outputs]
    try:
        with quietly("onnxscript"):
            copy = model.clone()
            fused = _fuse_attention(copy)
    except Exception:  # a rewriter's own trouble is no reason to refuse a model
        return None
    passes.RemoveUnusedNodesPass()(copy)
    _sink_expands(copy.graph)
    _drop_unused_outputs(copy.graph)
    if not fused or [value.name for value in copy.graph.outputs] != names:
        return None
    return copy


def _fuse_attention(model: ir.Model) -> int:
    """Fuse in place; how many attentions were."""
    from onnxscript.optimizer import optimize
    from onnxscript.rewriter.ort_fusions import shape_optimization
    from onnxscript.rewriter.ort_fusions.mha import fuse_mha1, fuse_mha2
    from onnxscript.rewriter.ort_fusions.mha_scale import fuse_mha_scale
    from onnxscript.rewriter.ort_fusions.sdpa import fuse_sdpa
    from onnxscript.rewriter.ort_fusions.sdpa_via_mha import replace_sdpa_by_mha

    passes.ShapeInferencePass()(model)
    optimize(model)
    shape_optimization.rules.apply_to_model(model)
    optimize(model)
    if not fuse_sdpa(model, apply_shape_inference=True):
        return 0
    made = fuse_mha1(model) + fuse_mha2(model)
    fuse_mha_scale(model)
    made += replace_sdpa_by_mha(model)
    optimize(model)  # inlines what was prepared but not fused
    return int(made)


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
