"""Tables for a terminal: columns line up whatever the script, and a user's name can't break a line."""

import unicodedata
from collections.abc import Sequence

LONGEST = 40


def one_line(name: str, longest: int = LONGEST) -> str:
    """A user's name as it may stand in a line: what doesn't print is escaped, and what is too long is cut off."""
    said = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    if columns(said) <= longest:
        return said
    while columns(said) > longest - 1:
        said = said[:-1]
    return f"{said}…"


def columns(text: str) -> int:
    """How many columns of a terminal a text takes: two for a wide letter, none for an accent on the one before."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in ("W", "F") else 1 for c in text
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, columns two blanks apart."""
    widths = [max(columns(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        "  ".join(cell + " " * (width - columns(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def percent(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def ranged(value: float | None, low: float | None, high: float | None, digits: int = 2) -> str:
    """A share with its interval: "97.1% [96.0%, 98.0%]"."""
    around = "" if low is None or high is None else f" [{low:.{digits}%}, {high:.{digits}%}]"
    return f"{percent(value, digits)}{around}"
