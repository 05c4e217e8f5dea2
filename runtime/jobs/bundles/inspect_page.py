"""An inspected bundle as a picture: one self-contained HTML page with an SVG of the cascade."""

from html import escape

from offramp.runtime.jobs.bundles.inspect import InsideCascade, Inspection, Part
from offramp.runtime.jobs.pages.look import document, folded, section
from offramp.runtime.jobs.pages.tables import plain_table
from offramp.runtime.jobs.pages.terms import Terms

_CARRIED = ["tensor", "type", "shape", "batch axis", "pad", "bytes a row"]
_SEGMENTS = ["graph", "blocks", "FLOPs a row", "nodes", "file"]
_WIDTH, _BOX, _BLOCK, _GAP, _LEFT = 760, 470, 74, 58, 40


def readable(number: float, unit: str = "") -> str:
    """1536 -> "1.54 k": three digits and a prefix, for people."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def svg(found: Inspection) -> str:
    """The blocks from top to bottom, each filled as far as its FLOPs go against the largest block's."""
    most = max((part.flops for part in found.blocks), default=1) or 1
    height = len(found.blocks) * (_BLOCK + _GAP) - _GAP + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="blocks and exits of {escape(found.name)}" font-family="system-ui, sans-serif" font-size="13">'
    ]
    for k, part in enumerate(found.blocks):
        parts += _block(found, part, k, 10 + k * (_BLOCK + _GAP), part.flops / most)
    return "".join([*parts, "</svg>"])


def _block(found: Inspection, part: Part, k: int, top: float, share: float) -> list[str]:
    middle, width = top + _BLOCK / 2, _BOX
    times = _times(found, part)
    lines = [
        f"block {k}",
        f"{readable(part.flops, 'FLOP')} a row, {readable(part.params)} parameters",
        f"{part.nodes} nodes{f', {part.recomputed} repeated' if part.recomputed else ''}{times}",
    ]
    shapes = [
        f'<rect x="{_LEFT}" y="{top}" width="{width * share:.0f}" height="{_BLOCK}" rx="6" fill="#3b6ea5" '
        'fill-opacity="0.18"/>',
        f'<rect x="{_LEFT}" y="{top}" width="{width}" height="{_BLOCK}" rx="6" fill="none" stroke="#3b6ea5"/>',
        *(
            f'<text x="{_LEFT + 10}" y="{top + 22 + 18 * row}" fill="currentColor"'
            f"{' font-weight=' + chr(34) + '600' + chr(34) if row == 0 else ''}>{escape(line)}</text>"
            for row, line in enumerate(lines)
        ),
    ]
    if part.exit:
        x = _LEFT + width
        shapes.append(f'<path d="M{x} {middle} h60" stroke="#b5651d" fill="none" stroke-width="2"/>')
        shapes.append(f'<circle cx="{x + 66}" cy="{middle}" r="6" fill="#b5651d"/>')
        shapes.append(f'<text x="{x + 80}" y="{middle + 4}" fill="currentColor">{escape(part.exit)}</text>')
    if k + 1 < len(found.blocks):
        x = _LEFT + 30
        shapes.append(f'<path d="M{x} {top + _BLOCK} v{_GAP}" stroke="currentColor" stroke-width="1.5"/>')
        names = ", ".join(f"{c.name} {c.shape}" for c in found.carried if c.name in part.carried)
        label = f"{readable(part.handed_on, 'B')} a row: {names}" if names else "nothing new"
        shapes.append(
            f'<text x="{x + 12}" y="{top + _BLOCK + _GAP / 2 + 4}" fill="currentColor" opacity="0.8">'
            f"{escape(label if len(label) < 96 else label[:95] + '…')}</text>"
        )
    return shapes


def _times(found: Inspection, part: Part) -> str:
    if part.seconds is None:
        return ""
    measured = zip(found.rows, part.seconds, strict=True)
    return "; " + ", ".join(f"{seconds * 1e3:.2f} ms at {rows}" for rows, seconds in measured)


def page(found: Inspection) -> str:
    """The picture and the tables as one HTML document that needs no network."""
    sizes = ", ".join(f"{axis} = {size}" for axis, size in found.sizes.items()) or "fixed sizes"
    head = f"{found.name} {found.version}: {len(found.blocks)} blocks, {found.classes} classes"
    terms = Terms()
    caption = f"At {escape(sizes)}; the fill is a block's FLOPs against the largest's."
    return document(
        head,
        [
            f"<header><h1>{escape(head)}</h1></header>",
            section(
                "The cascade",
                f"<figure class='cascade'>{svg(found)}<figcaption>{caption}</figcaption></figure>",
            ),
            section(terms.of("Carried tensors", "carried state"), plain_table(_CARRIED, _carried(found), terms)),
            section(terms.of("Merged graphs", "segment"), plain_table(_SEGMENTS, _segments(found), terms)),
            _inside_cascade(found, terms),
            folded("Glossary", terms.glossary()),
            terms.explained(),
        ],
    )


def inside(found: Inspection, graph: InsideCascade) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: what each block takes inside the cascade graph. No rows without times."""
    head = ["block inside it", *(f"ms at {rows}" for rows in found.rows)]
    return head, [[str(k), *(f"{t * 1e3:.2f}" for t in times)] for k, times in enumerate(graph.seconds or ())]


def _inside_cascade(found: Inspection, terms: Terms) -> str:
    graph = found.cascade_graph
    if graph is None:
        return ""
    head, rows = inside(found, graph)
    return section(
        terms.of("All in one graph", "cascade graph"),
        f"<p>{escape(graph.file)}, {readable(graph.file_bytes, 'B')}: every block and gate; rows that stay are "
        "gathered inside.</p>",
        plain_table(head, rows) if rows else "",
    )


def _carried(found: Inspection) -> list[list[str]]:
    return [[c.name, c.dtype, c.shape, str(c.batch_axis), c.pad, f"{c.bytes:,}"] for c in found.carried]


def _segments(found: Inspection) -> list[list[str]]:
    return [
        [p.file, f"{p.blocks[0]}-{p.blocks[1]}", readable(p.flops), str(p.nodes), readable(p.file_bytes, "B")]
        for p in found.segments
    ]
