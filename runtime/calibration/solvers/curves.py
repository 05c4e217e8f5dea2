"""How each row's log-odds move with the temperature, tabulated once for searches over many temperatures."""

from functools import partial

import numpy as np
from offramp.runtime import scores
from offramp.runtime.arrays import Array, Floats
from offramp.runtime.calibration.solvers.double import in_double

NODES = 21


class OddsCurves:
    """s_i(β) = −log Σ_{k≠ŷ} exp(β·(z_k − z_ŷ)) of every row, for β = 1/T in [low, high].

    Interpolated in log β through Chebyshev nodes: one pass over the logits a node instead of one a
    temperature. The curve is smooth (a log-sum-exp): 21 nodes follow it to 1e-6 from 0.5 to 2, 41 to 1e-5
    from 0.05 to 20.
    """

    def __init__(self, z: Array, low: float, high: float, nodes: int = NODES) -> None:
        angle = (2 * np.arange(nodes) + 1) * np.pi / (2 * nodes)
        self._middle, self._half = (
            (np.log(low) + np.log(high)) / 2,
            max((np.log(high) - np.log(low)) / 2, 1e-12),
        )
        at = np.exp(self._middle + self._half * np.cos(angle))
        # Divided by β the curve is nearly flat, which is what a polynomial follows best.
        values = np.stack([in_double(partial(scores.log_odds, inv_temperature=b), z) / b for b in at])
        np.clip(values, -1e30, 1e30, out=values)
        degree = np.arange(nodes)[:, None]
        weights = np.cos(degree * angle) * (2.0 / nodes)
        weights[0] /= 2
        self._series = weights @ values

    def __call__(self, beta: Floats | float) -> Floats:
        """(N,) log-odds at one β, or at one β a row."""
        b = np.asarray(beta, np.float64)
        x = np.clip((np.log(b) - self._middle) / self._half, -1.0, 1.0)
        # Clenshaw's recurrence
        one, two = np.zeros(self._series.shape[1]), np.zeros(self._series.shape[1])
        for row in self._series[:0:-1]:
            one, two = row + 2 * x * one - two, one
        value: Floats = (self._series[0] + x * one - two) * b
        return value
