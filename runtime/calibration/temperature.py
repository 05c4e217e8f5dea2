"""One temperature for all rows, and its relatives."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from offramp.runtime import arrays, scores
from offramp.runtime.arrays import Array, Floats, Ints
from offramp.runtime.calibration.protocol import Calibrator, Given
from offramp.runtime.calibration.registry import register
from offramp.runtime.calibration.solvers.curves import OddsCurves
from offramp.runtime.calibration.solvers.search import minimise
from offramp.runtime.errors import InputError
from offramp.runtime.metrics.bins import check_bins, equal_width

# More logits than this are solved from the solution on every eighth row.
START_VALUES = 1 << 20
_THINNED = 8
# Relative error that a solution may keep; the temperature is asked for to 1e-4.
_ERROR = 1e-5
_MOMENT_VALUES = 1 << 18
HEDGE = 0.5


def fit_inverse_temperature(z: Array, y: Ints, w: Floats | None) -> tuple[float, bool]:
    """β = 1/T that minimises the NLL of softmax(βz), and whether such a β exists.

    The NLL is convex in β; its derivative is Σ w (E_p[z] − z_y), found at 0 by Newton inside a bracket.
    Every label at a largest logit: no minimum (T → 0), β = 1 is returned. No better than chance: no minimum
    either (T → ∞), β = 1e-3 / RMS gap, near-uniform probabilities. Rows whose label has logit −inf are
    impossible at any temperature and left out.
    """
    top = scores.top_label(z)
    rows = np.arange(len(z))
    with np.errstate(invalid="ignore"):
        behind = z[rows, top].astype(np.float64) - z[rows, y].astype(np.float64)
    behind[z[rows, top] == z[rows, y]] = 0.0
    weight = np.ones(len(z)) if w is None else w
    weight = np.where(np.isfinite(behind), weight, 0.0)
    behind = np.where(np.isfinite(behind), behind, 0.0)
    if not (behind * weight).any():
        return 1.0, False
    return _fit(z, top, behind, weight)


def _fit(z: Array, top: Ints, behind: Floats, weight: Floats) -> tuple[float, bool]:
    """Solve on a thinned sample first: from there one pass over all rows is enough.

    With slope, curvature and the change of curvature the solution is a parabola's and not a line's (Halley's
    step). Its error is of the third order, and if that isn't small, Newton goes on from there.
    """
    part = slice(None, None, _THINNED)
    if z.size <= START_VALUES or not (behind[part] * weight[part]).any():
        return _solve(z, top, behind, weight, 1.0)
    start, found = _fit(z[part], top[part], behind[part], weight[part])
    if not found:
        return _solve(z, top, behind, weight, 1.0)
    slope, curve, bend = _moments(z, top, behind, weight, start)
    under = curve**2 - 2 * bend * slope
    if not (curve > 0 and under > 0):
        return _solve(z, top, behind, weight, start)
    step = -2 * slope / (curve + np.sqrt(under))
    if 2 * abs(step) ** 3 <= _ERROR * start**3:
        return float(start + step), True
    return _solve(z, top, behind, weight, max(start + step, start / 2))


def _solve(z: Array, top: Ints, behind: Floats, weight: Floats, start: float) -> tuple[float, bool]:
    low, high, beta = 0.0, np.inf, start
    falls_at_zero = False
    for _ in range(200):
        slope, curve, _ = _moments(z, top, behind, weight, beta)
        low, high = (beta, high) if slope < 0 else (low, beta)
        step = beta - slope / curve if curve > 0 else np.nan
        if not low < step < high and low == 0.0 and not falls_at_zero:
            slope_at_zero, spread, _ = _moments(z, top, behind, weight, 0.0)
            if slope_at_zero >= 0:
                return 1e-3 / max(np.sqrt(spread / weight.sum()), 1e-300), False
            falls_at_zero = True
        # Outside the bracket (or flat) Newton knows nothing: double, or halve the bracket.
        inside = low < step < high
        moved = step if inside else (2 * beta if np.isinf(high) else (low + high) / 2)
        # Newton squares a relative error: after a step of 2e-4 about 1e-7 is left.
        done = abs(moved - beta) <= (2e-4 if inside else 1e-14) * moved
        beta = moved
        if done:
            break
    return float(beta), True


def _moments(z: Array, top: Ints, behind: Floats, weight: Floats, beta: float) -> tuple[float, float, float]:
    """Σ w (E_p[d] + behind), Σ w Var_p(d) and Σ w of the third cumulant, d = z − z_top, p = softmax(βz): the
    first three derivatives of the NLL."""

    def work(rows: slice) -> Floats:
        block = z[rows].astype(np.float64)
        label = top[rows]
        moments = np.empty((3, len(block)))
        with np.errstate(invalid="ignore", over="ignore"):
            gaps = block - block[np.arange(len(block)), label][:, None]
            powers = gaps * beta
            np.exp(powers, out=powers)
            total = powers.sum(axis=1)
            for order, moment in enumerate(moments):
                if order:
                    powers *= gaps
                np.divide(np.einsum("ij,ij->i", powers, gaps), total, out=moment)
        broken = ~np.isfinite(moments).all(axis=0)
        if broken.any():
            exact = np.maximum(scores.differences(block[broken], label[broken]), -1e150)
            powers = np.where(exact > -1e150, np.exp(exact * beta), 0.0)
            total = powers.sum(axis=1)
            for moment in moments:
                powers *= exact
                moment[broken] = powers.sum(axis=1) / total
        first, second, third = moments
        w = weight[rows]
        with np.errstate(invalid="ignore", over="ignore"):
            skew = w @ np.nan_to_num(third - 3 * first * second + 2 * first**3)
        return np.array([w @ (first + behind[rows]), w @ np.maximum(second - first**2, 0.0), skew])

    # Two temporaries a block.
    slope, curve, bend = np.sum(arrays.for_each_block(work, len(z), z.shape[1], _MOMENT_VALUES), axis=0)
    return float(slope), float(curve), float(bend)


def hedged_inverse_temperature(z: Array, y: Ints, w: Floats | None) -> tuple[float, bool]:
    """As `fit_inverse_temperature`, but ln β moved towards 0 as far as the rows leave it in doubt.

    ln β · t²/(t² + ½), t as in `standard_errors`. For an effect δ measured with error σ the factor of least squared
    error is δ²/(δ² + σ²); the measured δ² stands for the true one, which it exceeds by σ². ½ rather than 1 is the
    milder guard: the mean error is at most 1.08 times the smaller of 0's and the fit's for any δ beyond .65σ (1.13
    with 1), and .53σ at δ = 0, where the fit's is .80σ (.43σ with 1).
    """
    beta, found = fit_inverse_temperature(z, y, w)
    if not found:
        return beta, False
    squared = standard_errors(z, y, w, beta) ** 2
    return float(beta ** (squared / (squared + HEDGE))), True


def standard_errors(z: Array, y: Ints, w: Floats | None, beta: float) -> float:
    """How many standard errors ln β, β minimising the NLL, is from 0; ≥ 0.

    The error is a sandwich estimate, so that it holds where no temperature makes the logits right. A weight of 2
    counts as two rows. Where no row says anything of β it is 0.
    """
    weight = np.ones(len(z)) if w is None else w
    slopes, curve = _row_slopes(z, y, weight, beta)
    noise = float(weight @ slopes**2)
    return float(abs(np.log(beta)) * beta * curve / np.sqrt(noise)) if noise > 0 else 0.0


def _row_slopes(z: Array, y: Ints, weight: Floats, beta: float) -> tuple[Floats, float]:
    """(N,) dNLL/dβ of each row, and the curvature of their weighted sum; a row impossible at any β has none."""
    out = np.zeros(len(z))

    def work(rows: slice) -> float:
        block = z[rows].astype(np.float64)
        n = np.arange(len(block))
        gaps = np.maximum(scores.differences(block, scores.top_label(block)), -1e150)
        powers = np.exp(gaps * beta)
        powers /= powers.sum(axis=1, keepdims=True)
        mean = np.einsum("ij,ij->i", powers, gaps)
        own = gaps[n, y[rows]]
        known = np.where(own > -1e150, weight[rows], 0.0)
        out[rows] = np.where(own > -1e150, mean - own, 0.0)
        spread = np.einsum("ij,ij->i", powers * gaps, gaps) - mean**2
        return float(known @ np.maximum(spread, 0.0))

    return out, float(sum(arrays.for_each_block(work, len(z), z.shape[1], _MOMENT_VALUES)))


class _Scaled(Calibrator):
    """Base: softmax(z·β), β > 0 the same for all rows."""

    preserves_argmax = True
    temperature_: float

    @property
    def _beta(self) -> float:
        return 1.0 / self.temperature_

    def _apply(self, z: Array, aux: Mapping[str, Any]) -> Array:
        return scores.softmax(z, self._beta)

    def _score(self, given: Given) -> Array:
        return scores.log_odds(given.logits.astype(np.float64, copy=False), None, self._beta)

    def graph_inputs(self, classes: int) -> dict[str, Floats]:
        return {
            "scale": np.ones(classes),
            "bias": np.zeros(classes),
            "inv_temperature": np.full(classes, self._beta),
        }


@register
class Temperature(_Scaled):
    """softmax(z/T), T by NLL. Guo et al. 2017. Changes the order of rows (EEFP appendix A).

    temperature_: T > 0. When every fitted row is right the NLL falls for ever as T → 0: T stays 1. When the
    labels are no better than chance it falls as T → ∞: T is 1,000 times the RMS gap to the top logit, nearly
    uniform. has_optimum_ is False in both.
    hedged: ln T is moved towards 0 as far as the rows leave it in doubt (see `hedged_inverse_temperature`).
    """

    name = "temperature"
    has_optimum_: bool

    def __init__(self, hedged: bool = False) -> None:
        self.hedged = bool(hedged)

    def options(self) -> dict[str, Any]:
        return {"hedged": self.hedged}

    def _fit(self, z: Array, y: Ints, aux: Mapping[str, Any], w: Floats | None) -> None:
        solve = hedged_inverse_temperature if self.hedged else fit_inverse_temperature
        beta, self.has_optimum_ = solve(z, y, w)
        self.temperature_ = 1.0 / beta


def top_one_ece(log_odds: Floats, correct: Array, w: Floats, bins: int) -> float:
    """ECE of sigmoid(log_odds) against correctness."""
    confidence = scores.sigmoid(log_odds)
    sums = arrays.group_sums(equal_width(confidence, bins), w * (confidence - correct), bins)
    return float(np.abs(sums).sum() / w.sum())


def ece_temperature(z: Array, y: Ints, w: Floats | None, bins: int = 15) -> float:
    """T on 0.5, 0.51 … 2 that minimises the ECE of the fitted rows, the lowest of equals (cwMCS authors' code)."""
    grid = np.arange(50, 201) / 100
    curves = OddsCurves(z, 0.5, 2.0)
    correct = scores.top_label(z) == y
    weight = np.ones(len(z)) if w is None else w
    return float(grid[np.argmin([top_one_ece(curves(1.0 / t), correct, weight, bins) for t in grid])])


@register
class SoftBinnedTemperature(_Scaled):
    """softmax(z/T), T by the soft-binned ECE. Karandikar et al. 2021.

    Row i belongs to bin m by softmax_m(−(c_i − ξ_m)²/bin_temperature), ξ_m the bins' middles; the loss is
    Σ_m share_m·|accuracy_m − confidence_m|^power. T is searched on [1/20, 20] times the NLL temperature.
    """

    name = "sb_ece_temperature"

    def __init__(self, bins: int = 15, bin_temperature: float = 0.01, power: float = 2.0) -> None:
        if not bin_temperature > 0 or not power > 0:
            raise InputError("sb_ece_temperature: expected bin_temperature and power above 0.")
        self.bins, self.bin_temperature, self.power = check_bins(bins), bin_temperature, power

    def options(self) -> dict[str, Any]:
        return {"bins": self.bins, "bin_temperature": self.bin_temperature, "power": self.power}

    def _fit(self, z: Array, y: Ints, aux: Mapping[str, Any], w: Floats | None) -> None:
        middle, _ = fit_inverse_temperature(z, y, w)
        curves = OddsCurves(z, middle / 20, middle * 20, nodes=41)
        correct = (scores.top_label(z) == y).astype(np.float64)
        weight = np.ones(len(z)) if w is None else w

        def loss(log_beta: float) -> float:
            return self._soft_ece(scores.sigmoid(curves(np.exp(log_beta))), correct, weight)

        log_beta = minimise(loss, np.log(middle / 20), np.log(middle * 20), 65, 1e-7)
        self.temperature_ = float(np.exp(-log_beta))

    def _soft_ece(self, confidence: Floats, correct: Floats, w: Floats) -> float:
        centres = (np.arange(self.bins) + 0.5) / self.bins
        sums = np.zeros((3, self.bins))
        for rows in arrays.row_blocks(len(confidence), self.bins):
            c = confidence[rows]
            member = -((c[:, None] - centres) ** 2) / self.bin_temperature
            member = np.exp(member - member.max(axis=1, keepdims=True))
            member /= member.sum(axis=1, keepdims=True)
            sums += np.stack([w[rows], w[rows] * c, w[rows] * correct[rows]]) @ member
        share, stated, right = sums
        gap = np.abs(stated - right) / np.maximum(share, 1e-300)
        return float((share / w.sum() * gap**self.power).sum())


@register
class EnsembleTemperature(Calibrator):
    """w₁·softmax(z/T) + w₂·softmax(z) + w₃/C, w ≥ 0, Σw = 1; T by NLL, then w by NLL. Zhang et al. 2020.

    weights_: (3,). temperature_: as in `Temperature`.
    """

    name = "ensemble_temperature"
    preserves_argmax = True
    temperature_: float
    weights_: Floats

    def _fit(self, z: Array, y: Ints, aux: Mapping[str, Any], w: Floats | None) -> None:
        beta, _ = fit_inverse_temperature(z, y, w)
        self.temperature_ = 1.0 / beta
        wide = [scores.log_odds(z.astype(np.float64, copy=False), y, b) for b in (beta, 1.0)]
        parts = np.stack([*(scores.sigmoid(s) for s in wide), np.full(len(z), 1.0 / z.shape[1])], axis=1)
        self.weights_ = mixture_weights(parts, np.ones(len(z)) if w is None else w)

    def _apply(self, z: Array, aux: Mapping[str, Any]) -> Array:
        warm, plain, flat = self.weights_
        p = scores.softmax(z, 1.0 / self.temperature_)
        p *= p.dtype.type(warm)
        for rows in arrays.row_blocks(*z.shape):
            p[rows] += (plain * scores.softmax(z[rows]) + flat / z.shape[1]).astype(p.dtype)
        return p

    def _score(self, given: Given) -> Array:
        z = given.logits.astype(np.float64, copy=False)
        odds = [scores.log_odds(z, None, 1.0 / self.temperature_), scores.log_odds(z)]
        warm, plain, flat = self.weights_
        # Right and wrong shares each as a sum of what is never negative: nothing cancels.
        right = warm * scores.sigmoid(odds[0]) + plain * scores.sigmoid(odds[1]) + flat / z.shape[1]
        wrong = warm * scores.sigmoid(-odds[0]) + plain * scores.sigmoid(-odds[1]) + flat * (1 - 1 / z.shape[1])
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(right) - np.log(wrong))


def mixture_weights(parts: Floats, w: Floats) -> Floats:
    """(K,) weights on the simplex that maximise Σ w log(parts @ weights), parts (N, K) ≥ 0: EM, which is
    monotone and needs no step size."""
    mix = np.full(parts.shape[1], 1.0 / parts.shape[1])
    for _ in range(2000):
        total = parts @ mix
        total[total <= 0] = np.inf  # no part explains the row: it says nothing about the mix
        moved = mix * ((w / total) @ parts)
        moved /= moved.sum()
        change = np.abs(moved - mix).max()
        mix = moved
        if change < 1e-10:
            break
    return mix


@register
class LogitNorm(Calibrator):
    """softmax(τ·z/‖z‖₂), τ > 0 by ECE (AR's "LC"). A row of zeros stays uniform.

    τ is searched on a grid of `points` from 0.1 to 1,000, then on as many between its neighbours.
    """

    name = "logit_norm"
    preserves_argmax = True
    scale_: float

    def __init__(self, bins: int = 15, points: int = 61) -> None:
        self.bins, self.points = check_bins(bins), max(3, int(points))

    def options(self) -> dict[str, Any]:
        return {"bins": self.bins, "points": self.points}

    def _fit(self, z: Array, y: Ints, aux: Mapping[str, Any], w: Floats | None) -> None:
        curves = OddsCurves(_unit_rows(z), 0.1, 1000.0, nodes=65)
        correct = scores.top_label(z) == y
        weight = np.ones(len(z)) if w is None else w

        def best(grid: Floats) -> int:
            return int(np.argmin([top_one_ece(curves(t), correct, weight, self.bins) for t in grid]))

        coarse = np.geomspace(0.1, 1000.0, self.points)
        at = best(coarse)
        fine = np.geomspace(coarse[max(at - 1, 0)], coarse[min(at + 1, self.points - 1)], self.points)
        self.scale_ = float(fine[best(fine)])

    def _apply(self, z: Array, aux: Mapping[str, Any]) -> Array:
        return scores.softmax(z, self.scale_ / _norms(z))

    def _score(self, given: Given) -> Array:
        return scores.log_odds(_unit_rows(given.logits), None, self.scale_)


def _norms(z: Array) -> Floats:
    """(N,) ‖z‖₂, 1 for a row of zeros or with an infinite logit."""
    out = np.empty(len(z))
    for rows in arrays.row_blocks(*z.shape):
        out[rows] = np.linalg.norm(z[rows].astype(np.float64), axis=1)
    out[(out == 0) | ~np.isfinite(out)] = 1.0
    return out


def _unit_rows(z: Array) -> Floats:
    return np.asarray(z / _norms(z)[:, None])
