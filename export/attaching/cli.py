"""offramp attach"""

import argparse
import math
import warnings
from pathlib import Path
from typing import Any

from offramp.export.attaching import INDEX
from offramp.export.attaching.attach import attach_exits
from offramp.export.attaching.attached import Attached
from offramp.export.attaching.folder import save_attached
from offramp.export.cli import axes_of, call, preprocess_of, show, value_of
from offramp.export.exporter import check_libraries
from offramp.runtime.files import check_new_folder


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model, and what of it can't be asked of itself."""
    parser.add_argument(
        "model",
        help="folder of a Hugging Face or timm checkpoint, or FILE.py:FUNCTION that returns a classifier in "
        "evaluation mode",
    )
    parser.add_argument(
        "--at",
        type=_at,
        metavar="BLOCK,…",
        help="blocks to put heads behind: names of submodules, or numbers of blocks from 0 on (default: up to 5 that "
        "split the FLOPs evenly)",
    )
    asked = parser.add_argument_group("what the model can't be asked for, as of `offramp export`")
    asked.add_argument("--example", metavar="FILE.py:FUNCTION", help="a few rows of example inputs")
    asked.add_argument("--dynamic", metavar="FILE", help="names of the axes that vary: FILE.json or FILE.py:FUNCTION")
    asked.add_argument("--classes", metavar="FILE", help="names of the classes: FILE.json or FILE.py:FUNCTION")
    asked.add_argument("--preprocess", metavar="FILE", help="how raw rows become inputs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the heads' first weights (default: 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the heads; the model's weights stay put")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")


def run(args: argparse.Namespace) -> int:
    check_libraries(None)
    check_new_folder(args.out, marker=INDEX, replace=args.overwrite)
    attached = attach(args, seed=args.seed)
    save_attached(attached, args.out, args.model, overwrite=args.overwrite)
    print(describe(attached))
    print(f"{args.out}: the heads know nothing yet. Next: offramp train {args.out} train.csv --out trained/")
    return 0


def attach(args: argparse.Namespace, *, seed: int = 0) -> Attached:
    """The model that the options of `add_model` name, with heads."""
    with warnings.catch_warnings():
        warnings.showwarning = show
        return attach_exits(
            args.model if Path(args.model).is_dir() else call(args.model, instead="the folder of a checkpoint"),
            args.at,
            value_of(args.classes) if args.classes else None,
            example_inputs=call(args.example) if args.example else None,
            dynamic_axes=axes_of(value_of(args.dynamic)) if args.dynamic else None,
            preprocess=preprocess_of(args.preprocess) if args.preprocess else None,
            seed=seed,
        )


def describe(attached: Attached) -> str:
    """Where the exits are, as a table."""
    lines = [f"{'exit':<6}{'FLOPs until there':<20}behind"]
    shares = ["unknown" if math.isnan(tap.share) else f"{tap.share:.0%}" for tap in attached.taps]
    lines += [f"{j:<6}{shares[j]:<20}{tap.name}" for j, tap in enumerate(attached.taps)]
    return "\n".join([*lines, f"{len(attached.taps):<6}{1:<20.0%}the model's own"])


def _at(text: str) -> list[Any]:
    return [int(part) if part.isdecimal() else part for part in text.split(",")]
