"""offramp inspect"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
from offramp.runtime.bundle import read_bundle
from offramp.runtime.cascade import Cascade
from offramp.runtime.cli.options import add_runtime, add_sizes, sizes_of
from offramp.runtime.cli.output import print_json
from offramp.runtime.files import write_atomically
from offramp.runtime.jobs.bundles.inspect import InsideCascade, Inspection, Part, inspect
from offramp.runtime.jobs.bundles.inspect_page import inside, page, readable, svg
from offramp.runtime.jobs.bundles.timing import time_cascade_graph, time_graphs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--no-times", action="store_true", help="don't measure, only read")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--html", type=Path, help="also write a page with a picture of the cascade")
    parser.add_argument("--svg", type=Path, help="also write the picture alone")
    add_sizes(parser)
    add_runtime(parser)


def run(args: argparse.Namespace) -> int:
    bundle = read_bundle(args.bundle)
    sizes, timings, cascade_graph = sizes_of(args, bundle.manifest), None, None
    if not args.no_times:
        with Cascade.load(args.bundle, args.device, threads=args.threads) as cascade:
            graphs = [*bundle.manifest.blocks, *bundle.manifest.segments]
            timings = time_graphs(cascade, graphs, sizes)
            if cascade.executor.runs_cascade_graph:
                cascade_graph = time_cascade_graph(cascade, sizes)
    found = inspect(bundle, sizes, timings, cascade_graph)
    if args.json:
        print_json(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    else:
        print(describe(found))
    for target, text in ((args.html, page), (args.svg, svg)):
        if target is not None:
            write_atomically(target, text(found).encode())
    return 0


def describe(found: Inspection) -> str:
    """The inspection as text."""
    sizes = ", ".join(f"{axis}={size}" for axis, size in found.sizes.items())
    lines = [
        f"{found.name} {found.version}: {len(found.blocks)} blocks, {len(found.segments)} merged graphs, "
        f"{found.classes} classes{f'; figures at {sizes}' if sizes else ''}",
        "",
        *_table(found, found.blocks),
    ]
    if found.segments:
        lines += ["", *_table(found, found.segments)]
    if found.cascade_graph is not None:
        lines += ["", *_inside(found, found.cascade_graph)]
    if found.carried:
        rows = [("carried tensor", "type", "shape", "batch axis", "pad", "bytes a row")]
        rows += [(c.name, c.dtype, c.shape, str(c.batch_axis), c.pad, f"{c.bytes:,}") for c in found.carried]
        lines += ["", *_aligned(rows)]
    total = sum(found.files.values())
    return "\n".join([*lines, "", f"{len(found.files)} files, {readable(total, 'B')} in all"])


def _inside(found: Inspection, graph: InsideCascade) -> list[str]:
    """The cascade graph, and what each block takes in it."""
    said = f"{graph.file}: all blocks, gates and compactions in one graph, {readable(graph.file_bytes, 'B')}"
    head, rows = inside(found, graph)
    return [said, *(_aligned([tuple(head), *map(tuple, rows)]) if rows else [])]


def _table(found: Inspection, parts: tuple[Part, ...]) -> list[str]:
    times = tuple(f"ms at {rows}" for rows in found.rows)
    rows = [("graph", "exit", "FLOPs a row", "hands on", "params", "nodes", "repeated", "file", *times)]
    return _aligned(rows + [_row(part) for part in parts])


def _row(part: Part) -> tuple[str, ...]:
    return (
        part.file,
        part.exit or "-",
        readable(part.flops),
        readable(part.handed_on, "B"),
        readable(part.params),
        str(part.nodes),
        str(part.recomputed),
        readable(part.file_bytes, "B"),
        *(f"{seconds * 1e3:.2f}" for seconds in part.seconds or ()),
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
