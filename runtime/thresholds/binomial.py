"""The binomial distribution: scipy's where it is installed, and many times slower without it, as on a device."""

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Floats

# ln n! − its Stirling formula, n = 0 … 15; from 16 on a series is exact to the last bit.
_EXACT = np.append(
    0.0, np.array([float(np.log(np.arange(1, n + 1)).sum()) - ((n + 0.5) * np.log(n) - n) for n in range(1, 16)])
)
_EXACT[1:] -= 0.5 * np.log(2 * np.pi)
_TINY = 1e-300


def cdf(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> Floats:
    """P(Bin(n, p) ≤ k), of whole 0 ≤ k ≤ n and p in (0, 1) of shapes that broadcast."""
    try:
        from scipy.special import bdtr
    except ImportError:
        return binomial_cdf(k, n, p)
    return np.asarray(bdtr(k, n, p))


def upper(k: ArrayLike, n: ArrayLike, level: float) -> Floats:
    """The p at which P(Bin(n, p) ≤ k) is `level`: BetaInv(1 − level; k + 1, n − k), 1 where k = n."""
    try:
        from scipy.special import betaincinv
    except ImportError:
        return binomial_upper(k, n, level)
    at, size = np.broadcast_arrays(np.asarray(k, np.float64), np.asarray(n, np.float64))
    inside = at < size
    bound = np.ones(at.shape)
    np.copyto(bound, betaincinv(at + 1.0, np.where(inside, size - at, 1.0), 1.0 - level), where=inside)
    return bound


def binomial_cdf(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> Floats:
    """As `cdf`, without scipy; relative error below 1e-10.

    I_{1−p}(n − k, k + 1) by its continued fraction, on the side where that converges fast; the factor before it is
    the probability of k itself by Loader's saddle-point form, in which nothing large cancels.
    Source: Press et al., Numerical Recipes, section 6.4; Loader 2000.
    """
    at, size, chance = np.broadcast_arrays(*(np.asarray(v, np.float64) for v in (k, n, p)))
    out = np.ones(at.shape)
    inside = at < size
    x, m, r = at[inside], size[inside], chance[inside]
    a, b, q = m - x, x + 1.0, 1.0 - r
    near = q < (a + 1) / (a + b + 2)
    value = np.empty(len(x))
    value[near] = (_probability(x, m, r) * r)[near] * _fraction(a[near], b[near], q[near])
    far = ~near
    value[far] = 1.0 - (_probability(x + 1, m, r) * q)[far] * _fraction(b[far], a[far], r[far])
    out[inside] = np.clip(value, 0.0, 1.0)
    return out


def binomial_upper(k: ArrayLike, n: ArrayLike, level: float) -> Floats:
    """As `upper`, without scipy, to 1e-13."""
    level = arrays.fraction(level, "level")
    at, size = np.broadcast_arrays(np.asarray(k, np.float64), np.asarray(n, np.float64))
    inside = at < size
    low, high = np.zeros(int(inside.sum())), np.ones(int(inside.sum()))
    for _ in range(60):
        middle = (low + high) / 2
        above = binomial_cdf(at[inside], size[inside], np.clip(middle, _TINY, 1 - 1e-16)) > level
        low, high = np.where(above, middle, low), np.where(above, high, middle)
        if (high - low <= 1e-14 * high).all():
            break
    out = np.ones(at.shape)
    out[inside] = (low + high) / 2
    return out


def _probability(x: Floats, n: Floats, p: Floats) -> Floats:
    """P(Bin(n, p) = x), 0 ≤ x ≤ n."""
    rest = n - x
    inside = (x > 0) & (rest > 0)
    safe_x, safe_rest = np.where(inside, x, 1.0), np.where(inside, rest, 1.0)
    log = _stirling(n) - _stirling(x) - _stirling(rest) - _deviance(x, n * p) - _deviance(rest, n * (1 - p))
    log += np.where(inside, 0.5 * np.log(np.maximum(n, 1.0) / (2 * np.pi * safe_x * safe_rest)), 0.0)
    ends = np.where(x > 0, n * np.log(p), n * np.log1p(-p))
    return np.exp(np.where(inside, log, ends))


def _stirling(n: Floats) -> Floats:
    """ln n! − ln(√(2πn)(n/e)^n), n ≥ 0 whole."""
    big = np.maximum(n, 16.0)
    inverse = 1.0 / big**2
    series = (1 / 12 - inverse * (1 / 360 - inverse * (1 / 1260 - inverse * (1 / 1680 - inverse / 1188)))) / big
    return np.where(n < 16, _EXACT[np.minimum(n, 15.0).astype(np.int64)], series)


def _deviance(x: Floats, mean: Floats) -> Floats:
    """x·ln(x/mean) + mean − x, without what cancels where x is near the mean."""
    gap = x - mean
    v = gap / (x + mean)
    plain = np.where(x > 0, x * np.log(np.where(x > 0, x, 1.0) / mean), 0.0) - gap
    square, term, total = v * v, 2 * x * v, gap * v
    for order in range(3, 25, 2):
        term = term * square
        total = total + term / order
    return np.where(np.abs(v) < 0.1, total, plain)


def _fraction(a: Floats, b: Floats, x: Floats) -> Floats:
    """The continued fraction of I_x(a, b)·a·B(a, b)/(x^a(1 − x)^b), by Lentz."""
    out = np.ones(len(a))
    going = np.arange(len(a))
    c = np.ones(len(a))
    d = 1.0 / _kept(1.0 - (a + b) * x / (a + 1))
    value = d.copy()
    for m in range(1, 100_000):
        if not len(going):
            break
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _kept(1.0 + step * d)
            c = _kept(1.0 + step / c)
            value = value * d * c
        done = np.abs(d * c - 1.0) < 1e-15
        if done.any():
            out[going[done]] = value[done]
            keep = ~done
            going = going[keep]
            a, b, x, c, d, value = (v[keep] for v in (a, b, x, c, d, value))
    return out


def _kept(x: Floats) -> Floats:
    return np.where(np.abs(x) < _TINY, _TINY, x)
