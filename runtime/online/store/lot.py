"""Rows of one run, as cheap to hand over as can be: what is said of them is put in order later, for many at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.online.store.served import Served
from offramp.runtime.predictions import Said, joined


@dataclass(slots=True, eq=False)
class Lot:
    """N rows that one calibration version answered at one operating point.

    of: request ids, and which of each one's rows. time: seconds since the epoch, when they were answered. exit,
    abstain, seen: of all of them, in that order. shadow: the probability with which a row that lacks any exit's say is
    run to the end afterwards. The arrays are the store's from now on.
    """

    of: Sequence[tuple[str, NDArray[np.int64]]]
    time: float
    version: int
    point: str
    exit: NDArray[np.int32]
    abstain: NDArray[np.bool_]
    seen: Said
    shadow: float

    def __len__(self) -> int:
        return len(self.exit)

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take until they are written."""
        return self.seen.nbytes

    def served(self) -> Served:
        """These rows alone."""
        (made,) = served_of([self])
        return made


def served_of(lots: Iterable[Lot]) -> list[Served]:
    """All rows of all lots, a batch for each version, point and number of exits."""

    def key(lot: Lot) -> tuple[int, str, int]:
        return lot.version, lot.point, lot.seen.exits

    return [_joined(list(alike)) for _, alike in groupby(sorted(lots, key=key), key)]


def _joined(lots: Sequence[Lot]) -> Served:
    counts = [len(lot) for lot in lots]
    seen = joined([lot.seen for lot in lots])
    shadow = np.repeat([lot.shadow for lot in lots], counts)
    return Served(
        request=[name for lot in lots for name, rows in lot.of for _ in range(len(rows))],
        row=np.concatenate([rows for lot in lots for _, rows in lot.of]),
        time=np.repeat([lot.time for lot in lots], counts),
        version=lots[0].version,
        point=lots[0].point,
        exit=np.concatenate([lot.exit for lot in lots]),
        abstained=np.concatenate([lot.abstain for lot in lots]),
        score=seen.score,
        logits=seen.logits,
        shadow=np.where(seen.unfinished, shadow, 1.0),
    )
