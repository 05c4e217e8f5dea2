"""What the exits said about a row, as bytes: scores in float32, logits relative to their largest in float16.

A row of six exits and 150 classes takes 1.8 kB. Above MOST_DENSE classes the TOP largest logits are kept, and the
log of the others' summed exp: their number is known, so they come back as that many equal ones.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.errors import InputError, StoreError

MOST_DENSE = 1000
TOP = 128
_HALF_LEAST = -65504.0


def relative(logits: NDArray[np.floating]) -> NDArray[np.float16]:
    """z − max z of (N, C) logits, in float16; what is too small for it is its least. A row with NaN is NaN."""
    top = logits.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        below = logits - top
        if not below.min(initial=0) >= _HALF_LEAST:  # few are so small, infinite, or NaN
            below = np.where(logits == top, 0, below)
            below = np.where(np.isneginf(below), below, np.maximum(below, _HALF_LEAST))
    half: NDArray[np.float16] = below.astype(np.float16)
    return half


@cache
def _record(exits: int, classes: int) -> np.dtype[Any]:
    """How a row is laid out that ran `exits` of them. exits come first: they tell rows apart that ran others."""
    if classes <= MOST_DENSE:
        values: list[Any] = [("logits", "<f2", (exits, classes))]
    else:
        values = [("tail", "<f4", (exits,)), ("index", "<u4", (exits, TOP)), ("logits", "<f2", (exits, TOP))]
    return np.dtype([("count", "u1"), ("exit", "u1", (exits,)), ("score", "<f4", (exits,)), *values])


def pack(score: NDArray[np.floating], logits: Sequence[NDArray[np.floating] | None], classes: int) -> list[bytes]:
    """N rows' bytes. score: (J, N), NaN at exits a row didn't run. logits: J entries (N, C), None where nobody did.

    Raises InputError if logits don't fit.
    """
    ran = ~np.isnan(score)
    rows = score.shape[1]
    packed: list[bytes] = [b""] * rows
    for pattern in {column.tobytes() for column in ran.T}:
        runs = np.frombuffer(pattern, bool)
        members = np.flatnonzero((ran == runs[:, None]).all(axis=0))
        exits = np.flatnonzero(runs)
        record = np.zeros(len(members), _record(len(exits), classes))
        record["count"], record["exit"] = len(exits), exits
        record["score"] = score[np.ix_(exits, members)].T
        for at, j in enumerate(exits.tolist()):
            given = logits[j]
            if given is None or given.shape != (rows, classes):
                said = "None" if given is None else f"of the shape {given.shape}"
                raise InputError(f"logits[{j}] is {said}, expected ({rows}, {classes}): rows ran exit {j}.")
            _put(record, at, given if len(members) == rows else given[members])
        data, size = record.tobytes(), record.itemsize
        for at, row in enumerate(members.tolist()):
            packed[row] = data[at * size : (at + 1) * size]
    return packed


def _put(record: NDArray[Any], at: int, logits: NDArray[np.floating]) -> None:
    if "tail" not in (record.dtype.names or ()):
        record["logits"][:, at] = relative(logits)
        return
    order = np.argpartition(logits, -TOP, axis=1)
    top, rest = order[:, -TOP:], np.take_along_axis(logits, order[:, :-TOP], axis=1)
    chosen = np.take_along_axis(logits, top, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mass = np.exp(rest.astype(np.float64) - chosen.max(axis=1, keepdims=True)).sum(axis=1)
        record["tail"][:, at] = np.log(mass)
    record["index"][:, at], record["logits"][:, at] = top, relative(chosen)


def unpack(packed: Sequence[bytes], exits: int, classes: int) -> tuple[NDArray[np.float32], NDArray[np.float16]]:
    """Scores (J, N) and logits (J, N, C) of rows that were packed; NaN at exits a row didn't run.

    Raises StoreError if the bytes aren't such rows.
    """
    score = np.full((exits, len(packed)), np.nan, np.float32)
    logits = np.full((exits, len(packed), classes), np.nan, np.float16)
    alike: dict[bytes, list[int]] = {}
    for row, data in enumerate(packed):
        alike.setdefault(data[: 1 + data[0]] if data else b"", []).append(row)
    for head, members in alike.items():
        layout = _record(head[0] if head else 0, classes)
        if not head or {len(packed[row]) for row in members} != {layout.itemsize} or max(head[1:], default=0) >= exits:
            raise StoreError(f"a kept row isn't one of {exits} exits and {classes} classes: the store is damaged.")
        record = np.frombuffer(b"".join(packed[row] for row in members), layout)
        for at, j in enumerate(head[1:]):
            score[j, members] = record["score"][:, at]
            logits[j, members] = _got(record, at, classes)
    return score, logits


def _got(record: NDArray[Any], at: int, classes: int) -> NDArray[np.float16]:
    half: NDArray[np.float16] = record["logits"][:, at]
    if "tail" not in (record.dtype.names or ()):
        return half
    equal = (record["tail"][:, at] - np.log(classes - TOP)).astype(np.float16)
    full = np.repeat(equal[:, None], classes, axis=1)
    np.put_along_axis(full, record["index"][:, at].astype(np.int64), half, axis=1)
    return full
