"""A scale, and perhaps a bias, for each class: more freedom than one temperature, and the argmax may move."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from offramp.runtime import arrays, scores
from offramp.runtime.arrays import Array, Floats, Ints
from offramp.runtime.calibration.protocol import Calibrator, Given
from offramp.runtime.calibration.registry import register
from offramp.runtime.calibration.temperature import fit_inverse_temperature
from offramp.runtime.errors import InputError

# Stands for a logit of −inf in a fit: its probability is 0 all the same, and 0·this is 0.
FLOOR = -1e30


class _PerClass(Calibrator):
    """Base: softmax(scale ⊙ z + bias)."""

    scale_: Floats
    bias_: Floats

    def transform(self, z: Array) -> Floats:
        """(n, C) float64 scale ⊙ z + bias; a class at ±inf stays there."""
        with np.errstate(invalid="ignore"):
            moved = z * self.scale_ + self.bias_
        endless = np.isinf(z)
        if endless.any():
            moved[endless] = z[endless]
        return np.asarray(moved, np.float64)

    def _apply(self, z: Array, aux: Mapping[str, Any]) -> Array:
        out = np.empty(z.shape, scores.softmax(z[:0]).dtype)
        for rows in arrays.row_blocks(*z.shape):
            out[rows] = scores.softmax(self.transform(z[rows]))
        return out

    def _score(self, given: Given) -> Array:
        z = given.logits
        out = np.empty(len(z))
        for rows in arrays.row_blocks(*z.shape):
            out[rows] = scores.log_odds(self.transform(z[rows]))
        return out

    def graph_inputs(self, classes: int) -> dict[str, Floats]:
        return {"scale": self.scale_, "bias": self.bias_, "inv_temperature": np.ones(classes)}


def fit_per_class(
    z: Array, y: Ints, w: Floats | None, start: Floats, with_bias: bool, ridge: float, lowest: float | None
) -> tuple[Floats, Floats]:
    """(C,) scale and bias by NLL, L-BFGS; `ridge` pulls both towards `start` and 0, `lowest` bounds the scale.

    Scales are searched and pulled in units of the logits' spread: ten times the logits give a tenth of the scales.
    """
    from scipy.optimize import minimize

    classes = z.shape[1]
    weight = np.ones(len(z)) if w is None else w
    # Rows that are certain whatever the scales, or whose label is impossible, have nothing to say.
    telling = np.isfinite(z.max(axis=1)) & np.isfinite(z[np.arange(len(z)), y])
    weight = np.where(telling, weight, 0.0)
    if not weight.any():
        return start.copy(), np.zeros(classes)
    share = weight / weight.sum()
    unit = _spread(z, share)
    anchor = np.concatenate([start * unit, np.zeros(classes)])
    size = classes * (2 if with_bias else 1)

    def loss(theta: Floats) -> tuple[float, Floats]:
        scale = theta[:classes]
        bias = theta[classes:] if with_bias else np.zeros(classes)

        def work(rows: slice) -> tuple[float, Floats]:
            block = np.clip(z[rows].astype(np.float64) / unit, FLOOR, -FLOOR)
            moved = block * scale + bias
            moved -= moved.max(axis=1, keepdims=True)
            n = np.arange(len(block))
            own = moved[n, y[rows]]
            powers = np.exp(moved, out=moved)
            total = powers.sum(axis=1)
            s = share[rows]
            value = float(s @ (np.log(total) - own))
            powers *= (s / total)[:, None]
            powers[n, y[rows]] -= s
            gradient = np.einsum("ij,ij->j", powers, block)
            return value, np.concatenate([gradient, powers.sum(axis=0)])

        parts = arrays.for_each_block(work, *z.shape)
        away = theta - anchor[:size]
        value = sum(part[0] for part in parts) + ridge / 2 * float(away @ away)
        return value, np.sum([part[1] for part in parts], axis=0)[:size] + ridge * away

    bounds = [(None if lowest is None else lowest * unit, None)] * classes + [(None, None)] * (size - classes)
    found = minimize(
        loss, anchor[:size], jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 500, "ftol": 1e-13}
    ).x
    return found[:classes] / unit, found[classes:] if with_bias else np.zeros(classes)


def _spread(z: Array, share: Floats) -> float:
    """RMS distance of finite logits to their row's mean; 1 where there is none."""

    def work(rows: slice) -> float:
        block = z[rows].astype(np.float64)
        finite = np.isfinite(block)
        block = np.where(finite, block, 0.0)
        count = np.maximum(finite.sum(axis=1), 1)
        away = np.where(finite, block - (block.sum(axis=1) / count)[:, None], 0.0)
        return float(share[rows] @ (np.einsum("ij,ij->i", away, away) / count))

    return float(np.sqrt(sum(arrays.for_each_block(work, *z.shape)))) or 1.0


def _check_ridge(ridge: float, name: str) -> float:
    if not ridge >= 0:
        raise InputError(f"{name}: expected ridge ≥ 0, got {ridge!r}.")
    return float(ridge)


@register
class VectorScaling(_PerClass):
    """softmax(scale ⊙ z + bias), both (C,), by NLL. Guo et al. 2017. Can change the argmax.

    scale_, bias_: (C,). Adding a number to a row's logits isn't neutral here, as it is for one temperature.
    ridge: pull towards the NLL temperature and no bias, per unit of NLL and with scales in units of the logits'
    spread; it decides for classes never seen.
    """

    name = "vector"

    def __init__(self, ridge: float = 1e-6) -> None:
        self.ridge = _check_ridge(ridge, "vector")

    def options(self) -> dict[str, Any]:
        return {"ridge": self.ridge}

    def _fit(self, z: Array, y: Ints, aux: Mapping[str, Any], w: Floats | None) -> None:
        beta, _ = fit_inverse_temperature(z, y, w)
        self.scale_, self.bias_ = fit_per_class(z, y, w, np.full(z.shape[1], beta), True, self.ridge, None)


@register
class ClasswiseTemperature(_PerClass):
    """softmax(z_k/T_k), one temperature a class, by NLL from the common one. Can change the argmax.

    A class never seen as a label keeps nearly the common temperature. scale_: 1/T_k > 0, within a factor of
    100 below the common one.
    """

    name = "classwise_temperature"

    def __init__(self, ridge: float = 1e-6) -> None:
        self.ridge = _check_ridge(ridge, "classwise_temperature")

    def options(self) -> dict[str, Any]:
        return {"ridge": self.ridge}

    def _fit(self, z: Array, y: Ints, aux: Mapping[str, Any], w: Floats | None) -> None:
        beta, _ = fit_inverse_temperature(z, y, w)
        start = np.full(z.shape[1], beta)
        self.scale_, self.bias_ = fit_per_class(z, y, w, start, False, self.ridge, beta / 100)
