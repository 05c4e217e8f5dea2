"""What a simulation is off at the loads that were measured, taken away at the loads that were not.

A model of a server leaves things out: whose turn it is between threads, the kernel's part, what the client does on
the same cores. What that amounts to is known where a load was both measured and simulated, and changes slowly from
one load to the next. It is known at the median much better than of the slowest requests, of which a few seconds have
few, that one busy moment of the machine may have held up together: there it counts as far as it is known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from offramp.runtime.arrays import Floats
from offramp.server.simulating.samples import Level

_RANKS = (np.arange(100) + 0.5) / 100
_DEGREE = 2  # in the rate: a load's own noise is evened out over its neighbours
_FEW = 50  # requests
# Requests slower than a rank at a load, beside which those that were measured count for half: a correction of the p99
# from 40 of them was farther from later measurements than none.
_HALF_KNOWN = 100


@dataclass(frozen=True)
class Residual:
    """rates: (2,) the least and the greatest that it was fitted on. curves: (_DEGREE + 1, 100) coefficients, the
    highest power first, of log(measured / simulated) in rate / greatest, a column for each rank of a latency, each as
    far as it is known.
    """

    rates: tuple[float, float]
    curves: Floats

    def corrected(self, latencies: Floats, rate: float) -> Floats:
        """latencies: seconds (n,), simulated at a load. Beyond the loads that it was fitted on it is as at the last."""
        if not len(latencies):
            return latencies
        least, greatest = self.rates
        at = min(max(rate, least), greatest) / greatest
        logs = np.polyval(self.curves, at)
        order = np.argsort(latencies, kind="stable")
        ranks = np.empty(len(latencies))
        ranks[order] = (np.arange(len(latencies)) + 0.5) / len(latencies)
        moved = latencies * np.exp(np.interp(ranks, _RANKS, logs))
        # Of two requests the slower one stays the slower one.
        moved[order] = np.maximum.accumulate(moved[order])
        return np.asarray(moved)


NONE = Residual((0.0, 1.0), np.zeros((1, len(_RANKS))))
"""A simulation that is taken as it is."""


def residual(levels: Sequence[Level], simulated: Callable[[Level], Floats]) -> Residual:
    """Fit it. simulated: seconds (n,) of a simulation at a level's load. Levels of closed loops are passed over."""
    known = [level for level in levels if len(level.latencies) >= _FEW]
    pairs = [(level, simulated(level)) for level in known]
    pairs = [(level, found) for level, found in pairs if len(found) >= _FEW]
    if not pairs:
        return NONE
    logs = [np.log(np.quantile(level.latencies, _RANKS) / np.quantile(found, _RANKS)) for level, found in pairs]
    rates = [level.rate for level, _ in pairs]
    degree = min(_DEGREE, len(pairs) - 1)
    slower = np.mean([len(level.latencies) for level, _ in pairs]) * (1 - _RANKS)
    curves = np.polyfit(np.array(rates) / rates[-1], np.array(logs), degree)
    return Residual((rates[0], rates[-1]), curves * slower / (slower + _HALF_KNOWN))
