"""No calibration: plain softmax and its log-odds."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import scores
from offramp.runtime.arrays import Array, Floats, Ints
from offramp.runtime.calibration.protocol import Calibrator, Given
from offramp.runtime.calibration.registry import register


@register
class Identity(Calibrator):
    """Leaves everything as it is, to the bit; needs no fit."""

    name = "identity"
    preserves_argmax = True
    preserves_ranking = True
    needs = frozenset({"score"})

    def _check_fitted(self) -> None:
        return None

    def _fit(self, z: Array, y: Ints, aux: Mapping[str, Any], w: Floats | None) -> None:
        return None

    def _apply(self, z: Array, aux: Mapping[str, Any]) -> Array:
        return scores.softmax(z)

    def score(self, given: Mapping[str, ArrayLike]) -> Floats:
        """The raw score itself, as float64."""
        return self._score(Given(given)).astype(np.float64, copy=False)

    def _score(self, given: Given) -> Array:
        return given.score

    def graph_inputs(self, classes: int) -> dict[str, Floats]:
        return {"scale": np.ones(classes), "bias": np.zeros(classes), "inv_temperature": np.ones(classes)}
