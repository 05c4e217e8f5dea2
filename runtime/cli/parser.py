"""argparse with mistakes in one line: its own way puts fifty lines of usage in front of them."""

import argparse
import difflib
import re
from typing import NoReturn

from offramp.runtime.errors import InputError

_UNKNOWN = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Raises InputError where argparse would print its usage and end the program."""

    def error(self, message: str) -> NoReturn:
        unknown = _UNKNOWN.fullmatch(message)
        if unknown is not None:
            first = next((one for one in unknown[1].split() if one.startswith("-")), unknown[1].split()[0])
            near = difflib.get_close_matches(first.partition("=")[0], self._option_string_actions, n=1, cutoff=0.75)
            hint = f" Did you mean {near[0]}?" if near else ""
            message = f"{first} is no argument of it.{hint}"
        said = message if message.endswith((".", "?")) else f"{message}."
        raise InputError(f"{said} `{self.prog} --help` lists what there is.")
