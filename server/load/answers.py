"""What a server's points answer on the rows that are sent: speed is worth nothing without it."""

import http.client
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from offramp.runtime.jobs.data.expected import Line, share
from offramp.server.load.requests import PREDICT, Rows, bodies
from offramp.server.load.target import Target

_TOGETHER = 64


@dataclass(frozen=True)
class Answered:
    """line: {"point", "accuracy", "accuracy_low", "accuracy_high", "labelled", "coverage", "exit_shares"}, None where
    that isn't known. trouble: why it isn't, else None."""

    line: Line
    trouble: str | None = None


def answers(target: Target, point: str, rows: Rows) -> Answered:
    """Every row once, before any clock starts; that wakes the server up as well."""
    unknown: Line = dict.fromkeys(("accuracy", "accuracy_low", "accuracy_high", "coverage", "exit_shares"))
    found: list[Any] = []
    together = min(_TOGETHER, len(rows))
    for start in range(0, len(rows), together):
        part = rows.instances[start : start + together]
        [body] = bodies(part, len(part), point)
        try:
            status, data = target.answer("POST", PREDICT, body)
            if status != 200:
                raise ValueError(f"{status}: {data[:200].decode(errors='replace')}")
            found += msgspec.json.decode(data)["predictions"]
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            return Answered({"point": point, **unknown, "labelled": 0}, f"{point} didn't answer ({error})")
    return Answered(_line(point, found, rows))


def _line(point: str, found: Sequence[Any], rows: Rows) -> Line:
    known = np.zeros(len(rows), np.bool_) if rows.labels is None else rows.labels >= 0
    label = np.array([one["label"] for one in found])
    exits = np.array([one["exit"] for one in found])
    right = int((label == rows.labels)[known].sum()) if known.any() else 0
    labelled = int(known.sum())
    low, high = share(right, labelled) or (None, None)
    return {
        "point": point,
        "accuracy": right / labelled if labelled else None,
        "accuracy_low": low,
        "accuracy_high": high,
        "labelled": labelled,
        "coverage": float(np.mean([not one["abstain"] for one in found])),
        "exit_shares": (np.bincount(exits) / len(exits)).tolist(),
    }
