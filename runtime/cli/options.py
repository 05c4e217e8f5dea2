"""Options that several subcommands share."""

import argparse
from pathlib import Path
from typing import Any

from offramp.runtime.bundle import Manifest
from offramp.runtime.cli.output import print_json
from offramp.runtime.errors import InputError
from offramp.runtime.execution.executor import DEVICES
from offramp.runtime.files import write_atomically
from offramp.runtime.jobs.plain_json import to_json

# What `open_data` takes, for the help of commands that read data.
DATA = (
    "arrays: .npz, .npy or Parquet with the model's inputs and labels; raw rows, if the bundle has preprocessing: "
    "texts in .txt, .csv, .jsonl, .npz or Parquet (column text), pictures in a folder a class or by a column path; "
    "or a folder of such files"
)


def add_runtime(parser: argparse.ArgumentParser) -> None:
    """Where and how the cascade runs."""
    parser.add_argument("--device", default="cpu", help=f"where blocks run: {DEVICES} (default: cpu)")
    parser.add_argument("--threads", type=int, help="threads a block may use (default: what the machine allows)")


def add_resumed_out(parser: argparse.ArgumentParser, what: str) -> None:
    """Where a command that goes on where it was cut short writes to. what: that the folder is for."""
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help=f"folder for {what}; it appears when it's whole; a run that was cut short goes on from there",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")


def add_nonfinite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allow-nonfinite", action="store_true", help="let NaN and infinity in float inputs pass")


def add_points(parser: argparse.ArgumentParser) -> None:
    """Operating points by name, all of the bundle's by default."""
    parser.add_argument(
        "--operating-point",
        action="append",
        default=[],
        metavar="NAME",
        help="one of the bundle's; repeatable (default: all)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`: everything to stdout instead of tables, `--json FILE`: into a file beside them."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print everything as JSON instead, or write it to a file beside the tables",
    )


FILES = ("json", "html", "svg")
"""Options that name a file which is written at the end."""


def check_file(option: str, where: Any) -> None:
    """Raises InputError where an option names a file that can't be written: before the work, not behind it."""
    if not isinstance(where, str | Path) or str(where) == "-":
        return
    path = Path(where)
    if path.is_dir() or not path.absolute().parent.is_dir():
        found = "a folder" if path.is_dir() else f"in no folder: {path.parent} isn't there"
        raise InputError(f"--{option} is {str(where)!r}, which is {found}. Expected the path of a file.")


def write_json(where: str | None, document: Any) -> bool:
    """Whether stdout is taken: what `--json` asked for is printed there, or written to its file."""
    if where is None:
        return False
    if where != "-":
        write_atomically(Path(where), to_json(document))
        return False
    print_json(to_json(document).decode())
    return True


def fraction(text: str) -> float:
    """An argument in (0, 1], plain ("0.05") or in per cent ("5%")."""
    value = _share(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number in (0, 1], or a percentage")
    return value


def below_one(text: str) -> float:
    """An argument in (0, 1), plain or in per cent."""
    value = _share(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number in (0, 1), or a percentage below 100%")
    return value


def seed(text: str) -> int:
    """An argument that is a whole number from 0 on."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 0")
    return int(text)


def _share(text: str) -> float:
    """The number, or −1 where there is none."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return -1.0


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Sizes of symbolic axes at which times are measured."""
    parser.add_argument(
        "--size",
        type=_size,
        action="append",
        default=[],
        metavar="AXIS=SIZE",
        help="size of a symbolic axis, such as seq=32, where times are measured; repeatable",
    )


def _size(text: str) -> tuple[str, int]:
    axis, _, size = text.partition("=")
    if not size.isdecimal() or int(size) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected AXIS=SIZE, such as seq=32")
    return axis, int(size)


def sizes_of(args: argparse.Namespace, manifest: Manifest) -> dict[str, int]:
    """The sizes asked for; what wasn't asked is as at the bundle's verification."""
    sizes = manifest.typical_sizes
    for axis, size in args.size:
        if axis not in sizes:
            raise InputError(f"--size names the axis {axis!r}, this model's are {list(sizes)}.")
        sizes[axis] = size
    return sizes
