"""offramp calibrate"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from offramp.runtime.cli.options import fraction
from offramp.runtime.jobs.calibrate import BUDGETS, calibrate
from offramp.runtime.points import OperatingPoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument("records", type=Path, help="folder written by `offramp record` on labelled data")
    parser.add_argument(
        "--budget",
        type=_budget,
        action="append",
        metavar="NAME=SHARE",
        help="an operating point at this share of the full model's FLOPs; repeatable "
        f"(default: {', '.join(f'{n}={b}' for n, b in BUDGETS.items())})",
    )
    parser.add_argument(
        "--abstain-risk",
        type=_risk,
        default=0.05,
        help="promised error among answered rows, or none (default: 5%%)",
    )
    parser.add_argument("--delta", type=fraction, default=0.05, help="chance that the promise fails (default: 5%%)")
    parser.add_argument("--seed", type=int, default=0, help="of the split into rows to choose, certify and report on")


def _budget(text: str) -> tuple[str, float]:
    name, separator, share = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=SHARE, such as balanced=0.5")
    return name, fraction(share)


def _risk(text: str) -> float | None:
    return None if text == "none" else fraction(text)


def run(args: argparse.Namespace) -> int:
    new = calibrate(
        args.bundle,
        args.records,
        budgets=dict(args.budget) if args.budget else BUDGETS,
        abstain_risk=args.abstain_risk,
        delta=args.delta,
        seed=args.seed,
    )
    print(table(new.points))
    for name, point in new.points.items():
        for complaint in complaints(point):
            print(f"warning: {name}: {complaint}", file=sys.stderr)
    print(f"wrote {args.bundle}/calibration.json, version {new.version}")
    return 0


def complaints(point: OperatingPoint) -> list[str]:
    """What of an operating point's wishes could not be met, in words."""
    found = []
    if point.provenance.get("budget_met") is False:
        found.append(
            f"a budget of {point.provenance['budget']:.3g} can't be met; the cheapest exit shares "
            f"cost {point.provenance['flops_fraction']:.3g} of the full model."
        )
    abstention = point.provenance.get("abstention", {})
    if abstention.get("feasible") is False:
        found.append(
            f"no part of the rows can be promised a risk of {abstention['risk']:.3g} from {abstention['rows']} rows: "
            "every answer will be flagged as an abstention. Use more rows, or a larger --abstain-risk."
        )
    shares = point.expected.get("exit_shares", [])
    for j, (threshold, share) in enumerate(zip(point.thresholds, shares, strict=False)):
        if share == 0 and j < len(shares) - 1 and abs(threshold) != float("inf"):
            found.append(f"exit {j} is switched on, but no row of the report part leaves there.")
    return found


def table(points: Mapping[str, OperatingPoint]) -> str:
    """Operating points side by side, for people."""
    head = ("point", "accuracy", "FLOPs", "coverage", "risk", "exit shares")
    rows = [head]
    for name, point in points.items():
        e = point.expected
        risk = e.get("risk")
        rows.append(
            (
                name,
                f"{e['accuracy']:.2%}",
                f"{e['flops_fraction']:.1%}",
                f"{e['coverage']:.1%}",
                "-" if risk is None else f"{risk:.2%}",
                " ".join(f"{s:.0%}" for s in e["exit_shares"]),
            )
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
