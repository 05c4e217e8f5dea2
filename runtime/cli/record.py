"""offramp record"""

import argparse
import sys
from pathlib import Path

from offramp.runtime.cascade import Cascade
from offramp.runtime.cli.options import DATA, add_nonfinite, add_resumed_out, add_runtime
from offramp.runtime.cli.progress import bar
from offramp.runtime.jobs.data.tables import LABELS
from offramp.runtime.jobs.recording.record import record
from offramp.runtime.records import read_index


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument("data", type=Path, help=DATA)
    add_resumed_out(parser, "the records")
    parser.add_argument("--half", action="store_true", help="store logits as float16 where that keeps the ranking")
    add_nonfinite(parser)
    add_runtime(parser)


def run(args: argparse.Namespace) -> int:
    with (
        Cascade.load(args.bundle, args.device, threads=args.threads) as cascade,
        bar("recording") as progress,
    ):
        record(
            cascade,
            args.data,
            args.out,
            overwrite=args.overwrite,
            allow_nonfinite=args.allow_nonfinite,
            half=args.half,
            progress=progress,
            say=lambda text: print(f"note: {text}", file=sys.stderr),
        )
    index = read_index(args.out)
    print(f"records of {index.rows} rows at {index.exits} exits in {args.out}")
    if not index.labelled:
        print(
            f"note: {args.data} has no `{LABELS[0]}` column, so these records can't be calibrated on", file=sys.stderr
        )
    return 0
