"""Abstention by coverage: answer the most confident so-and-so many."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays


@dataclass(frozen=True)
class FixedCoverage:
    """Answer where score ≥ threshold. coverage: fraction answered, at least what was asked, ties whole."""

    threshold: float
    coverage: float


def fixed_coverage(score: ArrayLike, coverage: float) -> FixedCoverage:
    """The highest threshold that answers at least `coverage` of the rows.

    score: (N,), higher = more confident. coverage in (0, 1]; 1 gives −inf, which also answers rows less
    confident than any seen. Without rows: −inf and NaN.
    """
    coverage = arrays.fraction(coverage, "coverage", high_open=False)
    s = arrays.vector(score, "score")
    if not len(s):
        return FixedCoverage(float("-inf"), float("nan"))
    if coverage == 1.0:
        return FixedCoverage(float("-inf"), 1.0)
    k = int(np.ceil(coverage * len(s) - 1e-9))
    threshold = float(np.partition(s, len(s) - k)[len(s) - k])
    return FixedCoverage(threshold, float((s >= threshold).mean()))
