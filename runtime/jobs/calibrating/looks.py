"""How often the same rows were calibrated on: each look with another seed or other options is one more chance to err.

A promise holds with probability 1 − δ for the look that was decided on beforehand. Whoever looks ten times, dry runs
included, and keeps the best breaks a 2% promise in 12.5% of runs instead of 5%.

history/looks.jsonl has a line a look. Rows are known again by a sketch, the smallest of their numbers (`row_keys`): two
sketches tell how many rows are shared, exactly up to `SKETCH` rows and to within a few per cent beyond. Rows that were
recorded again with other scores, however near, are other rows.
"""

import base64
import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.files import remove_abandoned, write_atomically
from offramp.runtime.jobs.plain_json import plain

LOOKS = "looks.jsonl"
SKETCH = 1024
# Rows are the same as another look's from this share of them on.
SAME = 0.5
# Older looks are forgotten: a night's is a line of 11 KB.
MOST = 1000

Keys = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Look:
    """asked: a digest of seed and options. rows: how many distinct ones. sketch: their smallest numbers, ascending.

    outcome: "dry run", "refused" or "version 3".
    """

    when: str
    asked: str
    seed: int
    rows: int
    outcome: str
    sketch: Keys

    @classmethod
    def at(cls, keys: Keys, asked: Any, seed: int, outcome: str = "") -> "Look":
        """A look now, with what was asked for as `plain` can write it."""
        distinct = np.unique(keys)
        digest = hashlib.sha256(json.dumps(plain(asked), sort_keys=True).encode()).hexdigest()
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(now, digest[:16], seed, len(distinct), outcome, distinct[:SKETCH])

    def shared(self, other: "Look") -> float:
        """The share of this look's rows that are among the other's, in [0, 1]."""
        if not self.rows or not other.rows:
            return 0.0
        both = np.union1d(self.sketch, other.sketch)[:SKETCH]
        seen = np.isin(both, self.sketch) & np.isin(both, other.sketch)
        jaccard = float(seen.mean())
        return min(1.0, jaccard / (1 + jaccard) * (self.rows + other.rows) / self.rows)

    def same(self, other: "Look") -> bool:
        """Whether this is the other once more: the same rows, seed and options."""
        return (self.asked, self.rows) == (other.asked, other.rows) and np.array_equal(self.sketch, other.sketch)


def read_looks(folder: Path) -> list[Look]:
    """The looks that are known in a history/ folder, oldest first; a line that can't be read is left out."""
    where = folder / LOOKS
    text = where.read_bytes().decode("utf-8", "replace") if where.is_file() else ""
    return [look for line in text.splitlines() if (look := _look(line)) is not None]


def note_look(folder: Path, look: Look) -> None:
    """Keep a look; the same once more takes the place of the first. To be called while the calibration is locked."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder / LOOKS)
    looks = [one for one in read_looks(folder) if not look.same(one)][1 - MOST :]
    lines = [
        json.dumps({**vars(one), "sketch": base64.b64encode(one.sketch.astype("<u8").tobytes()).decode()})
        for one in [*looks, look]
    ]
    write_atomically(folder / LOOKS, ("\n".join(lines) + "\n").encode())


def how_often(look: Look, earlier: Sequence[Look]) -> int:
    """The how-manieth look at these rows this is: 1 where no other seed or options were tried on half of them."""
    return 1 + len({one.asked for one in earlier if one.asked != look.asked and look.shared(one) >= SAME})


def _look(line: str) -> Look | None:
    try:
        found = json.loads(line)
        sketch = np.frombuffer(base64.b64decode(found.pop("sketch"), validate=True), "<u8").astype(np.uint64)
        return Look(**{**found, "rows": int(found["rows"])}, sketch=sketch)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
