"""Options that several subcommands share."""

import argparse


def add_runtime(parser: argparse.ArgumentParser) -> None:
    """Where and how the cascade runs."""
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where blocks run (default: cpu)")
    parser.add_argument("--threads", type=int, help="threads a block may use (default: what the machine allows)")


def fraction(text: str) -> float:
    """An argument in (0, 1], plain ("0.05") or in per cent ("5%")."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number in (0, 1], or a percentage")
    return value
