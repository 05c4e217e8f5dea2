"""Nadaraya–Watson estimates of P(right | features): AR-CondCal and its matched controls (AR section 2.4)."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from offramp.runtime import arrays, scores
from offramp.runtime.arrays import Array, Bools, Floats
from offramp.runtime.calibration.protocol import Given
from offramp.runtime.calibration.registry import register
from offramp.runtime.calibration.solvers.attain import at_confidence
from offramp.runtime.calibration.top_one import TopOne
from offramp.runtime.errors import InputError

# Grid steps per bandwidth, and points per axis at most.
STEPS = 16
MOST_POINTS = 1200
# Where halving the grid moves its middle by more than this, the exact sum is used.
ROUGH = 1.5e-3
# What is served stays within these log-odds, and the grid's products above this size.
SURE, FAINT = 200.0, 1e-300


class Smoother:
    """ĝ(x) = Σ w_i K(x − x_i) t_i / Σ w_i K(x − x_i), Gaussian product kernel, one bandwidth a feature.

    Exact evaluation is O(n) a row; `__call__` interpolates a grid instead, and takes the exact sum only for
    rows outside the grid or in cells where the grid is too coarse (far from all fitted rows ĝ jumps between
    nearest neighbours). A feature that never varies is dropped.
    """

    def __init__(self, points: Floats, target: Floats, weights: Floats, bandwidth: Floats) -> None:
        self.used = np.flatnonzero(bandwidth > 0)
        self.bandwidth = bandwidth[self.used]
        self.points = points[:, self.used] / self.bandwidth
        self.target, self.weights = target, weights
        self._grid: Floats | None = None

    def exact(self, features: Floats) -> Floats:
        """(N,) ĝ of (N, m) features."""
        return scores.sigmoid(self.exact_log_odds(features))

    def exact_log_odds(self, features: Floats) -> Floats:
        """(N,) log ĝ/(1 − ĝ) within ±float32's largest: the right rows' kernels against the wrong rows', each a
        log-sum-exp, so that nothing underflows or ends at a rounded 1. Sums run along each row's own memory,
        never through BLAS, whose order of adding follows the number of rows."""
        at = np.ascontiguousarray(features[:, self.used]) / self.bandwidth
        right, wrong = np.empty(len(at)), np.empty(len(at))
        for rows in arrays.row_blocks(len(at), len(self.points)):
            right[rows] = _log_mass(at[rows], self.points, self.weights * self.target)
            wrong[rows] = _log_mass(at[rows], self.points, self.weights * (1 - self.target))
        return np.clip(right - wrong, -scores.LARGEST, scores.LARGEST)

    def leave_one_out(self) -> Floats:
        """(n,) ĝ at each fitted row from all the others; the mean of the others where it has no company."""
        n = len(self.points)
        out = np.empty(n)
        others = (self.weights @ self.target - self.weights * self.target) / np.maximum(
            self.weights.sum() - self.weights, 1e-300
        )
        if not len(self.used) or n < 2:
            return np.asarray(others)
        for rows in arrays.row_blocks(n, n):
            logs = np.zeros((rows.stop - rows.start, n))
            for axis in range(len(self.used)):
                logs -= (self.points[rows, axis, None] - self.points[:, axis]) ** 2 / 2
            logs += np.log(self.weights)
            logs[np.arange(len(logs)), np.arange(rows.start, rows.stop)] = -np.inf
            logs -= logs.max(axis=1, keepdims=True)
            np.exp(logs, out=logs)
            out[rows] = (logs @ self.target) / logs.sum(axis=1)
        return out

    # ------------------------------------------------------------ the serving form

    def __call__(self, features: Floats) -> Floats:
        """(N,) ĝ within 1e-3 of `exact`, in well under 5 µs a row for many rows."""
        return scores.sigmoid(self.log_odds(features))

    def log_odds(self, features: Floats) -> Floats:
        """(N,) log-odds of ĝ within ±SURE. Each row has what it would have alone."""
        if not len(self.used):
            return np.clip(self.exact_log_odds(features), -SURE, SURE)
        self.prepare()
        assert self._grid is not None
        at = (features[:, self.used] / self.bandwidth - self._low) / self._step
        inside = ((at >= 0) & (at <= self._last)).all(axis=1)
        at[~inside] = 0.0
        cell = np.minimum(at.astype(np.int64), self._last - 1)
        part = at - cell
        if len(self.used) == 1:
            i, f = cell[:, 0], part[:, 0]
            value: Floats = self._grid[i] * (1 - f) + self._grid[i + 1] * f
            rough = self._rough[i // 2]
        else:
            width = self._grid.shape[1]
            flat = self._grid.reshape(-1)
            corner = cell[:, 0] * width + cell[:, 1]
            f, g = part[:, 0], part[:, 1]
            low = flat[corner] * (1 - g) + flat[corner + 1] * g
            high = flat[corner + width] * (1 - g) + flat[corner + width + 1] * g
            value = low * (1 - f) + high * f
            rough = self._rough[cell[:, 0] // 2, cell[:, 1] // 2]
        slow = np.flatnonzero(rough | ~inside)
        if len(slow):
            value[slow] = self.exact_log_odds(features[slow])
        return np.clip(value, -SURE, SURE)

    def prepare(self) -> None:
        """Lay the grid, once; a second at most for 10,000 fitted rows."""
        if self._grid is None and len(self.used):
            self._build()

    def _build(self) -> None:
        """The grid at twice the density that is checked: cells of the coarse one whose middles were off are
        left to the exact sum."""
        low, high = self.points.min(axis=0), self.points.max(axis=0)
        # A little beyond the fitted rows, where new ones may fall.
        low, high = low - 0.5, high + 0.5
        coarse = np.clip(np.ceil((high - low) * STEPS / 2), 1, MOST_POINTS // 2).astype(np.int64)
        self._last = 2 * coarse
        self._low, self._step = low, (high - low) / self._last
        axes = [low[i] + self._step[i] * np.arange(self._last[i] + 1) for i in range(len(self.used))]
        self._grid = self._on_grid(axes)
        self._rough = rough_cells(self._grid)

    def _on_grid(self, axes: list[Floats]) -> Floats:
        """Log-odds: linear between two clouds of rows, where ĝ itself is a step."""
        kernels = [np.exp(-((axis[:, None] - x) ** 2) / 2) for axis, x in zip(axes, self.points.T, strict=True)]
        hits, misses = (
            kernels[0] @ w if len(axes) == 1 else (kernels[0] * w) @ kernels[1].T
            for w in (self.weights * self.target, self.weights * (1 - self.target))
        )
        values = np.log(np.maximum(hits, FAINT)) - np.log(np.maximum(misses, FAINT))
        # Too far out for plain products.
        empty = np.argwhere(hits + misses < 1e-200)
        if len(empty):
            places = np.stack([axes[i][empty[:, i]] for i in range(len(axes))], axis=1)
            features = np.zeros((len(places), int(self.used.max()) + 1))
            features[:, self.used] = places * self.bandwidth
            values[tuple(empty.T)] = self.exact_log_odds(features)
        return np.asarray(np.clip(values, -SURE, SURE))


def _log_mass(at: Floats, points: Floats, weights: Floats) -> Floats:
    """(N,) log Σ_i w_i K(at − x_i); −inf where no weight is above 0."""
    used = np.flatnonzero(weights > 0)
    if not len(used):
        return np.full(len(at), -np.inf)
    logs = np.zeros((len(at), len(used)))
    for axis, x in enumerate(points[used].T):
        logs -= (at[:, axis, None] - x) ** 2 / 2
    logs += np.log(weights[used])
    largest = logs.max(axis=1)
    logs -= largest[:, None]
    return np.asarray(largest + np.log(np.exp(logs, out=logs).sum(axis=1)))


def rough_cells(grid: Floats) -> Bools:
    """Which cells of every second grid point interpolate their middles badly, as probabilities; (…) log-odds, same
    number of axes as the grid."""
    if grid.ndim == 1:
        return _off((grid[:-2:2] + grid[2::2]) / 2, grid[1::2]) > ROUGH
    across = _off((grid[:, :-2:2] + grid[:, 2::2]) / 2, grid[:, 1::2])  # middles along the second axis
    down = _off((grid[:-2:2] + grid[2::2]) / 2, grid[1::2])
    corners = grid[::2, ::2]
    centre = (corners[:-1, :-1] + corners[1:, :-1] + corners[:-1, 1:] + corners[1:, 1:]) / 4
    centre = _off(centre, grid[1::2, 1::2])
    worst = np.maximum.reduce(
        [centre, across[:-2:2], across[2::2], across[1::2], down[:, :-2:2], down[:, 2::2], down[:, 1::2]]
    )
    return np.asarray(worst > ROUGH)


def _off(one: Floats, other: Floats) -> Floats:
    return np.abs(scores.sigmoid(one) - scores.sigmoid(other))


def scott(points: Floats, weights: Floats | None = None) -> Floats:
    """(m,) Scott's bandwidths σ_j·n^(−1/(m + 4)), σ with ddof 1; 0 for a feature that never varies.

    m counts the features that vary.
    """
    n = len(points)
    spread = points.std(axis=0, ddof=1) if n > 1 else np.zeros(points.shape[1])
    spread = np.where(spread > 1e-12 * np.maximum(np.abs(points).max(axis=0), 1e-300), spread, 0.0)
    return np.asarray(spread * n ** (-1.0 / (int((spread > 0).sum()) + 4)))


class KernelCalibrator(TopOne):
    """Base: features of a row, smoothed. `score` and `confidence` read a grid, `apply` takes the exact sum.

    points_: (n, m) fitted features; bandwidth_: (m,); targets_,
    weights_."""

    points_: Floats
    targets_: Floats
    weights_: Floats
    bandwidth_: Floats

    def __init__(self, multiple: float = 1.0) -> None:
        if not multiple > 0:
            raise InputError(f"multiple: expected a number above 0 of Scott's bandwidths, got {multiple!r}.")
        self.multiple = float(multiple)
        self._smoother: Smoother | None = None

    def options(self) -> dict[str, Any]:
        return {"multiple": self.multiple}

    @abstractmethod
    def features(self, given: Given) -> Floats:
        """(N, m) what the estimate is conditioned on."""

    def _fit_pairs(self, given: Given, correct: Array, w: Floats) -> None:
        self.points_ = self.features(given)
        self.targets_ = correct.astype(np.float64)
        self.weights_ = w
        self.bandwidth_ = self.multiple * scott(self.points_)
        self._smoother = None

    @property
    def smoother(self) -> Smoother:
        """The fitted estimate."""
        if self._smoother is None:
            self._smoother = Smoother(self.points_, self.targets_, self.weights_, self.bandwidth_)
        return self._smoother

    def _score(self, given: Given) -> Array:
        return self.smoother.log_odds(self.features(given))

    def _apply(self, z: Array, aux: Mapping[str, Any]) -> Array:
        return at_confidence(z, self.smoother.exact_log_odds(self.features(Given({**aux, "logits": z}))))

    def target(self, given: Mapping[str, Any]) -> Floats:
        """(N,) the estimate itself, O(fitted rows) a row; `confidence` is within 1e-3 of it and serves."""
        self._check_fitted()
        return self.smoother.exact(self.features(Given(given)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """As always, and with the grid laid, so that the first row served doesn't wait for it."""
        made = super().from_dict(data)
        made.smoother.prepare()
        return made


@register
class NWConfidence(KernelCalibrator):
    """ĝ(c): the matched control that sees confidence alone."""

    name = "nw_confidence"
    needs = frozenset({"score"})

    def features(self, given: Given) -> Floats:
        return scores.sigmoid(given.score)[:, None]


@register
class NWConfidenceEntropy(KernelCalibrator):
    """ĝ(c, predictive entropy): the matched control with a second feature that isn't routing."""

    name = "nw_confidence_entropy"
    needs = frozenset({"score", "entropy"})

    def features(self, given: Given) -> Floats:
        return np.stack([scores.sigmoid(given.score), -given.entropy], axis=1)


@register
class ARCondCal(KernelCalibrator):
    """AR-CondCal: ĝ(c, r), r = r_std (population std over sub-layers of the routing entropy) min–max
    rescaled on the fitted rows.

    aux, given: {"routing": (L, N)} of the sub-layers that the exit has seen. low_, high_: r_std's range.
    """

    name = "ar_condcal"
    needs = frozenset({"score", "routing"})
    low_: float
    high_: float

    def _fit_pairs(self, given: Given, correct: Array, w: Floats) -> None:
        arrays.refuse_nan(np.isnan(given.routing).any(axis=0), "routing")
        r_std = _spread(given.routing)
        self.low_, self.high_ = float(r_std.min()), float(r_std.max())
        super()._fit_pairs(given, correct, w)

    def features(self, given: Given) -> Floats:
        routing = given.routing
        score = given.score
        if routing.shape[1] != len(score):
            raise InputError(f"routing: expected shape (layers, {len(score)}), got {routing.shape}.")
        span = self.high_ - self.low_
        r = (_spread(routing) - self.low_) / (span if span > 0 else 1.0)
        return np.stack([scores.sigmoid(score), r], axis=1)


def _spread(routing: Floats) -> Floats:
    """(N,) population std over layers, along each row's own memory: numpy adds (L, 1) in another order than (L, N)."""
    return np.asarray(np.ascontiguousarray(routing.T).std(axis=1))
