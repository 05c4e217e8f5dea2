"""offramp version"""

import argparse
from importlib import metadata


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(args: argparse.Namespace) -> int:
    print(metadata.version("offramp"))
    return 0
