"""The closest target that could have been kept, for who asked for too much."""

import math
from collections.abc import Callable

import numpy as np


def smallest(above: float, steps: int, passes: Callable[[float], bool]) -> float | None:
    """The smallest value beyond `above` that passes, to three digits; None if none below 0.99 does.

    passes: asked for values of three digits, so that what is tried is what is said. First in so many steps, evenly on a
    logarithmic scale, then by halving between the last that failed and the first that passed.
    """
    low, best = above, None
    for value in map(_rounded, np.geomspace(above, 0.99, steps)[1:]):
        if passes(value):
            best = value
            break
        low = value
    while best is not None and best > 1.005 * low:
        middle = _rounded(math.sqrt(low * best))
        if middle in (low, best):
            break
        low, best = (low, middle) if passes(middle) else (middle, best)
    return best


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
