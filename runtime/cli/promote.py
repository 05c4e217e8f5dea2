"""offramp promote"""

import argparse
from pathlib import Path

from offramp.runtime.jobs.calibrating.versions import promote


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit codes: 0 done; 2 no such version, or one that is damaged or of another manifest."
    parser.add_argument("bundle", type=Path, help="a bundle, or a folder that `offramp calibrate --out` wrote")
    parser.add_argument("version", help="a version that `offramp history` lists")


def run(args: argparse.Namespace) -> int:
    found = promote(args.bundle, args.version)
    print(f"{args.bundle}: version {args.version} is in force, with {', '.join(found.points)}")
    return 0
