"""offramp repack"""

import argparse
import sys
from pathlib import Path

from offramp.runtime.cascade import Cascade
from offramp.runtime.cli.options import add_runtime, add_sizes, sizes_of
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.bundles.repack import choose_exits, describe, kept_exits, loses_promises, repack
from offramp.runtime.jobs.bundles.timing import time_parts
from offramp.runtime.jobs.data.opened import open_records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--exits", type=_exits, help="exits to keep, such as 1,3,5; the last one always stays")
    which.add_argument(
        "--auto", action="store_true", help="keep the exits that pay, by times measured here and --records"
    )
    parser.add_argument("--records", type=Path, help="records of this bundle: how many rows leave where")
    parser.add_argument("--out", type=Path, required=True, help="folder for the new bundle; it appears when it's whole")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")
    add_sizes(parser)
    add_runtime(parser)


def _exits(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers, such as 1,3,5") from None


def run(args: argparse.Namespace) -> int:
    if args.auto and args.records is None:
        raise InputError("--records is missing: --auto weighs exits by how many recorded rows leave there.")
    records, exits = None, args.exits
    with Cascade.load(args.bundle, args.device, threads=args.threads) as cascade:
        if args.records is not None:
            records = open_records(args.records, cascade.manifest)
        if args.auto and records is not None:
            timings = time_parts(cascade, sizes_of(args, cascade.manifest))
            choices = choose_exits(cascade.manifest, cascade.calibration.points, records.records, timings)
            print(describe(choices))
            exits = choices[0].exits
        kept = kept_exits(cascade.manifest, exits)
        changed = [n for n, point in cascade.calibration.points.items() if loses_promises(point, kept)]
    repack(args.bundle, args.out, exits, records=records, overwrite=args.overwrite)
    print(f"{args.out}: kept the exits {', '.join(map(str, kept))} of {len(cascade.manifest.exits)}")
    if changed:
        print(
            f"warning: {', '.join(changed)}: left at exits that are gone, so what was promised for "
            f"{'it' if len(changed) == 1 else 'them'} no longer holds: record and calibrate {args.out}.",
            file=sys.stderr,
        )
    return 0
