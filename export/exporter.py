"""export_bundle: a trained multi-exit model in, a verified bundle out."""

import contextlib
import datetime
import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx_ir as ir
from offramp.export import graph as graphs
from offramp.export.dims import Cost
from offramp.export.flops import flops, uncounted
from offramp.export.graph import DATA_SIZED, Op
from offramp.export.onnx_file import OnnxFile
from offramp.export.outputs import PER_EXIT, Outputs, oddities
from offramp.export.partition import BlockPlan, Partition, Plan
from offramp.export.preprocess import check_kind, take_preprocess, try_preprocess
from offramp.export.probe import Probe, batch_axis, element_bytes, resize
from offramp.export.rewriting.batch import free_batch
from offramp.export.rewriting.fuse import fuse
from offramp.export.rewriting.heads import likely_exits, said, take_heads
from offramp.export.rows import Company, Reference, difference, keep_company, make_inputs, rounding
from offramp.export.verify import TOLERANCE, Leaving, Verification, verify, verify_cascade_graph
from offramp.export.writing.cascade_graph import CascadeGraphWriter
from offramp.export.writing.emit import BlockWriter, block_interface, dimensions, numpy_name
from offramp.export.writing.loading import check_loads
from offramp.export.writing.weights import WEIGHTS, WeightFile
from offramp.runtime.bundle import (
    CASCADE_OUTPUTS,
    DTYPES,
    MANIFEST,
    SCHEMA,
    encode_number,
    is_axis,
    read_bundle,
    unreachable,
)
from offramp.runtime.cascade import Cascade
from offramp.runtime.cost import evaluate
from offramp.runtime.errors import BundleError, ExportError, how_to_install
from offramp.runtime.execution.cpu.session import onnxruntime
from offramp.runtime.files import check_new_folder, new_folder, seal, sha256_of_file
from offramp.runtime.jobs.pages.model_card import CARD, model_card
from offramp.runtime.preprocess import Preprocess

# 24 exits make 276 segments of some 20 KB each; beyond, their number would grow out of proportion.
_MOST_BLOCKS_FOR_ALL_SEGMENTS = 24
Progress = Callable[[str], None]


def export_bundle(
    model: Any,
    example_inputs: Any,
    path: str | Path,
    *,
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = None,
    classes: Sequence[str] | None = None,
    exits: Sequence[str] | None = None,
    auxiliary: Mapping[str, Sequence[str]] | None = None,
    name: str | None = None,
    version: str = "1",
    preprocess: Preprocess | Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a multi-exit model as a bundle: one ONNX graph per block, verified against the model itself.

    model: an nn.Module that returns its exits' logits, each (batch, classes), as a sequence, stacked on axis 0, a
        MultiExitOutput, a mapping or dataclass with its keys, or a mapping with an entry an exit; what else it
        returns is left out. Or {"blocks": [...], "heads": [...]}, modules in series and as many heads, None where a
        block has no exit. Or the path of an ONNX file with one output an exit.
    example_inputs: tensors or arrays by input name (or in forward's order); any batch size. A tensor inside a mapping
        or list becomes an input named by the way to it, "batch.ids" or "xs.0". None for an ONNX file makes inputs up.
    dynamic_axes: names of the symbolic axes, {"input_ids": {0: "batch", 1: "seq"}}; each input has one "batch".
        Default: axis 0 is the batch, nothing else varies (torch); what the file declares (ONNX).
    classes: a name for each logit, "0", "1", … by default.
    exits: for an ONNX file, the outputs or inner tensors that are exits' logits, shallow to deep (default: every
        output of floating-point rows), the Softmax in front of one left out; for a torch model, names for its exits.
    auxiliary: for an ONNX file, its other outputs by kind, {"routing": ["h_0", …]}.
    preprocess: how raw rows become inputs: a Text or Image of offramp.runtime.preprocess, or the same as a
        mapping, {"kind": "text", "tokenizer": "tokenizer.json", "max_length": 64, "sample": ["hello"]}. The
        tokenizer (or sample picture) it names is copied into the bundle.
    overwrite: replace an existing bundle at `path`.

    Returns the path. Raises ExportError (nothing is written then) if the model can't be cut, or if the
    cascade of its blocks doesn't give what the model gives, at several sizes and after random compaction.
    """
    say = progress or (lambda _: None)
    folder = Path(path)
    check_new_folder(folder, marker=MANIFEST, replace=overwrite)
    check_libraries(model)
    if classes is not None and (isinstance(classes, str) or not all(isinstance(name, str) for name in classes)):
        raise ExportError(f"classes is {classes!r}, expected a list of one string a logit.")
    for field, given in (("name", name or ""), ("version", version)):
        if not isinstance(given, str):
            raise ExportError(f"{field} is {given!r}, expected a string.")
    if wrong := unreachable(name or "", version):
        raise ExportError(f"{wrong}.")
    if preprocess is not None:
        check_kind(preprocess)
    about = {
        "schema": SCHEMA,
        "version": version,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "producer": f"offramp {metadata.version('offramp')}",
        "preprocess": preprocess,
    }
    with contextlib.ExitStack() as borrowed:
        if isinstance(model, str | Path):
            source = _from_onnx(Path(model), example_inputs, dynamic_axes, exits, auxiliary)
        else:
            say("tracing the model")
            source = _from_torch(model, example_inputs, dynamic_axes, exits, preprocess, borrowed)
        with _said_of_a_fixed_batch(source.rows):
            odd = _write(folder, source, {**about, "name": name or source.title}, classes, overwrite, say)
    for one in odd:
        warnings.warn(one, stacklevel=2)
    return folder


@contextlib.contextmanager
def _said_of_a_fixed_batch(rows: int | None) -> Iterator[None]:
    try:
        yield
    except ExportError as error:
        if rows is None:
            raise
        raise ExportError(
            f"the file takes {rows} row{'s' if rows > 1 else ''} at a time, and can't be made to take others: {error} "
            "Write it with a dynamic batch, by dynamic_axes or dynamic_shapes of torch.onnx.export."
        ) from error


def check_libraries(model: Any) -> None:
    """Refuse at once what tracing or writing would miss minutes later. Raises ExportError, RuntimeUnavailable."""
    onnxruntime()
    for library in () if isinstance(model, str | Path) else ("torch", "onnxscript"):
        try:
            importlib.import_module(library)
        except ImportError as error:
            raise ExportError(
                f"exporting a torch model needs {library}, which isn't installed. {how_to_install('export')}"
            ) from error


def _write(
    folder: Path,
    source: "_Model",
    about: Mapping[str, Any],
    classes: Sequence[str] | None,
    overwrite: bool,
    say: Progress,
) -> list[str]:
    """Write the bundle; returns what is odd about the model."""
    fused = fuse(source.model)
    with new_folder(folder, marker=MANIFEST, replace=overwrite) as temporary:
        if fused is not None:
            try:
                return _build(temporary, fused, source, about, classes, say)
            except ExportError as error:
                say(f"without fused operations, since with them: {error}")
                for file in temporary.iterdir():
                    file.unlink(missing_ok=True)
        return _build(temporary, source.model, source, about, classes, say)


@dataclass(frozen=True)
class _Model:
    """A model before it is cut: its graph, what its outputs are, and how to ask the original.

    rows: it was made for so many at a time.
    """

    model: ir.Model
    outputs: Outputs
    axes: Mapping[str, Mapping[int, str]] | None
    example: Any
    reference: Reference
    against: str
    names: list[str]
    title: str
    notes: Sequence[str] = ()
    rows: int | None = None


def _from_onnx(
    path: Path,
    example: Any,
    axes: Mapping[str, Mapping[int, str]] | None,
    exits: Sequence[str] | None,
    auxiliary: Mapping[str, Sequence[str]] | None,
) -> _Model:
    model = graphs.read_onnx(path)
    _refuse_bfloat16((v.name, v.dtype) for v in (*model.graph.inputs, *model.graph.initializers.values()))
    rows = free_batch(model)
    outputs = _onnx_outputs(model.graph, exits, auxiliary)
    names = list(outputs.logits)
    file = OnnxFile(path, rows=rows)
    heads = take_heads(model.graph, names, file.tensors)
    outputs.logits[:] = [head.output for head in heads]
    named = {k: {int(i): str(v) for i, v in a.items()} for k, a in axes.items()} if axes else None
    reference = file.reference(outputs, heads)
    return _Model(model, outputs, named, example, reference, "onnx", names, path.stem, said(heads), rows)


def _from_torch(
    model: Any,
    example: Any,
    axes: Mapping[str, Mapping[int, str]] | None,
    exits: Sequence[str] | None,
    preprocess: Preprocess | Mapping[str, Any] | None,
    borrowed: contextlib.ExitStack,
) -> _Model:
    """borrowed: what gives the module back, as it was, when the export ends."""
    from offramp.export.tracing import module, trace, unwrap

    given = unwrap.as_module(model)
    module.refuse_training(given)
    borrowed.enter_context(unwrap.uncompiled(given))
    module_, tensors = unwrap.name_inputs(given, example)
    run = borrowed.enter_context(module.Runner(module_))
    named = trace.check_axes(tensors, axes)
    arrays = {k: np.ascontiguousarray(v.detach().cpu().numpy()) for k, v in tensors.items()}
    shapes = {k: [named[k].get(i, int(d)) for i, d in enumerate(v.shape)] for k, v in arrays.items()}
    if preprocess is not None:  # what is wrong with it is said before minutes of tracing
        take_preprocess(preprocess, {k: (v.dtype.name, shapes[k]) for k, v in arrays.items()})
    traced = resize(arrays, shapes, _distinct_sizes(arrays, named))
    graph, outputs = trace.trace(run, traced, named)
    names = list(exits) if exits else [f"exit_{j}" for j in range(len(outputs.logits))]
    return _Model(graph, outputs, named, arrays, run, "torch", names, type(given).__name__)


def _build(
    folder: Path,
    model: ir.Model,
    source: _Model,
    about: Mapping[str, Any],
    classes: Sequence[str] | None,
    say: Progress,
) -> list[str]:
    """Cut the model and write it into `folder` as a verified bundle; returns what is odd about it."""
    graph = graphs.prepare(model, source.outputs, source.axes)
    _check_names(graph, source.names)
    taken = None
    if about["preprocess"] is not None:
        takes = {name: (numpy_name(dtype), shape) for name, (dtype, shape) in graph.inputs.items()}
        taken = take_preprocess(about["preprocess"], takes)
    store = WeightFile(folder, graph.weights)
    say("looking at shapes")
    example = source.example if source.against == "torch" else _onnx_example(graph, source.example)
    probe = Probe(graph, store, folder, example)
    count = _classes(graph, probe, classes, of_a_file=source.against == "onnx")
    say("cutting it into blocks")
    company = keep_company(probe, source.reference)
    if source.rows is not None:
        _refuse_mixed(probe, source.reference, company)
    partition, plan = _cut(graph, probe, company)
    unknown = uncounted((op for block in plan.blocks for op in block.ops), probe.shapes)
    if unknown and not any(op.proto.op_type in DATA_SIZED for op in graph.ops):
        op = unknown[0].proto
        raise ExportError(
            f"{op.op_type} {op.name!r} makes {op.output[0]!r}, of a size that no formula of {graph.axes} gives: what a "
            "row costs can't be told. Fix the axis that it depends on, by leaving it out of dynamic_axes."
        )
    labels = list(classes) if classes is not None else [str(k) for k in range(count)]
    document = {**about, "classes": labels, **_write_graphs(graph, probe, partition, plan, store, folder)}
    if taken is not None:
        taken.copy(folder)
        document["preprocess"] = msgspec.to_builtins(taken.spec)
    for exit_, name in zip(document["exits"], source.names, strict=True):
        exit_["name"] = name
    document["files"] = {
        file.name: {"sha256": sha256_of_file(file), "bytes": file.stat().st_size} for file in sorted(folder.iterdir())
    }
    document["rows_independent"] = company.independent
    (folder / MANIFEST).write_bytes(seal(document))
    half = ir.DataType.FLOAT16 in graph.dtypes.values()
    if half:
        check_loads([folder / part["file"] for part in (*document["blocks"], *document["segments"])])
    say("verifying the cascade against the model")
    result = verify(folder, probe, source.reference, company)
    result.summary.update(against=source.against, batch_difference=company.difference)
    _record(document, result)
    (folder / MANIFEST).write_bytes(seal(document))
    if len(plan.blocks) > 1:
        say("nesting the blocks into one graph")
        protos = _plain_blocks(graph, probe, plan, store, document)
        _add_cascade_graphs(folder, document, protos, probe, company, result.leaving, say, half=half)
    if document["preprocess"] is None:
        read_bundle(folder)
    else:
        say("trying raw rows")
        with Cascade.load(folder) as cascade:
            try_preprocess(cascade.bundle, cascade)
    (folder / CARD).write_text(model_card(document), encoding="utf-8")
    notes = [*source.notes, *_about_costs(graph, probe, unknown)]
    if not company.independent:
        notes.append(
            f"the model's rows depend on the rows beside them (by {company.difference:.2g} of their logits' size): "
            "requests don't share batches, and rows run one by one."
        )
    rows = company.different({**probe.example_sizes, "batch": 16})
    return [*notes, *oddities(source.reference(rows)["logits"])]


def _refuse_mixed(probe: Probe, reference: Reference, company: Company) -> None:
    """Raises ExportError where a file of a fixed batch says something else of a row than when it is alone there."""
    if not company.independent:
        raise ExportError(
            f"a row's answer depends on the rows beside it (by {company.difference:.2g} of its logits' size)."
        )
    rows = company.different({**probe.example_sizes, "batch": 7})
    pairs = zip(probe.answers(rows)["logits"], reference(rows)["logits"], strict=True)
    for j, (a, b) in enumerate(pairs):
        if not difference(a, b) <= max(TOLERANCE, rounding(probe.graph)):
            raise ExportError(
                f"given several, its graph answers a row otherwise at exit {j} than the file does alone: an index or "
                "size in it is that of a fixed number of rows."
            )


def _about_costs(graph: graphs.ModelGraph, probe: Probe, unknown: Sequence[Op]) -> list[str]:
    """What is odd about what rows cost: sentences. unknown: operations that aren't counted."""
    notes = []
    if unknown:
        op = unknown[0].proto
        notes.append(
            f"FLOPs are without those of {len(unknown)} operations ({op.op_type} {op.name!r} first), whose sizes "
            "depend on the data."
        )
    sizes = {**probe.example_sizes, "batch": 1}
    needed = ([graph.ops[i] for i in graph.ancestors([name])] for name in graph.outputs.logits)
    costs = [evaluate(str(flops(ops, probe.shapes)), sizes) for ops in needed]
    for j, dear in enumerate(costs[:-1]):
        k = min(range(j + 1, len(costs)), key=costs.__getitem__)
        if costs[k] < dear:
            notes.append(
                f"exit {j} alone costs {dear:,} FLOPs, more than exit {k}, which takes {costs[k]:,}: a smaller head "
                "there, or none, saves more."
            )
    return notes


def _add_cascade_graphs(
    folder: Path,
    document: dict[str, Any],
    protos: list[onnx.ModelProto],
    probe: Probe,
    company: Company,
    leaving: Sequence[Leaving],
    say: Progress,
    *,
    half: bool,
) -> None:
    """Add the cascade graph, and the one that gives every exit's word; neither if it doesn't give what blocks give."""
    count = len(protos)
    cascade_graph = {
        "file": "cascade.onnx",
        "gates": count,
        "exits": list(range(count)),
        "outputs": list(CASCADE_OUTPUTS),
        "thresholds_per_row": True,
    }
    more = {**cascade_graph, "every_exit": "cascade_every_exit.onnx"}
    for field, described in (("file", cascade_graph), ("every_exit", more)):
        file = folder / str(described[field])
        try:
            onnx.save(CascadeGraphWriter(document, protos, every_exit=field == "every_exit").proto(), file)
            if half:
                check_loads([file])
            files = {**document["files"], file.name: {"sha256": sha256_of_file(file), "bytes": file.stat().st_size}}
            (folder / MANIFEST).write_bytes(seal({**document, "files": files, "cascade": described}))
            verify_cascade_graph(folder, probe, company, leaving, every_exit=field == "every_exit")
        except (ExportError, BundleError) as error:
            say(f"without {file.name}: {error}")
            file.unlink(missing_ok=True)
            (folder / MANIFEST).write_bytes(seal(document))
            return
        document |= {"files": files, "cascade": described}


def _cut(graph: graphs.ModelGraph, probe: Probe, company: Company) -> tuple[Partition, Plan]:
    """A plan whose carried tensors belong to their rows.

    A tensor may have a batch axis and yet say where a row stands in its batch (an index made by Range over
    the batch): carried past a compaction it would point at other rows. Each tensor of a plan is looked at
    with rows left out; one that doesn't follow its rows is banned, and the cut is made again.
    """
    banned: set[str] = set()
    while True:
        partition = Partition(graph, probe.shapes, probe.example_sizes, banned)
        plan = partition.plan()
        carried = {name for block in plan.blocks for name in block.carried}
        if not company.independent or not carried:
            return partition, plan
        wrong = probe.positional(sorted(carried), company.different({**probe.example_sizes, "batch": 6}))
        if not wrong:
            return partition, plan
        banned |= wrong


def _onnx_outputs(graph: Any, exits: Sequence[str] | None, auxiliary: Mapping[str, Sequence[str]] | None) -> Outputs:
    there = [v.name for v in graph.outputs]
    extra = {kind: list(names) for kind, names in (auxiliary or {}).items()}
    taken = {n for names in extra.values() for n in names}
    chosen = list(exits) if exits else [n for n in likely_exits(graph) if n not in taken]
    for output in sorted(taken):
        if output not in there:
            raise ExportError(f"the ONNX model has no output {output!r}; it has {there}.")
    try:
        return Outputs(logits=chosen, **extra)
    except TypeError as error:
        raise ExportError(
            f"auxiliary has the kinds {list(extra)}: expected features, routing, external, reservation."
        ) from error


def _onnx_example(graph: graphs.ModelGraph, given: Any) -> dict[str, np.ndarray[Any, Any]]:
    if given is None:
        return make_inputs(graph, {axis: 4 if axis == "batch" else 16 for axis in graph.axes})
    if not isinstance(given, Mapping):
        given = dict(zip(graph.inputs, given if isinstance(given, Sequence) else [given], strict=False))
    example = {k: np.ascontiguousarray(v) for k, v in given.items()}
    if set(example) != set(graph.inputs):
        raise ExportError(f"example_inputs has {list(example)}, the model's inputs are {list(graph.inputs)}.")
    for k, array in example.items():
        if array.ndim != len(graph.inputs[k][1]):
            raise ExportError(
                f"example_inputs[{k!r}] has {array.ndim} axes, the model's has {len(graph.inputs[k][1])}."
            )
    return example


def _distinct_sizes(example: Mapping[str, Any], axes: Mapping[str, Mapping[int, str]]) -> dict[str, int]:
    """Sizes to trace at: a batch of two or more (one would be taken for a constant) that equals no other size."""
    sizes = {name: example[k].shape[i] for k, named in axes.items() for i, name in named.items()}
    others = {d for array in example.values() for d in array.shape}
    batch = next(n for n in (3, 5, 7, 11, 13, 17) if n not in others)
    return {a: batch if a == "batch" else max(2, n) for a, n in sizes.items()}


def _check_names(graph: graphs.ModelGraph, names: list[str]) -> None:
    if len(names) != len(graph.outputs.logits) or len(set(names)) != len(names):
        raise ExportError(
            f"exits has {len(names)} names for {len(graph.outputs.logits)} exits: expected one each, all different."
        )
    for axis in graph.axes:
        if not is_axis(axis):
            raise ExportError(f"the axis name {axis!r} is not a plain identifier: give dynamic_axes with other names.")
    _refuse_bfloat16(graph.dtypes.items())
    for name, (dtype, _) in graph.inputs.items():
        if numpy_name(dtype) not in DTYPES:
            raise ExportError(f"input {name!r} has the type {dtype}: expected one of {sorted(DTYPES)}.")


def _refuse_bfloat16(types: Iterable[tuple[str | None, ir.DataType | None]]) -> None:
    for name, kind in types:
        if kind == ir.DataType.BFLOAT16:
            raise ExportError(
                f"{name!r} is bfloat16, which ONNX Runtime can't compute with on a CPU: export the model in float32 "
                "(model.float(), and without autocast in forward)."
            )


def _classes(graph: graphs.ModelGraph, probe: Probe, classes: Sequence[str] | None, *, of_a_file: bool) -> int:
    counts = []
    for output in graph.outputs.logits:
        dims = probe.shapes.get(output)
        if dims is None or len(dims) != 2 or dims[0].plain != "batch" or not dims[1].constant:
            raise ExportError(f"exit {output!r} has the shape {dimensions(dims)}: expected [batch, classes].")
        if not graph.dtypes[output].is_floating_point():
            raise ExportError(f"exit {output!r} has the type {graph.dtypes[output]}: expected floating-point logits.")
        counts.append(dims[1].constant)
    if len(set(counts)) != 1:
        way_out = " Name those outputs that are exits: exits, or --exits." if of_a_file else ""
        raise ExportError(
            f"the exits {graph.outputs.logits} have {counts} classes: expected the same number at each.{way_out}"
        )
    if classes is not None and len(classes) != counts[0]:
        raise ExportError(f"classes has {len(classes)} names, the logits have {counts[0]} columns.")
    for output in graph.outputs.names:
        dims = probe.shapes.get(output)
        if output not in graph.outputs.logits and (batch_axis(dims) != 0):
            raise ExportError(f"output {output!r} has the shape {dimensions(dims)}: expected [batch, …].")
    return int(counts[0])


def _write_graphs(
    graph: graphs.ModelGraph, probe: Probe, partition: Partition, plan: Plan, store: WeightFile, folder: Path
) -> dict[str, Any]:
    """Write every block and segment; the manifest's inputs, tensors, blocks, segments and exits."""
    shapes, outputs = probe.shapes, graph.outputs
    classes = int((shapes[outputs.logits[0]] or [])[1].constant or 0)
    writer = BlockWriter(graph, shapes, store)

    def write(block: BlockPlan, exit: int, file: str) -> dict[str, Any]:
        logits, label, score = outputs.logits[exit], f"offramp.label_{exit}", f"offramp.score_{exit}"
        given = block_interface(block, logits)
        onnx.save(writer.proto(block.ops, block.inputs, given, (logits, label, score, classes)), folder / file)
        carried = Cost()
        for name in block.carried:
            carried.add(element_bytes(graph.dtypes[name]), *(shapes[name] or []))
        return {
            "file": file,
            "inputs": block.inputs,
            "outputs": [*given, label, score],
            "exit": exit,
            "flops": str(flops(block.ops, shapes)),
            "bytes": str(carried),
            "params": writer.params(block.ops),
            "nodes": len(block.ops),
            "recomputed": len(block.recomputed),
        }

    count = len(plan.blocks)
    blocks = [write(block, j, f"block_{j}.onnx") for j, block in enumerate(plan.blocks)]
    segments = [
        {
            **write(partition.merge(plan, first, last), last, f"segment_{first}_{last}.onnx"),
            "first": first,
            "last": last,
        }
        for first, last in _spans(count)
    ]
    tensors = {
        name: {
            "dtype": numpy_name(graph.dtypes[name]),
            "shape": dimensions(shapes[name]),
            "batch_axis": batch_axis(shapes[name]),
            "pad": None,
        }
        for block in plan.blocks
        for name in block.carried
    }
    exits = [
        {
            "name": "",
            "block": j,
            "logits": outputs.logits[j],
            "label": f"offramp.label_{j}",
            "score": f"offramp.score_{j}",
            "routing": [n for n in outputs.routing if plan.made_in[n] <= j],
            **{kind: names[j] if (names := getattr(outputs, kind)) else None for kind in PER_EXIT},
        }
        for j in range(count)
    ]
    inputs = [
        {"name": n, "dtype": numpy_name(dtype), "shape": shape, "pad": None}
        for n, (dtype, shape) in graph.inputs.items()
    ]
    return {"inputs": inputs, "tensors": tensors, "blocks": blocks, "segments": segments, "exits": exits}


def _plain_blocks(
    graph: graphs.ModelGraph, probe: Probe, plan: Plan, store: WeightFile, document: Mapping[str, Any]
) -> list[onnx.ModelProto]:
    """Every block with a gate that has no calibration inputs: what the cascade graph is made of."""
    writer = BlockWriter(graph, probe.shapes, store)
    protos = []
    for block, exit_ in zip(plan.blocks, document["exits"], strict=True):
        gate = (exit_["logits"], exit_["label"], exit_["score"], len(document["classes"]))
        given = list(dict.fromkeys([*block.carried, exit_["logits"]]))
        protos.append(writer.proto(block.ops, block.inputs, given, gate, plain=True))
    return protos


def _spans(blocks: int) -> list[tuple[int, int]]:
    """Runs of blocks to merge: all of them, or for very deep cascades those that begin or end at an end."""
    spans = [(first, last) for first in range(blocks) for last in range(first + 1, blocks)]
    if blocks <= _MOST_BLOCKS_FOR_ALL_SEGMENTS:
        return spans
    return [(first, last) for first, last in spans if first == 0 or last == blocks - 1]


def _record(document: dict[str, Any], result: Verification) -> None:
    """Put what verification found into the manifest: pad values, and the differences seen."""
    document["verified"] = result.summary
    pads = {name: encode_number(value) for name, value in result.pads.items()}
    for given in document["inputs"]:
        given["pad"] = pads.get(given["name"])
    for name, tensor in document["tensors"].items():
        tensor["pad"] = pads.get(name)


__all__ = ["WEIGHTS", "export_bundle"]
