"""offramp version"""

import argparse

from offramp.runtime.bundle import own_version


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(args: argparse.Namespace) -> int:
    print(own_version())
    return 0
