"""The model card beside a bundle: what it is, what it was verified to do, and what only its maker can say."""

from collections.abc import Mapping
from typing import Any

from offramp.runtime import cost

CARD = "MODEL_CARD.md"
_MOST_CLASSES = 20


def model_card(document: Mapping[str, Any]) -> str:
    """Markdown. document: the manifest, with what verification found.

    FLOPs are of one row, at the sizes of the first verification. Data, use and licence are left for whoever knows them.
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
        "## Promises",
        "",
        "None until `offramp calibrate` has chosen thresholds; `offramp inspect` then says what each operating point "
        "promises, and on which data.",
        "",
        "## Data, use and licence",
        "",
        "Not told at export: say here what the model was trained on, what it is for, and the licences of both.",
    ]
    return "\n".join(lines) + "\n"
