"""Class-wise miscalibration temperature scaling: hotter where a class is over-confident, cooler where under."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
from offramp.runtime import arrays, scores
from offramp.runtime.arrays import Array, Floats, Ints
from offramp.runtime.calibration.protocol import Calibrator, Given
from offramp.runtime.calibration.registry import register
from offramp.runtime.calibration.solvers.curves import OddsCurves
from offramp.runtime.calibration.solvers.double import in_double
from offramp.runtime.calibration.temperature import (
    ece_temperature,
    fit_inverse_temperature,
    standard_errors,
    top_one_ece,
)
from offramp.runtime.errors import InputError
from offramp.runtime.metrics.bins import check_bins

GAMMAS = np.arange(-999, 1000) / 1000
# The options without which nothing holds the fit back; T_k stays positive.
UNGUARDED: dict[str, Any] = {"shrinkage": 0.0, "folds": 1, "floor": 0.01, "sure": 0.0}


@register
class CwMCS(Calibrator):
    """T_k = T·(1 + γ·cwMCS_k), cwMCS eq. 5–10.

    mode: "predicted" divides a row by T of its top class, which can't move the argmax; "class" divides every
    logit by its own T_k, as published, which can. by: cwMCS_k over the rows predicted as k, or truly of
    class k (as published: not zero for a calibrated model). base: T by "nll", or by "ece" on 0.5…2 as in the
    authors' code. objective: γ on (−1, 1) step 0.001 (0.025 for "nll" with folds) by "nll" or "ece".
    normalize: "max" divides by the largest cwMCS_k (by the largest magnitude when that isn't positive, which
    would flip every sign), "minmax" maps to [0, 1], "none". clip_outliers: clip to Tukey's fences first, as the
    authors do.

    Against overfitting: shrinkage κ takes n_k/(n_k + κ) of each cwMCS_k before it is normalised; with folds > 1 γ is
    judged on rows whose cwMCS_k were measured without them, and the γ nearest 0 is taken whose loss there can't be
    told from the lowest (one standard error, "nll" only), 0 with fewer than two rows a fold; γ is kept where every
    1 + γ·cwMCS_k ≥ floor; T is 1 unless ln T is `sure` standard errors from 0 (base "nll"): with 500 rows of an exit
    that needed none, T alone cost up to .004 of test NLL. Without the first three the test NLL was above no
    calibration's at 6 of 6 exits of CLINC150 (+.003 to +.009 with 3,000 rows to fit, mean of five resplits).

    The published form: CwMCS(mode="class", by="true", objective="ece", clip_outliers=True, **UNGUARDED).
    A class absent from the fit keeps cwMCS_k = 0. scores_: (C,) normalised cwMCS; temperatures_: (C,) T_k > 0.
    """

    name = "cwmcs"
    preserves_argmax = True
    temperature_: float
    gamma_: float
    scores_: Floats
    temperatures_: Floats

    def __init__(
        self,
        mode: Literal["predicted", "class"] = "predicted",
        by: Literal["predicted", "true"] = "predicted",
        base: Literal["nll", "ece"] = "nll",
        objective: Literal["nll", "ece"] = "nll",
        normalize: Literal["max", "minmax", "none"] = "max",
        clip_outliers: bool = False,
        bins: int = 15,
        shrinkage: float = 30.0,
        folds: int = 5,
        floor: float = 0.25,
        sure: float = 3.0,
    ) -> None:
        for name, value, allowed in (
            ("mode", mode, ("predicted", "class")),
            ("by", by, ("predicted", "true")),
            ("base", base, ("nll", "ece")),
            ("objective", objective, ("nll", "ece")),
            ("normalize", normalize, ("max", "minmax", "none")),
        ):
            if value not in allowed:
                raise InputError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}.")
        self.mode, self.by, self.base, self.objective, self.normalize = mode, by, base, objective, normalize
        self.clip_outliers, self.bins = bool(clip_outliers), check_bins(bins)
        if not shrinkage >= 0 or not folds >= 1 or not 0 < floor < 1 or not sure >= 0:
            raise InputError("cwmcs: expected shrinkage and sure of at least 0, folds of at least 1, floor in (0, 1).")
        self.shrinkage, self.folds, self.floor = float(shrinkage), int(folds), float(floor)
        self.sure = float(sure)
        self.preserves_argmax = mode == "predicted"

    def options(self) -> dict[str, Any]:
        names = ("mode", "by", "base", "objective", "normalize", "clip_outliers", "bins")
        guards = ("shrinkage", "folds", "floor", "sure")
        return {name: getattr(self, name) for name in (*names, *guards)}

    # ------------------------------------------------------------ fit

    def _fit(self, z: Array, y: Ints, aux: Mapping[str, Any], w: Floats | None) -> None:
        if self.base == "ece":
            self.temperature_ = ece_temperature(z, y, w, self.bins)
        else:
            beta, found = fit_inverse_temperature(z, y, w)
            if found and self.sure > 0 and standard_errors(z, y, w, beta) < self.sure:
                beta = 1.0
            self.temperature_ = 1.0 / beta
        weight = np.ones(len(z)) if w is None else w
        top = scores.top_label(z)
        odds = in_double(partial(scores.log_odds, inv_temperature=1.0 / self.temperature_), z)
        self.scores_ = self._scores(odds, y, top, weight, z.shape[1])
        self.gamma_ = self._gamma(z, y, top, weight, odds)
        self.temperatures_ = self.temperature_ * (1.0 + self.gamma_ * self.scores_)

    def _scores(self, odds: Floats, y: Ints, top: Ints, w: Floats, classes: int) -> Floats:
        """(C,) normalised cwMCS of rows with these log-odds at the common temperature."""
        k = y if self.by == "true" else top
        mass = arrays.group_sums(k, w, classes)
        sums = arrays.group_sums(k, w * (scores.sigmoid(odds) - (top == y)), classes)
        raw = np.divide(sums, mass + self.shrinkage, out=np.zeros_like(sums), where=mass > 0)
        return normalised(raw, mass > 0, self.normalize, self.clip_outliers)

    def _gamma(self, z: Array, y: Ints, top: Ints, w: Floats, odds: Floats) -> float:
        rows, classes = z.shape
        if self.folds == 1:
            parts = [(np.arange(rows), self.scores_)]
        elif rows < 2 * self.folds:
            return 0.0
        else:
            fold = np.random.default_rng(0).permutation(rows) % self.folds
            parts = []
            for k in range(self.folds):
                rest = fold != k
                parts.append((np.flatnonzero(~rest), self._scores(odds[rest], y[rest], top[rest], w[rest], classes)))
        ends = [end for own in (self.scores_, *(own for _, own in parts)) for end in (own.min(), own.max())]
        smooth = self.folds > 1 and self.objective == "nll"
        grid = GAMMAS[24::25] if smooth else GAMMAS  # finer steps than 0.025 are far within its error
        gammas = grid[(1.0 + np.outer(grid, ends) >= self.floor).all(axis=1)]
        search = self._predicted_losses if self.mode == "predicted" else self._class_losses
        losses = np.zeros(len(gammas))
        for at, own in parts:
            losses += search(z[at], y[at], top[at], w[at], gammas, own)
        best = int(np.nanargmin(losses))
        within = losses[best]
        if smooth:
            moved = [
                self._nll(z[at], y[at], w[at], gammas[best] * own) - self._nll(z[at], y[at], w[at], 0 * own)
                for at, own in parts
            ]
            within += float(np.concatenate(moved).std() * np.sqrt(rows))
        # Among equals the smallest change.
        equal = np.flatnonzero(losses <= within)
        return float(gammas[equal[np.abs(gammas[equal]).argmin()]])

    def _nll(self, z: Array, y: Ints, w: Floats, change: Floats) -> Floats:
        """(N,) weighted NLL with class temperatures T·(1 + change), an impossible label costing nothing."""
        beta = 1.0 / (self.temperature_ * (1.0 + change))
        out = np.empty(len(z))
        for rows in arrays.row_blocks(*z.shape):
            block = z[rows].astype(np.float64)
            n = np.arange(len(block))
            label = block.argmax(axis=1)
            block = block * (beta[label][:, None] if self.mode == "predicted" else beta)
            gaps = scores.differences(block, block.argmax(axis=1))
            own = gaps[n, y[rows]]
            out[rows] = np.where(np.isfinite(own), np.log(np.exp(gaps).sum(axis=1)) - own, 0.0)
        return w * out

    def _predicted_losses(self, z: Array, y: Ints, top: Ints, w: Floats, gammas: Floats, of_class: Floats) -> Floats:
        """(G,) what each γ costs these rows, summed."""
        own = of_class[top]
        factors = 1.0 + np.outer([gammas[0], gammas[-1]], own)
        low, high = 1 / factors.max() / self.temperature_, 1 / factors.min() / self.temperature_
        curves = OddsCurves(z, low, high, nodes=33)
        rows = np.arange(len(z))
        with np.errstate(invalid="ignore"):
            behind = z[rows, top].astype(np.float64) - z[rows, y].astype(np.float64)
        behind[top == y] = 0.0
        # A label at −inf is impossible at every γ.
        w = np.where(np.isfinite(behind), w, 0.0) if np.isfinite(behind).any() else w
        behind = np.where(np.isfinite(behind), behind, 0.0)
        correct = top == y

        def loss(gamma: float) -> float:
            beta = 1.0 / (self.temperature_ * (1.0 + gamma * own))
            odds = curves(beta)
            if self.objective == "ece":
                return top_one_ece(odds, correct, w, self.bins) * float(w.sum())
            return float(w @ (beta * behind + np.logaddexp(0.0, -odds)))

        if self.objective == "ece" or self.folds > 1:  # jumps about, or is on a coarse grid: every γ is looked at
            return np.array([loss(float(gamma)) for gamma in gammas])
        # The NLL is smooth in γ: every 25th, then all between the neighbours of the best two.
        losses = np.full(len(gammas), np.inf)
        coarse = np.unique(np.append(np.arange(0, len(gammas), 25), len(gammas) - 1))
        losses[coarse] = [loss(float(gamma)) for gamma in gammas[coarse]]
        for k in coarse[np.argsort(losses[coarse], kind="stable")[:2]]:
            for i in range(max(k - 25, 0), min(k + 26, len(gammas))):
                if np.isinf(losses[i]):
                    losses[i] = loss(float(gammas[i]))
        return losses

    def _class_losses(self, z: Array, y: Ints, top: Ints, w: Floats, gammas: Floats, of_class: Floats) -> Floats:
        betas = 1.0 / (self.temperature_ * (1.0 + gammas[:, None] * of_class))

        def work(rows: slice) -> Floats:
            """(G, …) what each γ adds: NLL, or residuals by bin."""
            block, truth, weight = z[rows].astype(np.float64), y[rows], w[rows]
            n = np.arange(len(block))
            out = np.empty((len(betas), self.bins if self.objective == "ece" else 1))
            for g, beta in enumerate(betas):
                scaled = block * beta
                label = scaled.argmax(axis=1)
                gaps = scores.differences(scaled, label)
                total = np.exp(gaps).sum(axis=1)
                if self.objective == "nll":
                    out[g] = weight @ (np.log(total) - np.maximum(gaps[n, truth], -1e30))
                else:
                    confidence = 1.0 / total
                    number = np.minimum((np.ceil(confidence * self.bins) - 1).astype(np.int64), self.bins - 1)
                    out[g] = arrays.group_sums(number, weight * (confidence - (label == truth)), self.bins)
            return out

        return np.asarray(np.abs(sum(arrays.for_each_block(work, *z.shape))).sum(axis=1))

    # ------------------------------------------------------------ use

    def _apply(self, z: Array, aux: Mapping[str, Any]) -> Array:
        if self.mode == "predicted":
            return scores.softmax(z, 1.0 / self.temperatures_[scores.top_label(z)])
        out = np.empty(z.shape, scores.softmax(z[:0]).dtype)
        for rows in arrays.row_blocks(*z.shape):
            out[rows] = scores.softmax(z[rows] / self.temperatures_)
        return out

    def _score(self, given: Given) -> Array:
        z = given.logits
        if self.mode == "predicted":
            return scores.log_odds(z.astype(np.float64, copy=False), None, 1.0 / self.temperatures_)
        out = np.empty(len(z))
        for rows in arrays.row_blocks(*z.shape):
            out[rows] = scores.log_odds(z[rows] / self.temperatures_)
        return out

    def graph_inputs(self, classes: int) -> dict[str, Floats]:
        one, inverse = np.ones(classes), 1.0 / self.temperatures_
        if self.mode == "predicted":
            return {"scale": one, "bias": np.zeros(classes), "inv_temperature": inverse}
        return {"scale": inverse, "bias": np.zeros(classes), "inv_temperature": one}


def normalised(raw: Floats, present: Array, how: str, clip_outliers: bool) -> Floats:
    """cwMCS of the present classes clipped and normalised; absent ones 0."""
    out = np.zeros(len(raw))
    value = raw[present]
    if clip_outliers:
        low, high = np.quantile(value, [0.25, 0.75])
        value = np.clip(value, low - 1.5 * (high - low), high + 1.5 * (high - low))
    if how == "max":
        largest = value.max() if value.max() > 0 else np.abs(value).max()
        value = value / largest if largest > 0 else value
    elif how == "minmax":
        spread = value.max() - value.min()
        value = (value - value.min()) / spread if spread > 0 else np.zeros(len(value))
    out[present] = value
    return out
