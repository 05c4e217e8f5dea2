"""Rows that are there more than once: the same answers with the same scores at every exit."""

from dataclasses import dataclass

import numpy as np
from offramp.runtime.arrays import Array, Bools, Ints
from offramp.runtime.jobs.data.labelled_rows import FEWEST_ROWS, LabelledRows
from offramp.runtime.scores import LARGEST

# Different rows hardly ever share a score at an exit where this share of them has one of its own.
OF_ITS_OWN = 0.99


@dataclass(frozen=True)
class Repeated:
    """group: (N,) a number a row, the same for rows that are one row repeated. notes: what is odd, in words."""

    group: Ints
    notes: tuple[str, ...] = ()


def find_repeated(rows: LabelledRows) -> Repeated:
    """Which of the labelled rows are one row repeated, labels apart.

    Equal scores at all exits tell that only where scores are fine: where different rows share scores at every exit, as
    scores of few values do, each row is left by itself, since to keep ties together would make parts that differ.
    So are rows at the end of the scale, of which nothing more is known, and everything if fewer than 50 rows differ.
    """
    alone = np.arange(len(rows))
    if not len(rows):
        return Repeated(alone)
    first, group = _rows_alike(np.concatenate([rows.score, rows.label.astype(rows.score.dtype)]))
    if len(first) == len(rows):
        return Repeated(alone)
    telling: Bools = np.array([_fine(score[first]) for score in rows.score])
    if len(first) < FEWEST_ROWS:
        return Repeated(alone, (f"only {len(first)} of {len(rows)} rows differ in any exit's answer or score.",))
    if not telling.any():
        return Repeated(
            alone,
            (
                "scores take so few values that rows with equal ones can't be told from repeated rows: if rows are "
                "repeated, promises hold for fewer rows than they count.",
            ),
        )
    known = (np.abs(rows.score[telling]) < LARGEST).any(axis=0)
    group = np.where(known, group, len(first) + alone)
    return Repeated(np.unique(group, return_inverse=True)[1], tuple(_said(group, rows.truth)))


def _rows_alike(columns: Array) -> tuple[Ints, Ints]:
    """Where each distinct column of (K, N) numbers is first, and which of them each is."""
    lines = np.ascontiguousarray(columns.T + 0.0)  # −0 is 0
    _, first, group = np.unique(
        lines.view(np.dtype((np.void, lines.dtype.itemsize * lines.shape[1]))).ravel(),
        return_index=True,
        return_inverse=True,
    )
    return first, group


def _fine(score: Array) -> bool:
    """Whether a score hardly ever belongs to two different rows, those at the end of the scale apart."""
    inside = score[np.abs(score) < LARGEST]
    return len(inside) >= FEWEST_ROWS and len(np.unique(inside)) >= OF_ITS_OWN * len(inside)


def _said(group: Ints, truth: Ints) -> list[str]:
    _, which, count = np.unique(group, return_inverse=True, return_counts=True)
    again = count[which] > 1
    if not again.any():
        return []
    pairs = np.unique(np.stack([which, truth]), axis=1)
    torn = np.bincount(pairs[0], minlength=len(count)) > 1
    distinct = int((count > 1).sum())
    found = [
        f"{int(again.sum())} of {len(group)} rows are {distinct} repeated ones (the same answers and scores at all "
        "exits). Each is in one part with its repetitions, but promises count every one as a row of its own: "
        "remove repetitions that the served rows won't have."
    ]
    if torn.any():
        found.append(
            f"{int(torn[which].sum())} of {len(group)} rows have conflicting labels: {int(torn.sum())} rows are there "
            "with more than one label."
        )
    return found
