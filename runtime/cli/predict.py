"""offramp predict"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from offramp.runtime.cascade import Cascade
from offramp.runtime.cli.options import DATA, add_nonfinite, add_runtime
from offramp.runtime.cli.output import print_json
from offramp.runtime.errors import InputError
from offramp.runtime.inputs import sizes_of
from offramp.runtime.jobs.data.sources import open_data
from offramp.runtime.points import FULL
from offramp.runtime.predictions import Predictions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument("data", type=Path, help=DATA)
    parser.add_argument("--operating-point", default=FULL, help=f"one of the bundle's (default: {FULL})")
    parser.add_argument("--probabilities", action="store_true", help="print every class's probability, too")
    add_nonfinite(parser)
    add_runtime(parser)


def run(args: argparse.Namespace) -> int:
    """One JSON object a row on stdout, a summary on stderr."""
    fetch = ("probabilities",) if args.probabilities else ()
    rows = abstained = spent = whole = 0
    seen = _Seen()
    with Cascade.load(args.bundle, args.device, args.operating_point, args.threads) as cascade:
        for source in open_data(args.data, cascade.bundle):
            start = 0
            for chunk in source.chunks(0, cascade.batch_rows):
                lines = [b""] * chunk.rows
                for positions, inputs in chunk.parts:
                    try:
                        out = cascade.predict(inputs, fetch=fetch, allow_nonfinite=args.allow_nonfinite)
                    except InputError as error:
                        last = start + chunk.rows - 1
                        raise InputError(f"{source.name}, in rows {start} to {last}: {error}") from error
                    for i, position in enumerate(positions):
                        lines[position] = msgspec.json.encode(_line(out, i, cascade.classes, bool(fetch)))
                    abstained += int(out.abstain.sum())
                    if chunk.labels is not None:
                        seen.add(out, chunk.labels[positions])
                    spent += int(out.flops.sum())
                    whole += len(out) * int(cascade.row_flops(sizes_of(inputs, cascade.manifest))[-1])
                print_json("".join(line.decode() + "\n" for line in lines))
                start += chunk.rows
            rows += start
    saved = 1 - spent / whole if whole else 0.0
    print(
        f"{rows} rows, {abstained} abstained, {saved:.1%} of the full model's FLOPs saved{seen.said()}", file=sys.stderr
    )
    return 0


@dataclass
class _Seen:
    """What labels say of the answers: counts of the rows that have one."""

    labelled: int = 0
    right: int = 0
    answered: int = 0
    errors: int = 0

    def add(self, out: Predictions, labels: NDArray[np.int64]) -> None:
        known, right, kept = labels >= 0, out.label == labels, ~out.abstain
        self.labelled += int(known.sum())
        self.right += int((known & right).sum())
        self.answered += int((known & kept).sum())
        self.errors += int((known & kept & ~right).sum())

    def said(self) -> str:
        """For the summary; nothing where no row has a label. `offramp evaluate` has intervals."""
        if not self.labelled:
            return ""
        risk = f", {self.errors / self.answered:.2%} wrong among the answered" if self.answered else ""
        return f"; accuracy {self.right / self.labelled:.2%} on {self.labelled} labelled rows{risk}"


def _line(out: Predictions, row: int, classes: list[str], probabilities: bool) -> dict[str, Any]:
    label = int(out.label[row])
    line: dict[str, Any] = {
        "label": label,
        "class": classes[label] if label >= 0 else None,
        "confidence": _number(out.confidence[row]),
        "exit": int(out.exit[row]),
        "abstain": bool(out.abstain[row]),
        "flops": int(out.flops[row]),
    }
    if probabilities:
        line["probabilities"] = [_number(p) for p in out.probabilities[row]]
    return line


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
