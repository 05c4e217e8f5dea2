"""offramp audit"""

import argparse
import sys
from pathlib import Path

from offramp.runtime.cli.output import print_json
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.auditing.audit import AUDIT, PAGE, audit_bundle, describe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument("records", type=Path, help="labelled records of this bundle, by `offramp record`")
    parser.add_argument(
        "--out", type=Path, default=Path("audit"), help="folder for the page and the figures (default: audit)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--permutations", type=_count, default=5000, help="of the permutation test (default: 5000)")
    parser.add_argument("--replicates", type=_count, default=5000, help="of the bootstraps (default: 5000)")
    parser.add_argument("--seed", type=int, default=42, help="of everything drawn (default: 42)")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 2")
    return int(text)


def run(args: argparse.Namespace) -> int:
    if args.seed < 0:
        raise InputError(f"--seed is {args.seed}, expected 0 or more.")
    found = audit_bundle(
        args.bundle,
        args.records,
        args.out,
        overwrite=args.overwrite,
        permutations=args.permutations,
        replicates=args.replicates,
        seed=args.seed,
    )
    if args.json:
        print_json((args.out / AUDIT).read_text(encoding="utf-8") + "\n")
    else:
        print(describe(found))
    print(f"{args.out / PAGE} has the evidence", file=sys.stderr)
    return 0
