"""Another calibrator's confidence, moved as a whole: the order that it gives rows stays."""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from offramp.runtime import scores
from offramp.runtime.arrays import Array, Floats, Ints
from offramp.runtime.calibration.protocol import Calibrator, Given
from offramp.runtime.calibration.rank_preserving import fit_alpha, power_log_odds
from offramp.runtime.calibration.registry import from_dict, get, register
from offramp.runtime.calibration.solvers.attain import at_confidence
from offramp.runtime.calibration.top_one import CERTAIN
from offramp.runtime.errors import InputError


@register
class Powered(Calibrator):
    """f̂_α of `rank_preserving_power`, of the confidence that another calibrator gives; α by binary NLL.

    What drifts is mostly how confident all rows are, and that can be mended without asking whether the order of rows
    may change. first: a calibrator that doesn't move the argmax, its name, or what its `to_dict` says; it is fitted
    along where it isn't fitted yet. One that is a `Powered` itself gives way to its own first: powers don't pile up.
    alpha_: in [0.01, 100]; at 1 nothing changes.
    """

    name = "powered"
    preserves_argmax = True
    alpha_: float

    def __init__(self, first: "Calibrator | str | Mapping[str, Any]" = "cwmcs") -> None:
        if isinstance(first, str):
            first = get(first)
        elif not isinstance(first, Calibrator):
            first = from_dict(first)
        self.first = ordered_by(first)
        if not self.first.preserves_argmax:
            raise InputError(f"first: {self.first.name} can change a row's label, expected one that can't.")
        self.preserves_ranking, self.needs = self.first.preserves_ranking, self.first.needs
        self.classes_ = None

    def options(self) -> dict[str, Any]:
        return {"first": self.first.name if self.first.classes_ is None else self.first.to_dict()}

    def _fit(self, z: Array, y: Ints, aux: Mapping[str, Any], w: Floats | None) -> None:
        if self.first.classes_ is None:
            self.first.fit(z, y, aux=aux, weights=w)
        odds, correct = self.first.score({**aux, "logits": z}), scores.top_label(z) == y
        self.fit_odds(odds, correct, np.ones(len(z)) if w is None else w, z.shape[1])

    def fit_odds(self, odds: Floats, correct: Array, w: Floats, classes: int) -> Self:
        """Fit α alone. odds: (N,) that `first`, which is fitted, gives; correct: (N,) bool; w: (N,) weights > 0."""
        self.classes_ = classes
        self.alpha_ = fit_alpha(np.clip(odds, -CERTAIN, CERTAIN), correct, w, classes)
        return self

    def _score(self, given: Given) -> Array:
        odds = np.asarray(self.first._score(given), np.float64)
        return power_log_odds(np.clip(odds, -scores.LARGEST, scores.LARGEST), self.alpha_, self.classes_ or 1)

    def _apply(self, z: Array, aux: Mapping[str, Any]) -> Array:
        return at_confidence(z, self.score({**aux, "logits": z}))


def ordered_by(one: Calibrator) -> Calibrator:
    """Whose order of rows a calibrator's is: what it was put on, or itself."""
    return one.first if isinstance(one, Powered) else one


def same_order(one: Calibrator, other: Calibrator) -> bool:
    """Whether two calibrators put any rows into the same order by confidence."""
    if one.preserves_ranking and other.preserves_ranking:
        return True
    return ordered_by(one) == ordered_by(other)
