"""Logits stored as float16, where that changes neither who wins nor who comes before whom."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from offramp.runtime import scores
from offramp.runtime.arrays import Floats, row_blocks
from offramp.runtime.files import sync_file

# Rows whose top class may change (two classes as good as tied), and pairs of rows whose order by log-odds may.
# Six exits of a text and three of an image classifier gave up to 3e-4 and 8e-4, and their AUROCs moved by 2e-5.
MOST_LABELS = 1e-3
MOST_PAIRS = 2e-3


@dataclass(frozen=True)
class Check:
    """What float16 does to one exit's ranking.

    labels: share of rows whose top class changes. pairs: at most this share of the pairs of rows changes order.
    overflow: finite logits that float16 can't hold.
    """

    labels: float
    pairs: float
    overflow: int

    @property
    def survives(self) -> bool:
        return self.labels <= MOST_LABELS and self.pairs <= MOST_PAIRS and not self.overflow


def check_float16(logits: NDArray[np.floating]) -> Check:
    """Compare (N, C) logits with themselves in float16, in blocks of rows."""
    rows = len(logits)
    before, after = np.empty(rows), np.empty(rows)
    changed = overflow = 0
    for block in row_blocks(rows, logits.shape[1]):
        exact = np.asarray(logits[block])
        with np.errstate(over="ignore"):
            stored = exact.astype(np.float16)
        overflow += int((np.isinf(stored) & np.isfinite(exact)).sum())
        wide = stored.astype(np.float32)
        changed += int((scores.top_label(exact) != scores.top_label(wide)).sum())
        before[block], after[block] = scores.log_odds(exact), scores.log_odds(wide)
    return Check(changed / max(rows, 1), moved_pairs(before, after), overflow)


def moved_pairs(before: Floats, after: Floats) -> float:
    """An upper bound on the share of pairs of rows that two scores (N,) order differently, or the second ties.

    Σ |rank − rank'| is never less than the number of discordant pairs (Diaconis and Graham 1977); what the second
    score ties is ranked against the first. NaN rows have no order and are left out.
    """
    known = ~(np.isnan(before) | np.isnan(after))
    n = int(known.sum())
    if n < 2:
        return 0.0
    first, second = np.empty(n, np.int64), np.empty(n, np.int64)
    first[np.argsort(before[known], kind="stable")] = np.arange(n)
    second[np.lexsort((-before[known], after[known]))] = np.arange(n)
    return float(np.abs(first - second).sum() / (n * (n - 1) / 2))


def store_float16(path: Path) -> None:
    """Replace an .npy of logits by one of float16, unless it is one; the file is whole at any moment."""
    logits = np.load(path, mmap_mode="r", allow_pickle=False)
    if logits.dtype == np.float16:
        return
    new = path.with_suffix(".half")
    with new.open("wb") as stream:
        described = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.float16)), "fortran_order": False}
        np.lib.format.write_array_header_1_0(stream, {**described, "shape": logits.shape})
        for block in row_blocks(len(logits), logits.shape[1]):
            stream.write(logits[block].astype(np.float16).tobytes())
    sync_file(new)
    new.replace(path)
