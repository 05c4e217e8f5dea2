"""offramp evaluate"""

import argparse
import sys
from pathlib import Path

from offramp.runtime.cli.options import DATA, add_json, add_nonfinite, add_points, add_runtime, write_json
from offramp.runtime.cli.progress import bar
from offramp.runtime.jobs.evaluating.describe import describe, verdict
from offramp.runtime.jobs.evaluating.evaluate import document, evaluate

BROKEN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit codes: 0; 3 a promise is broken (all of the 95%% interval is beyond it); 2 bad input. Estimates never "
        "decide it."
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument(
        "labelled", type=Path, help=f"labelled rows, which are run once, or records, from which nothing is run. {DATA}"
    )
    add_points(parser)
    add_json(parser)
    add_nonfinite(parser)
    add_runtime(parser)


def run(args: argparse.Namespace) -> int:
    with bar("running every exit") as progress:
        found = evaluate(
            args.bundle,
            args.labelled,
            points=args.operating_point,
            device=args.device,
            threads=args.threads,
            allow_nonfinite=args.allow_nonfinite,
            progress=progress,
        )
    if not write_json(args.json, document(found)):
        print(describe(found))
    print(verdict(found), file=sys.stderr)
    return BROKEN if found.broken else 0
