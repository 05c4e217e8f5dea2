"""Leave, go on, abstain: the one place where that is decided, for runtime, server and simulator alike."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from offramp.runtime import calibration
from offramp.runtime.calibration.identity import Identity
from offramp.runtime.errors import InputError
from offramp.runtime.points import OperatingPoint
from offramp.runtime.scores import sigmoid
from offramp.runtime.thresholds.rule import FEW_ROWS, reached


class Decision:
    """What happens to each of n rows at an exit.

    leave: bool (n,), answered here. abstain: bool (n,), answered with the flag that says don't rely on it;
    meaningful where `leave`. confidence: float64 (n,) calibrated probability that the label is right, and
    log_odds: the same as log-odds, which keep their order where confidence rounds to 1.

    What only a row that leaves needs is computed when it is first looked at: most exits let most rows go on.
    """

    def __init__(
        self,
        leave: NDArray[np.bool_],
        log_odds: NDArray[Any] | Callable[[], NDArray[np.float64]],
        below: float,
    ) -> None:
        self.leave = leave
        self._log_odds = log_odds
        self._below = below

    @property
    def anyone(self) -> bool:
        """Whether any row leaves."""
        return any(self.leave.tolist()) if len(self.leave) <= FEW_ROWS else bool(self.leave.any())

    @cached_property
    def log_odds(self) -> NDArray[np.float64]:
        made = self._log_odds
        return made() if callable(made) else made.astype(np.float64)

    def _few(self) -> list[float]:
        made = self.log_odds if callable(self._log_odds) else self._log_odds
        return cast(list[float], made.tolist())

    @cached_property
    def confidence(self) -> NDArray[np.float64]:
        return confidence_of(self._log_odds if not callable(self._log_odds) else self.log_odds)

    @cached_property
    def abstain(self) -> NDArray[np.bool_]:
        if len(self.leave) > FEW_ROWS:
            return ~(self.log_odds >= self._below)
        return np.array([not s >= self._below for s in self._few()])


def confidence_of(log_odds: NDArray[Any]) -> NDArray[np.float64]:
    """As `scores.sigmoid`, to the bit, of checked log-odds; faster for few rows."""
    if len(log_odds) > FEW_ROWS:
        return sigmoid(log_odds)
    # The exponential is numpy's own here too: math.exp may differ in the last bit, and a row's confidence would then
    # depend on how many rows are beside it.
    odds = log_odds.tolist()
    small = [float(np.exp(-abs(s))) for s in odds]
    return np.array([(1.0 if s >= 0 else e) / (1.0 + e) for s, e in zip(odds, small, strict=True)])


class Gate:
    """An operating point, ready to decide. Pure: it keeps nothing between calls."""

    def __init__(self, point: OperatingPoint, exits: int) -> None:
        if len(point.thresholds) != exits:
            raise InputError(
                f"operating point {point.name!r} has {len(point.thresholds)} thresholds, the model has {exits} exits."
            )
        self.point = point
        self.calibrators = point.calibrators or tuple(calibration.get("identity") for _ in range(exits))
        self._raw = [type(calibrator) is Identity for calibrator in self.calibrators]

    def needs(self, exit: int) -> frozenset[str]:
        """What `aux` must hold at an exit beside score and label: of "entropy", "logits", "routing"."""
        return self.calibrators[exit].needs - {"score", "label"}

    def decide(
        self,
        exit: int,
        label: NDArray[Any],
        score: NDArray[Any],
        aux: Mapping[str, NDArray[Any]] | None = None,
    ) -> Decision:
        """Decide for n rows at one exit.

        exit: its index. label: (n,) integers. score: (n,) log-odds; a NaN reaches no threshold.
        aux: what the exit's calibrator `needs` more of these rows.

        Rule: leave at the first exit j with score >= thresholds[j]; +inf is an exit that is switched off, and
        at -inf, which the last exit's always is, every row leaves, one with a NaN score too. Abstain where the
        log-odds of the calibrated confidence don't reach `abstain_below`; a NaN reaches nothing, so it abstains.
        """
        leave = reached(score, self.point.thresholds[exit])
        calibrator = self.calibrators[exit]
        if self._raw[exit]:
            return Decision(leave, score, self.point.abstain_below)
        given = {**(aux or {}), "score": score, "label": label}
        return Decision(leave, lambda: calibrator.score(given), self.point.abstain_below)
