"""What exits said of rows, up to where each left."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Seen:
    """Scores and logits of N rows at J exits, filled in as exits run, by several threads if need be.

    score: float32 (J, N), NaN where an exit didn't run.
    """

    def __init__(self, exits: int, rows: int) -> None:
        self.score = np.full((exits, rows), np.nan, np.float32)
        self._logits: dict[int, NDArray[np.float32]] = {}

    @property
    def logits(self) -> list[NDArray[np.float32] | None]:
        """J entries, float32 (N, C), or None where no row came."""
        return [self._logits.get(exit) for exit in range(len(self.score))]

    def keep(
        self, exit: int, ids: NDArray[np.int64], score: NDArray[np.floating], logits: NDArray[np.floating]
    ) -> None:
        """Write down what an exit said of rows `ids`, ascending and one entry a row. The arrays are kept as they are
        where they are of all rows."""
        if len(ids) == self.score.shape[1]:
            self.score[exit], self._logits[exit] = score, np.asarray(logits)
            return
        self.score[exit, ids] = score
        held = self._logits.get(exit)
        if held is None:  # another thread may find the same
            held = self._logits.setdefault(exit, np.zeros((self.score.shape[1], logits.shape[1]), np.float32))
        held[ids] = logits

    @property
    def exits(self) -> int:
        """J, of the manifest."""
        return len(self.score)

    def apart(self) -> "Seen":
        """Itself: exits are told apart already."""
        return self

    @property
    def unfinished(self) -> NDArray[np.bool_]:
        """(N,) whether an exit is missing: the row left before it, or it was closed."""
        return np.asarray(np.isnan(self.score).any(axis=0))

    def part(self, rows: Any) -> "Seen":
        """What was seen of some rows: a slice, a mask or numbers."""
        made = Seen(len(self.score), 0)
        made.score = self.score[:, rows]
        made._logits = {exit: logits[rows] for exit, logits in self._logits.items()}
        return made

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take."""
        return self.score.nbytes + sum([logits.nbytes for logits in self._logits.values()])

    @classmethod
    def joined(cls, parts: "Sequence[Seen]") -> "Seen":
        """What was seen of all rows, in the parts' order. parts: at least one, of as many exits and classes each."""
        made = cls(len(parts[0].score), 0)
        made.score = np.concatenate([part.score for part in parts], axis=1)
        for exit in sorted({exit for part in parts for exit in part._logits}):
            there = [part._logits.get(exit) for part in parts]
            classes = next(logits.shape[1] for logits in there if logits is not None)
            made._logits[exit] = np.concatenate(
                [
                    np.zeros((part.score.shape[1], classes), np.float32) if logits is None else logits
                    for part, logits in zip(parts, there, strict=True)
                ]
            )
        return made

    def place(self, ids: NDArray[np.int64], part: "Seen") -> None:
        """Write down what was seen of rows `ids` by themselves."""
        for exit, logits in enumerate(part.logits):
            if logits is not None:
                self.keep(exit, ids, part.score[exit], logits)


class Reached:
    """What the cascade graph gave of N rows at every exit that they reached, as it gave it.

    To tell it apart takes as long for a batch of a few rows as for a thousand, so whoever answers hands it on as it is.
    """

    def __init__(
        self,
        exits: int,
        gates: tuple[tuple[int, int | None], ...],
        left: NDArray[np.int32],
        scores: NDArray[np.float32],
        logits: NDArray[np.float32],
    ) -> None:
        """exits: J, of the manifest. gates: those that are in what was given, shallow to deep, by number, and which
        exit each is; None for one that is closed. left: (N,) the gate where each row left. scores (R,), logits (R, C):
        gate by gate, of the rows that came to it."""
        self.exits, self.gates = exits, gates
        self._left, self._scores, self._logits = left, scores, logits

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take."""
        return self._scores.nbytes + self._logits.nbytes

    @property
    def unfinished(self) -> NDArray[np.bool_]:
        """(N,) whether an exit is missing, as `Seen.unfinished`."""
        if len([exit for _, exit in self.gates if exit is not None]) < self.exits:
            return np.ones(len(self._left), bool)
        return np.asarray(self._left < self.gates[-1][0])

    def apart(self) -> Seen:
        """The same, exit by exit."""
        return self.together([self])

    @classmethod
    def together(cls, parts: "Sequence[Reached]") -> Seen:
        """What was seen of all rows, in the parts' order. parts: at least one, all with the same gates."""
        one = parts[0]
        left, scores, logits = one._left, one._scores, one._logits
        if len(parts) > 1:
            left, scores, logits = (
                np.concatenate([getattr(part, name) for part in parts]) for name in ("_left", "_scores", "_logits")
            )
        part_of_row = np.repeat(np.arange(len(parts)), [len(part._left) for part in parts])
        at, rows = np.nonzero(left >= np.array([gate for gate, _ in one.gates])[:, None])
        order = np.argsort(part_of_row[rows], kind="stable")  # as they lie: part by part, in each gate by gate
        at, rows = at[order], rows[order]
        seen = Seen(one.exits, len(left))
        for k, (_, exit) in enumerate(one.gates):
            here = np.flatnonzero(at == k)
            if exit is not None and len(here):
                seen.keep(exit, rows[here], scores[here], logits[here])
        return seen


Said = Seen | Reached


def joined(parts: Sequence[Said]) -> Seen:
    """What was seen of all rows, in the parts' order. parts: at least one, of as many exits and classes each."""
    made: list[Seen] = []
    for _, alike in groupby(parts, lambda part: part.gates if isinstance(part, Reached) else None):
        those = list(alike)
        reached = [part for part in those if isinstance(part, Reached)]
        made += [Reached.together(reached)] if reached else [part for part in those if isinstance(part, Seen)]
    return made[0] if len(made) == 1 else Seen.joined(made)
