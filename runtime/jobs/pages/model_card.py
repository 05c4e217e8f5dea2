"""The model card beside a bundle: what it is, what it was verified to do, what it promises, and what its maker says.

No file of the bundle, which is sealed: people write in it, and so does whoever puts a calibration in force. Who writes
changes one section, and leaves alone a card that somebody has made otherwise.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offramp.runtime import cost
from offramp.runtime.files import write_atomically

CARD = "MODEL_CARD.md"
PROMISES, DATA = "Promises", "Data, use and licence"
"""Headings of the sections that change after export."""
_MOST_CLASSES = 20
_NONE_YET = "None until `offramp calibrate` has chosen thresholds."
_NOT_TOLD = "Not told at export: say here what the model was trained on, what it is for, and the licences of both."


def model_card(document: Mapping[str, Any], *, promises: str = _NONE_YET, data: str = _NOT_TOLD) -> str:
    """Markdown. document: the manifest, with what verification found. promises, data: those sections.

    FLOPs are of one row, at the sizes of the first verification.
    """
    verified, classes = document["verified"], list(document["classes"])
    sizes = {**verified["sizes"][0], "batch": 1}
    named = ", ".join(classes[:_MOST_CLASSES]) + (", …" if len(classes) > _MOST_CLASSES else "")
    at = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if axis != "batch")
    rows, total = [], 0
    for block, exit_ in zip(document["blocks"], document["exits"], strict=True):
        total += cost.evaluate(block["flops"], sizes)
        rows.append(f"| {exit_['name']} | {block['params']:,} | {total:,} |")
    inputs = [f"- `{i['name']}`: {i['dtype']} [{', '.join(map(str, i['shape']))}]" for i in document["inputs"]]
    alone = "doesn't depend" if document["rows_independent"] else "depends"
    lines = [
        f"# {document['name']} {document['version']}",
        "",
        f"A classifier of {len(classes)} classes with {len(document['exits'])} exits, written by "
        f"{document['producer']} on {document['created']}.",
        "",
        f"Classes: {named}.",
        "",
        "## Architecture",
        "",
        *inputs,
        "",
        f"| exit | weights its block uses | FLOPs of a row that leaves there{f' ({at})' if at else ''} |",
        "|---|---|---|",
        *rows,
        "",
        "## What was verified",
        "",
        f"Every exit gives what the {verified['against']} model gives, at {len(verified['sizes'])} sizes: logits "
        f"differ by at most {verified['max_difference']:.2g}. Rows that leave early get the logits of their exit. "
        f"A row's answer {alone} on the rows beside it.",
        "",
        f"## {PROMISES}",
        "",
        promises,
        "",
        f"## {DATA}",
        "",
        data,
    ]
    return "\n".join(lines) + "\n"


def read_card(folder: Path) -> str | None:
    """The card's text; None where there is none that can be read."""
    try:
        return (folder / CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def section(card: str, heading: str) -> str | None:
    """What stands under "## heading", up to the next of its kind; None where the card has no such section."""
    found = _bounds(card.splitlines(), heading)
    return None if found is None else "\n".join(card.splitlines()[slice(*found)]).strip()


def put_section(folder: Path, heading: str, text: str | Sequence[str]) -> None:
    """Replace what stands under "## heading" in a bundle's card; nothing happens without such a section."""
    card = read_card(folder)
    lines = [] if card is None else card.splitlines()
    found = _bounds(lines, heading)
    if found is None:
        return
    new = [text] if isinstance(text, str) else list(text)
    first, end = found
    behind = ["", *lines[end:]] if end < len(lines) else []
    write_atomically(folder / CARD, "\n".join([*lines[:first], "", *new, *behind, ""]).encode())


def _bounds(lines: Sequence[str], heading: str) -> tuple[int, int] | None:
    """Where a section's lines begin, behind its heading, and end."""
    for first, line in enumerate(lines, 1):
        if line.rstrip() == f"## {heading}":
            ends = (k for k in range(first, len(lines)) if lines[k].startswith(("## ", "# ")))
            return first, next(ends, len(lines))
    return None
