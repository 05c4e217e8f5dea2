"""offramp train"""

import argparse
import sys
from pathlib import Path

from offramp.export.attaching import INDEX, is_attached
from offramp.export.attaching.folder import load_attached, write_attached
from offramp.export.cli import call
from offramp.export.training.fit import Recipe
from offramp.export.training.train import summary, table, train_heads
from offramp.runtime.cli.options import DATA, add_resumed_out, below_one, seed
from offramp.runtime.cli.progress import bar
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.recording.unfinished import unfinished


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("attached", type=Path, help="folder written by `offramp attach`")
    parser.add_argument("data", type=Path, help=f"training rows, labelled or not. {DATA}")
    add_resumed_out(parser, "the trained heads")
    add_recipe(parser)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """How heads are trained."""
    how = parser.add_argument_group("how it is trained; the defaults need no tuning")
    how.add_argument(
        "--no-labels", action="store_true", help="let the last exit teach, as where the rows have no labels"
    )
    how.add_argument(
        "--joint",
        action="store_true",
        help="then train the classifier's own weights too, all exits at once; it isn't the same classifier afterwards",
    )
    how.add_argument("--held-out", type=below_one, default=0.1, metavar="SHARE", help="rows that decide when to stop")
    how.add_argument("--epochs", type=int, default=Recipe().epochs, help="most passes over the rows (default: 60)")
    how.add_argument("--seed", type=seed, default=0, help="of everything random (default: 0)")
    how.add_argument("--device", default="cpu", help="where torch runs: cpu, cuda, cuda:1 (default: cpu)")


def recipe_of(args: argparse.Namespace) -> Recipe:
    return Recipe(held_out=args.held_out, epochs=args.epochs, seed=args.seed)


def run(args: argparse.Namespace) -> int:
    if not args.attached.is_dir():
        raise InputError(f"{args.attached}: no such folder.")
    if not is_attached(args.attached):
        raise InputError(f"{args.attached}: has no {INDEX}: expected a folder written by `offramp attach`.")
    recipe = recipe_of(args)
    with unfinished(args.out, marker=INDEX, replace=args.overwrite, keep=args.attached) as work:
        attached, index = load_attached(args.attached, call)
        trained = train_heads(
            attached,
            args.data,
            labels=not args.no_labels,
            joint=args.joint,
            recipe=recipe,
            work=work.folder,
            device=args.device,
            bars=bar,
        )
        work.restart()
        tuned = index.tuned or args.joint
        write_attached(attached, work.work, index.source, tuned=tuned, trained=summary(trained))
        work.finish()
    for note in trained.notes:
        print(f"note: {note}", file=sys.stderr)
    print(table(trained))
    print(f"{args.out}: trained on {trained.rows - trained.held_out} rows, {trained.held_out} others say how well")
    return 0
