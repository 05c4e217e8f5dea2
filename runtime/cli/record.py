"""offramp record"""

import argparse
from pathlib import Path

from offramp.runtime.cascade import Cascade
from offramp.runtime.cli.options import add_runtime
from offramp.runtime.cli.progress import bar
from offramp.runtime.jobs.record import record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument("data", type=Path, help=".npz, .npy or Parquet with the model's inputs and labels, or a folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the records; it appears when it's whole")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")
    parser.add_argument("--allow-nonfinite", action="store_true", help="let NaN and infinity in float inputs pass")
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
            progress=progress,
        )
    print(f"records of {len(cascade.manifest.exits)} exits in {args.out}")
    return 0
