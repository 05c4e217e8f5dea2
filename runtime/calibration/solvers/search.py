"""Minimising a function of one number on an interval, without derivatives and without surprises."""

from collections.abc import Callable

import numpy as np

GOLDEN = (np.sqrt(5.0) - 1.0) / 2.0


def minimise(
    loss: Callable[[float], float], low: float, high: float, points: int = 33, tolerance: float = 1e-9
) -> float:
    """Where `loss` is smallest on [low, high]: the best of an even grid, refined by golden section beside it.

    Never leaves the interval; ends are possible answers. Values that are NaN count as worst.
    """
    grid = np.linspace(low, high, points)
    values = np.array([loss(float(x)) for x in grid])
    values[np.isnan(values)] = np.inf
    best = int(values.argmin())
    a, b = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, points - 1)])
    inner = [b - GOLDEN * (b - a), a + GOLDEN * (b - a)]
    at = [loss(inner[0]), loss(inner[1])]
    while b - a > tolerance * max(1.0, abs(a) + abs(b)):
        if at[0] <= at[1]:
            b, inner[1], at[1] = inner[1], inner[0], at[0]
            inner[0] = b - GOLDEN * (b - a)
            at[0] = loss(inner[0])
        else:
            a, inner[0], at[0] = inner[0], inner[1], at[1]
            inner[1] = a + GOLDEN * (b - a)
            at[1] = loss(inner[1])
    found = (a + b) / 2
    # The grid's own best point may be an end, or sit in a dip that golden section missed.
    return found if loss(found) <= values[best] else float(grid[best])
