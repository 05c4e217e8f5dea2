"""What the jobs write as JSON, which has neither NaN nor infinity: they become null, what isn't defined."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def number(value: Any) -> float | None:
    """A finite float, or None."""
    value = float(value)
    return value if math.isfinite(value) else None


def plain(value: Any) -> Any:
    """Dataclasses and mappings as dicts, sequences and arrays as lists, numpy's numbers as Python's."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list | np.ndarray):
        return [plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return number(value) if isinstance(value, float) else value


def to_json(value: Any) -> bytes:
    """Readable JSON of what `plain` makes of a value."""
    return (json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
