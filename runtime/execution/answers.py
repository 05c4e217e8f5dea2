"""The answers of one call, written down row by row as rows leave."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from offramp.runtime.gate import Decision, confidence_of
from offramp.runtime.predictions import Predictions

Ids = NDArray[np.int64]


class Answers:
    """Arrays of N answers; what each means is said by `Predictions`. flops is for its owner to fill in."""

    def __init__(
        self, rows: int, classes: int | None = None, *, score: DTypeLike = np.float32, flops: DTypeLike = np.int64
    ) -> None:
        """classes: columns of the probabilities, None if nobody asks for them. score, flops: their dtypes."""
        self.rows = rows
        self.label = np.zeros(rows, np.int64)
        self.log_odds = np.zeros(rows, np.float64)
        self.score: NDArray[Any] = np.zeros(rows, score)
        self.exit = np.zeros(rows, np.int32)
        self.abstain = np.zeros(rows, np.bool_)
        self.involuntary = np.zeros(rows, np.bool_)
        self.flops: NDArray[Any] = np.zeros(rows, flops)
        self.probabilities = None if classes is None else np.zeros((rows, classes), np.float32)

    def copy(self) -> "Answers":
        """The answers as they are now; nothing that is written down later shows there."""
        made = Answers(self.rows)
        for name, value in vars(self).items():
            if name != "confidence":
                setattr(made, name, value.copy() if isinstance(value, np.ndarray) else value)
        return made

    @cached_property
    def confidence(self) -> NDArray[np.float64]:
        """(N,) from the log-odds, once every row has been answered."""
        return confidence_of(self.log_odds)

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
        self.log_odds[rows] = decision.log_odds[leave]
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

    def place(self, rows: Ids, out: Predictions) -> None:
        """Write down what another call answered, at these rows."""
        for name in ("label", "log_odds", "score", "exit", "abstain", "flops", "involuntary"):
            getattr(self, name)[rows] = getattr(out, name)
        if self.probabilities is not None:
            self.probabilities[rows] = out.probabilities

    def predictions(
        self,
        executed: tuple[int, ...],
        fetched: Mapping[str, Any],
        again: Callable[[str], Predictions],
        classes: Sequence[str],
    ) -> Predictions:
        """All of it. executed: FLOPs run by block. fetched: what came with it; again: how to get the rest."""
        return Predictions(
            label=self.label,
            score=self.score,
            exit=self.exit,
            abstain=self.abstain,
            flops=self.flops,
            involuntary=self.involuntary,
            confidence=lambda: self.confidence,
            log_odds=lambda: self.log_odds,
            executed=executed,
            fetched=fetched,
            again=again,
            classes=classes,
        )
