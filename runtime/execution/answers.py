"""The answers of one call, written down row by row as rows leave."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.execution.route import Costs
from offramp.runtime.gate import Decision
from offramp.runtime.predictions import Predictions

Ids = NDArray[np.int64]


class Answers:
    """Arrays of N answers; what each means is said by `Predictions`."""

    def __init__(self, rows: int, classes: int | None) -> None:
        """classes: columns of the probabilities, None if nobody asks for them."""
        self.rows = rows
        self.label = np.zeros(rows, np.int64)
        self.confidence = np.zeros(rows, np.float64)
        self.score = np.zeros(rows, np.float32)
        self.exit = np.zeros(rows, np.int32)
        self.abstain = np.zeros(rows, np.bool_)
        self.probabilities = None if classes is None else np.zeros((rows, classes), np.float32)

    def keep(
        self,
        exit: int,
        decision: Decision,
        leave: NDArray[np.bool_],
        ids: Ids,
        label: NDArray[Any],
        score: NDArray[Any],
    ) -> Ids:
        """Write down the rows that leave at an exit; all arguments but the first have one entry a row there.

        Returns the ids of those rows. A row with a NaN score has no label.
        """
        rows, score = ids[leave], score[leave]
        self.label[rows] = np.where(np.isnan(score), -1, label[leave])
        self.confidence[rows] = decision.confidence[leave]
        self.score[rows] = score
        self.exit[rows] = exit
        self.abstain[rows] = decision.abstain[leave]
        return rows

    def keep_probabilities(self, rows: Ids, leave: NDArray[np.bool_], calibrator: Any, aux: dict[str, Any]) -> None:
        """Calibrated probabilities of the rows that leave; NaN where the score is.

        rows: their ids. leave: which rows of `aux` they are.
        """
        assert self.probabilities is not None
        unknown = np.isnan(self.score[rows])
        self.probabilities[rows[unknown]] = np.nan
        known = leave.copy()
        known[leave] = ~unknown
        given = {"routing": aux["routing"][:, known]} if "routing" in aux else {}
        self.probabilities[rows[~unknown]] = calibrator.apply(aux["logits"][known], given)

    def predictions(
        self, costs: Costs, ran: Sequence[int], fetched: Mapping[str, Any], again: Callable[[str], Any]
    ) -> Predictions:
        """All of it. ran: rows that went through each stage. fetched: what came with it; again: how to get the rest."""
        return Predictions(
            label=self.label,
            score=self.score,
            exit=self.exit,
            abstain=self.abstain,
            flops=costs.exits[self.exit],
            _confidence=self.confidence,
            executed=costs.executed(ran),
            _fetched=dict(fetched),
            _again=again,
        )
