"""A trained single-exit classifier gets heads after some of its blocks."""

from pathlib import Path

INDEX = "attached.json"
"""The file that a folder of a classifier with heads is known by."""


def is_attached(path: str | Path) -> bool:
    return (Path(path) / INDEX).is_file()
