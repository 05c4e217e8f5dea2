"""What every exit that ran said of a call's rows, kept beside the answers."""

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.execution.answers import Ids


class Seen:
    """Scores and logits of N rows at J exits, filled in as exits run.

    score: float32 (J, N), NaN where an exit didn't run. logits: J entries, float32 (N, C), or None where no row came.
    """

    def __init__(self, exits: int, rows: int) -> None:
        self.score = np.full((exits, rows), np.nan, np.float32)
        self.logits: list[NDArray[np.float32] | None] = [None] * exits

    def keep(self, exit: int, ids: Ids, score: NDArray[np.floating], logits: NDArray[np.floating]) -> None:
        """Write down what an exit said of rows `ids`, one entry a row."""
        self.score[exit, ids] = score
        held = self.logits[exit]
        if held is None:
            held = self.logits[exit] = np.zeros((self.score.shape[1], logits.shape[1]), np.float32)
        held[ids] = logits
