"""Evidence that grows with every row and may be looked at after each: bets against a hypothesis.

What is bet on is a gain g_i in [−1, ∞) a row. The hypothesis is that the gains were, up to now, no better than nothing
on average: Σ_{i≤n} E[g_i | what came before] ≤ 0. Wealth under a constant stake λ in [0, 1) is Π(1 + λ·g_i), and the
e-value is its mean over a fixed grid of stakes.

Why it holds, also for a stream that drifts: with μ_i = E[g_i | before], Π(1 + λg_i)/(1 + λμ_i) is a nonnegative
martingale that begins at 1, and Π(1 + λμ_i) ≤ exp(λΣμ_i) ≤ 1 wherever the hypothesis is true at n. So wealth is below
the martingale there, and by Ville the probability that it ever reaches 1/α at such an n is at most α, however often
anybody looks. No single μ_i needs to be ≤ 0, and the rows needn't be alike. The stakes must not follow the gains: with
stakes that do, only the hypothesis that *every* μ_i is ≤ 0 could be refuted.
Source: Waudby-Smith & Ramdas 2024, section 4 (betting with a grid of stakes); Ville 1939.
"""

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Floats
from offramp.runtime.errors import InputError

# Of all there is: the best one wins without being known, and costs at most a factor of their number.
STAKES = np.geomspace(1e-3, 0.98, 24)


def log_wealth(gains: ArrayLike) -> Floats:
    """(K,) log Π(1 + λ_k·g_i) over (n,) gains; 0 without any. The order of the gains changes nothing."""
    g = _gains(gains)
    parts = [np.log1p(np.outer(g[rows], STAKES)).sum(axis=0) for rows in arrays.row_blocks(len(g), len(STAKES))]
    return np.asarray(np.sum(parts, axis=0)) if parts else np.zeros(len(STAKES))


def running_log_wealth(gains: ArrayLike) -> Floats:
    """(n, K) the same after each row."""
    return np.cumsum(np.log1p(np.outer(_gains(gains), STAKES)), axis=0)


def mixed(wealth: Floats) -> Floats:
    """(…, K) log wealths -> (…) log of their mean: the log e-value."""
    top = wealth.max(axis=-1, keepdims=True)
    return np.asarray(top[..., 0] + np.log(np.exp(wealth - top).mean(axis=-1)))


def log_e_value(gains: ArrayLike) -> float:
    """log of the evidence against "no better than nothing" that (n,) gains are; 0 without any."""
    return float(mixed(log_wealth(gains)))


def spent(alpha: float, turn: int) -> float:
    """α·6/(π²·turn²): the level of the turn-th of any number of tests, turn from 1, that together spend α."""
    alpha = arrays.fraction(alpha, "alpha")
    if turn < 1:
        raise InputError(f"turn: expected a whole number of at least 1, got {turn!r}.")
    return float(alpha * 6 / (np.pi * turn) ** 2)


def _gains(gains: ArrayLike) -> Floats:
    g = arrays.vector(gains, "gains")
    if len(g) and g.min() < -1 - 1e-9:
        raise InputError(f"gains: expected numbers of at least −1, got {g.min()}.")
    return np.maximum(g, -1.0)
