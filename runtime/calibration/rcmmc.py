"""RCMMC: a temperature for each cell of (margin, entropy), confidence monotone in the margin (AR appendix P)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from offramp.runtime import arrays, scores
from offramp.runtime.arrays import Array, Floats, Ints
from offramp.runtime.calibration.binning import mass_edges
from offramp.runtime.calibration.monotone import isotonic_regression
from offramp.runtime.calibration.protocol import Calibrator, Given
from offramp.runtime.calibration.registry import register
from offramp.runtime.calibration.solvers.attain import at_confidence
from offramp.runtime.calibration.solvers.double import in_double
from offramp.runtime.calibration.temperature import fit_inverse_temperature
from offramp.runtime.metrics.bins import check_bins

# A cell with fewer rows takes the common temperature.
LEAST_ROWS = 20
REACH = 20.0


@register
class RCMMC(Calibrator):
    """Quantile cells of the probability margin and the predictive entropy; log T a cell by NLL.

    Within each column of equal entropy the cells' mean confidences are made non-decreasing in the margin by
    isotonic regression, and a row's log-odds move with its cell's mean; the vector is then a temperature of
    the row's own. The paper gives no sizes: 5×5. T stays within a factor 20 of the common one.
    margin_edges_, entropy_edges_: cell borders; inverse_temperatures_, shifts_: (margins, entropies), shifts
    in log-odds.
    """

    name = "rcmmc"
    preserves_argmax = True
    margin_edges_: Floats
    entropy_edges_: Floats
    inverse_temperatures_: Floats
    shifts_: Floats

    def __init__(self, bins: int = 5) -> None:
        self.bins = check_bins(bins)

    def options(self) -> dict[str, Any]:
        return {"bins": self.bins}

    def _fit(self, z: Array, y: Ints, aux: Mapping[str, Any], w: Floats | None) -> None:
        margin, entropy = _features(z)
        self.margin_edges_ = mass_edges(np.sort(margin), self.bins)
        self.entropy_edges_ = mass_edges(np.sort(entropy), self.bins)
        row, column = self._cells(margin, entropy)
        shape = (len(self.margin_edges_) + 1, len(self.entropy_edges_) + 1)
        common, _ = fit_inverse_temperature(z, y, w)
        self.inverse_temperatures_ = np.full(shape, common)
        for i, j in np.ndindex(shape):
            inside = np.flatnonzero((row == i) & (column == j))
            if len(inside) >= LEAST_ROWS:
                beta, found = fit_inverse_temperature(z[inside], y[inside], None if w is None else w[inside])
                if found:
                    self.inverse_temperatures_[i, j] = np.clip(beta, common / REACH, common * REACH)
        self.shifts_ = self._monotone_shifts(z, row, column, np.ones(len(z)) if w is None else w)

    def _monotone_shifts(self, z: Array, row: Ints, column: Ints, w: Floats) -> Floats:
        shape = self.inverse_temperatures_.shape
        cell = row * shape[1] + column
        mass = arrays.group_sums(cell, w, shape[0] * shape[1]).reshape(shape)
        confidence = scores.sigmoid(_odds_at(z, self.inverse_temperatures_[row, column]))
        total = arrays.group_sums(cell, w * confidence, shape[0] * shape[1]).reshape(shape)
        shifts = np.zeros(shape)
        for j in range(shape[1]):
            filled = np.flatnonzero(mass[:, j])
            if len(filled) < 2:
                continue
            mean = total[filled, j] / mass[filled, j]
            pooled = isotonic_regression(filled, mean, mass[filled, j])(filled)
            moved = np.abs(pooled - mean) > 1e-12
            shifts[filled[moved], j] = (scores.logit(pooled) - scores.logit(mean))[moved]
        return shifts

    def _cells(self, margin: Floats, entropy: Floats) -> tuple[Ints, Ints]:
        return np.searchsorted(self.margin_edges_, margin), np.searchsorted(self.entropy_edges_, entropy)

    def _apply(self, z: Array, aux: Mapping[str, Any]) -> Array:
        return at_confidence(z, self.score({"logits": z}))

    def _score(self, given: Given) -> Array:
        z = given.logits
        row, column = self._cells(*_features(z))
        return _odds_at(z, self.inverse_temperatures_[row, column]) + self.shifts_[row, column]


def _features(z: Array) -> tuple[Floats, Floats]:
    """Margin p_(1) − p_(2) and predictive entropy, (N,) float64."""
    return in_double(scores.margin, z), -in_double(scores.entropy, z)


def _odds_at(z: Array, beta: Floats) -> Floats:
    """(N,) log-odds of the top class at an inverse temperature a row."""
    out = np.empty(len(z))
    for rows in arrays.row_blocks(*z.shape):
        label = scores.top_label(z[rows])
        with np.errstate(over="ignore"):
            scaled = scores.differences(z[rows], label) * beta[rows, None]
        out[rows] = scores.log_odds(scaled, label)
    return out
