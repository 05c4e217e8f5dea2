"""offramp rollback"""

import argparse
from pathlib import Path

from offramp.runtime.jobs.calibrating.versions import rollback


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Once more goes one further back; `offramp promote` returns to any version. "
        "Exit codes: 0 done; 2 there is none before, or it is damaged or of another manifest."
    )
    parser.add_argument("bundle", type=Path, help="a bundle, or a folder that `offramp calibrate --out` wrote")


def run(args: argparse.Namespace) -> int:
    found = rollback(args.bundle)
    print(f"{args.bundle}: version {found.version} is in force again, with {', '.join(found.points)}")
    return 0
