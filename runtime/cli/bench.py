"""offramp bench"""

import argparse
from pathlib import Path

from offramp.runtime.cli.options import DATA, add_json, add_nonfinite, add_points, write_json
from offramp.runtime.cli.progress import bar
from offramp.runtime.files import write_atomically
from offramp.runtime.jobs.benching.bench import PACE, SECONDS, bench, document
from offramp.runtime.jobs.benching.describe import describe
from offramp.runtime.jobs.benching.page import page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "It runs on the CPU. Exit codes: 0, whether it pays or not; 2 bad input."
    parser.add_argument("bundle", type=Path)
    parser.add_argument("data", type=Path, help=DATA)
    add_points(parser)
    parser.add_argument("--threads", type=int, help="threads of every session (default: what the machine allows)")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"about how long it may take (default: {SECONDS:g})"
    )
    parser.add_argument(
        "--pace",
        type=float,
        default=PACE,
        metavar="MS",
        help=f"milliseconds between single rows that come one by one (default: {PACE:g})",
    )
    add_json(parser)
    parser.add_argument("--html", type=Path, help="also write a page with the figures")
    add_nonfinite(parser)


def run(args: argparse.Namespace) -> int:
    with bar("benching, seconds") as progress:
        found = bench(
            args.bundle,
            args.data,
            points=args.operating_point,
            threads=args.threads,
            seconds=args.seconds,
            pace=args.pace,
            allow_nonfinite=args.allow_nonfinite,
            progress=progress,
        )
    if args.html is not None:
        write_atomically(args.html, page(found).encode())
    if not write_json(args.json, document(found)):
        print(describe(found))
    return 0
