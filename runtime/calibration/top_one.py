"""Calibrators of the top class alone: they map (what is known of a row) to the probability that its label is
right, and let a temperature of the row's own give the vector."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays, scores
from offramp.runtime.arrays import Array, Floats, Ints
from offramp.runtime.calibration.protocol import Calibrator, Given
from offramp.runtime.calibration.solvers.attain import at_confidence
from offramp.runtime.calibration.solvers.double import in_double
from offramp.runtime.errors import InputError

# Log-odds beyond this say no more than "certain", but would outweigh all other rows in a fit.
CERTAIN = 700.0


class TopOne(Calibrator):
    """Base: subclasses fit on (score, correct) and give `_score`."""

    preserves_argmax = True
    needs = frozenset({"score"})

    def _fit(self, z: Array, y: Ints, aux: Mapping[str, Any], w: Floats | None) -> None:
        known = {"score": in_double(scores.log_odds, z)}
        if "entropy" in self.needs:
            known["entropy"] = in_double(scores.entropy, z)
        given = Given({"logits": z, **known, **aux})
        correct = scores.top_label(z) == y
        self._fit_pairs(given, correct, np.ones(len(z)) if w is None else w)

    def fit_scores(
        self, score: ArrayLike, correct: ArrayLike, classes: int, *, weights: ArrayLike | None = None
    ) -> Self:
        """As `fit`, from the raw log-odds (N,) and correctness (N,) alone, where nothing else is needed."""
        if self.needs != {"score"}:
            raise InputError(f"{self.name}: needs more than scores to be fitted, {', '.join(sorted(self.needs))}.")
        s = arrays.vector(score, "score")
        right = arrays.flags(correct, "correct", len(s))
        w = arrays.weights(weights, len(s))
        w = np.ones(len(s)) if w is None else w
        if not w.any():
            raise InputError("score: expected at least one row with a weight above 0.")
        self.classes_ = int(classes)
        self._fit_pairs(Given({"score": s[w > 0]}), right[w > 0], w[w > 0])
        return self

    @abstractmethod
    def _fit_pairs(self, given: Given, correct: Array, w: Floats) -> None:
        """Fit on (N,) correctness and weights > 0."""

    def _apply(self, z: Array, aux: Mapping[str, Any]) -> Array:
        return at_confidence(z, self.score({**aux, "logits": z}))


def finite_score(given: Given) -> Floats:
    """The raw log-odds for use in a fit: float64 within ±700."""
    return np.clip(given.score.astype(np.float64), -CERTAIN, CERTAIN)


def softplus(x: Array) -> Floats:
    """log(1 + e^x) without overflow."""
    return np.logaddexp(0.0, np.asarray(x, np.float64))
