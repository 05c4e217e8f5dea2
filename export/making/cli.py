"""offramp make"""

import argparse
import importlib
import sys
import warnings
from pathlib import Path

from offramp.export.attaching.cli import add_model, attach
from offramp.export.cli import call, show
from offramp.export.exporter import check_libraries
from offramp.export.making.make import Asked, make_bundle
from offramp.export.training.cli import add_recipe, recipe_of
from offramp.runtime.bundle import MANIFEST
from offramp.runtime.cli.calibrate import table
from offramp.runtime.cli.options import DATA, add_resumed_out, below_one
from offramp.runtime.cli.progress import bar
from offramp.runtime.errors import InputError
from offramp.runtime.files import check_new_folder
from offramp.runtime.jobs.calibrating.targets import MaxDrop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--train", type=Path, required=True, help=f"rows to train on, labelled or not. {DATA}")
    parser.add_argument(
        "--val", type=Path, required=True, help="labelled rows to calibrate on, which no training has seen"
    )
    parser.add_argument("--test", type=Path, help="rows to measure on at the end (default: those of --val)")
    parser.add_argument(
        "--max-drop",
        type=below_one,
        action="append",
        metavar="DROP",
        help="accuracy that may be lost; repeatable (default: 0.5%%)",
    )
    parser.add_argument(
        "--exits",
        type=_exits,
        help="early exits to keep, such as 0,2 (default: those that pay, by times measured here)",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="for measuring the result; 0 doesn't (default: 20)")
    add_resumed_out(parser, "the bundle")
    add_recipe(parser)


def _exits(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers, such as 0,2") from None


def run(args: argparse.Namespace) -> int:
    check_libraries(None)
    importlib.import_module("scipy")  # which calibrating needs, minutes later
    check_new_folder(args.out, marker=MANIFEST, replace=args.overwrite)
    for name in ("train", "val", "test"):
        path = getattr(args, name)
        if path is not None and not path.exists():
            raise InputError(f"--{name} {path}: no such file or folder.")
    drops = args.max_drop or [0.005]
    if len(set(drops)) < len(drops):
        raise InputError("--max-drop: the same drop is given twice.")
    if not 0 <= args.seconds < float("inf"):
        raise InputError(f"--seconds is {args.seconds}, expected 0 or more.")
    asked = Asked(
        args.train,
        args.val,
        [MaxDrop(drop) for drop in drops],
        test=args.test,
        exits=args.exits,
        labels=not args.no_labels,
        joint=args.joint,
        recipe=recipe_of(args),
        seconds=args.seconds,
        device=args.device,
    )
    with warnings.catch_warnings():
        warnings.showwarning = show
        made = make_bundle(
            attach(args, seed=args.seed),
            args.model,
            args.out,
            asked,
            build=call,
            overwrite=args.overwrite,
            bars=bar,
            say=lambda text: print(text, file=sys.stderr),
        )
    print(f"heads, on held-out rows of {args.train}:\n{made.training}\n")
    print(f"exits kept: {', '.join(map(str, made.exits))}\n{table(made.points)}")
    if made.times:
        print(f"\n{made.times}")
    for note in made.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"\nwrote {made.path}. Next: offramp serve {made.path} --operating-point {list(made.points)[-1]}")
    return 0
