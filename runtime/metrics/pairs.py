"""What the metrics read: probabilities and labels, reduced to top-1 pairs in one pass."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Array, Bools, Floats, Ints
from offramp.runtime.errors import InputError

# A float32 softmax may sum to a little more than 1; logits don't stay this close.
SLACK = 1e-5


@dataclass(frozen=True)
class Pairs:
    """Top-1 confidences in [0, 1] and whether they were right, (n,) each; weights None = 1 a row."""

    confidence: Floats
    correct: Bools
    weights: Floats | None

    def __len__(self) -> int:
        return len(self.confidence)

    @property
    def residual(self) -> Floats:
        """confidence − correct, times the weight."""
        gap = self.confidence - self.correct
        return gap if self.weights is None else gap * self.weights

    @property
    def mass(self) -> float:
        """Σ weights."""
        return float(len(self)) if self.weights is None else float(self.weights.sum())


@dataclass(frozen=True)
class Classified(Pairs):
    """Pairs with their predicted and true classes."""

    predicted: Ints
    truth: Ints
    classes: int


def pairs(probabilities: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> Pairs:
    """From (N, C) probabilities and (N,) labels, or from (N,) top-1 confidences and (N,) 0/1 correctness.

    Rows labelled −1 are left out. Confidences are clipped to [0, 1] after a check that they aren't logits.
    """
    if np.ndim(probabilities) == 2:
        return classified(probabilities, labels, weights)
    confidence = arrays.vector(probabilities, "probabilities")
    right = arrays.labels(labels, len(confidence), 2)
    w = arrays.weights(weights, len(confidence))
    confidence = _in_range(confidence)
    keep = right >= 0
    if not keep.all():
        confidence, right, w = confidence[keep], right[keep], None if w is None else w[keep]
    return Pairs(confidence, right.astype(bool), w)


def classified(probabilities: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> Classified:
    """From (N, C) probabilities and (N,) labels; rows labelled −1 are left out."""
    p = arrays.matrix(probabilities, "probabilities")
    truth = arrays.labels(labels, *p.shape)
    w = arrays.weights(weights, len(p))
    predicted = np.empty(len(p), np.int64)
    confidence = np.empty(len(p))

    def work(rows: slice) -> None:
        block = p[rows]
        best = block.argmax(axis=1)
        predicted[rows] = best
        confidence[rows] = block[np.arange(len(block)), best]

    arrays.for_each_block(work, len(p), p.shape[1], arrays.SCAN_VALUES)
    arrays.refuse_nan(np.isnan(confidence), "probabilities")
    confidence = _in_range(confidence)
    keep = truth >= 0
    if not keep.all():
        confidence, predicted, truth = confidence[keep], predicted[keep], truth[keep]
        w = None if w is None else w[keep]
    return Classified(confidence, predicted == truth, w, predicted, truth, p.shape[1])


def _in_range(confidence: Floats) -> Floats:
    outside = (confidence < -SLACK) | (confidence > 1 + SLACK)
    if outside.any():
        raise _not_probabilities(outside)
    clipped: Floats = np.clip(confidence, 0.0, 1.0)
    return clipped


def _not_probabilities(outside: Bools) -> InputError:
    where = arrays.describe_rows(np.flatnonzero(outside))
    return InputError(f"probabilities: expected numbers in [0, 1], not so in {where}; pass softmax(logits).")


def refuse_outside(p: Array, lowest: float, highest: float) -> None:
    """Raise if the extremes of some block of (N, C) probabilities leave [0, 1], naming all rows that do.

    The caller has the block at hand, so this makes no pass of its own until there is a row to name. NaN passes.
    """
    if lowest < -SLACK or highest > 1 + SLACK:
        outside = (p.min(axis=1) < -SLACK) | (p.max(axis=1) > 1 + SLACK)
        raise _not_probabilities(outside)


def labelled(
    probabilities: ArrayLike, labels: ArrayLike, weights: ArrayLike | None
) -> tuple[Array, Ints, Floats | None, Ints | None]:
    """(N, C) array, (N,) labels, weights, and the numbers of the labelled rows (None when all are)."""
    p = arrays.matrix(probabilities, "probabilities")
    truth = arrays.labels(labels, *p.shape)
    w = arrays.weights(weights, len(p))
    keep = truth >= 0
    return p, truth, w, None if keep.all() else np.flatnonzero(keep)
