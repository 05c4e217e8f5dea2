"""Confidence scores: one number a row, higher = more confident.

Everything that is compared (exit, abstain, quantile, AURC) uses `log_odds`, the ranking form of the largest
softmax probability: a float32 softmax rounds up to 82% of rows to exactly 1 (FD-Shifts, Table 2), the
log-odds keep their order. All sums run in float64 over blocks of rows; a result comes back in the precision
of its input (never below float32), and rounding at the very end can't reverse two rows.

Ties and infinities: the label is the lowest index among the largest logits. Classes tied with the label
count as equal to it, also at +inf or when all are at −inf. A score is never ±inf: it saturates at the
largest float32. A row with a NaN scores NaN, and its label is that of the row with NaN read as −inf.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime.arrays import SCAN_VALUES, Array, Floats, Ints, for_each_block, matrix, numbers, row_blocks
from offramp.runtime.arrays import labels as check_labels
from offramp.runtime.errors import InputError

LARGEST = float(np.finfo(np.float32).max)
"""Where scores saturate: the largest float32, so that ±inf stay reserved for thresholds."""


# ---------------------------------------------------------------- labels and log-odds


def top_label(logits: ArrayLike) -> Ints:
    """(N, C) logits -> (N,) index of the largest, the lowest on a tie; NaN counts as −inf."""
    z = matrix(logits)
    label = np.empty(len(z), np.int64)

    def work(rows: slice) -> None:
        label[rows] = _argmax(z[rows])

    for_each_block(work, len(z), z.shape[1], SCAN_VALUES)
    return label


def _argmax(block: Array) -> Ints:
    label: Ints = block.argmax(axis=1)
    # argmax stops at the first NaN, so a row has one exactly where its own "largest" is NaN.
    bad = np.isnan(block[np.arange(len(block)), label])
    if bad.any():
        rows = block[bad]
        label[bad] = np.where(np.isnan(rows), -np.inf, rows).argmax(axis=1)
    return label


def log_odds(logits: ArrayLike, label: ArrayLike | None = None, inv_temperature: ArrayLike | None = None) -> Array:
    """Log-odds of the label's probability: s = −log Σ_{k≠ŷ} exp(t·(z_k − z_ŷ)).

    logits: (N, C). label: (N,) classes to score, default the top one. inv_temperature: t, one number, or (C,)
    of which row i uses the entry of its label; default 1.
    Returns (N,) within ±3.4e38 (float32's largest; that value itself for C = 1 or when every other class is
    at −inf). For the top label at t = 1 it is ≥ −log(C − 1). NaN where the row has one.
    Source: methods' `logodds`; the same masked form as in the exported graph, never log(Σexp − 1).
    """
    z = matrix(logits)
    chosen = None if label is None else _chosen_labels(label, z)
    t = _inverse_temperature(inv_temperature, z.shape[1])
    out = np.empty(len(z), _result_type(z))

    def work(rows: slice) -> None:
        block = z[rows]
        own = _argmax(block) if chosen is None else chosen[rows]
        out[rows] = -_log_rest(block, own, t, is_top=chosen is None)

    for_each_block(work, *z.shape)
    return out


def _log_rest(block: Array, label: Ints, t: Floats | None, is_top: bool) -> Floats:
    """log Σ_{k≠label} exp(t (z_k − z_label)) of a block, saturated at ±LARGEST."""
    rows = np.arange(len(block))
    gaps = differences(block, label)
    if t is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            gaps *= t[label][:, None] if t.ndim else t
    gaps[rows, label] = -np.inf
    if is_top:
        # Gaps are ≤ 0: the plain sum is exact enough unless it runs into the subnormals.
        with np.errstate(divide="ignore"):
            total = np.exp(gaps).sum(axis=1)
            rest = np.log(total)
        faint = np.flatnonzero(total < 1e-290)
    else:
        rest = np.empty(len(block))
        faint = rows
    if len(faint):
        largest = gaps[faint].max(axis=1)
        shift = np.where(np.isfinite(largest), largest, 0.0)
        with np.errstate(divide="ignore", over="ignore"):
            rest[faint] = shift + np.log(np.exp(gaps[faint] - shift[:, None]).sum(axis=1))
    rest[np.isnan(block[rows, label])] = np.nan  # a lone class that is NaN leaves no trace in the sum
    return cast(Floats, np.clip(rest, -LARGEST, LARGEST))


def differences(block: Array, label: Ints) -> Floats:
    """(n, C) float64 z_k − z_label, with classes equal to the label's logit (at ±inf too) at exactly 0."""
    own = block[np.arange(len(block)), label].astype(np.float64)
    with np.errstate(invalid="ignore"):
        gaps = np.subtract(block, own[:, None], dtype=np.float64)
    endless = np.flatnonzero(np.isinf(own))
    if len(endless):
        rows = gaps[endless]
        rows[block[endless] == own[endless, None]] = 0.0
        gaps[endless] = rows
    return gaps


def _chosen_labels(label: ArrayLike, z: Array) -> Ints:
    chosen = check_labels(label, len(z), z.shape[1], "label")
    if (chosen < 0).any():
        raise InputError("label: expected a class for every row, found −1.")
    return chosen


def _inverse_temperature(value: ArrayLike | None, classes: int) -> Floats | None:
    if value is None:
        return None
    t = numbers(value, "inv_temperature")
    if t.shape not in ((), (classes,)):
        raise InputError(f"inv_temperature: expected one number or {classes} of them, got shape {t.shape}.")
    if not (np.isfinite(t) & (t > 0)).all():
        raise InputError("inv_temperature: expected finite numbers above 0.")
    return t


def _result_type(z: Array) -> np.dtype[Any]:
    return np.result_type(z.dtype, np.float32) if z.dtype.itemsize <= 4 else np.dtype(np.float64)


# ---------------------------------------------------------------- probabilities


def sigmoid(log_odds: ArrayLike) -> Floats:
    """1 / (1 + exp(−s)) in float64, without overflow; NaN stays NaN."""
    s = numbers(log_odds, "log_odds")
    small = np.exp(-np.abs(s))
    return np.where(s >= 0, 1.0, small) / (1.0 + small)


def logit(probability: ArrayLike) -> Floats:
    """log(p / (1 − p)) in float64 for p in [0, 1], saturated at ±float32's largest."""
    p = numbers(probability, "probability")
    if ((p < 0) | (p > 1)).any():
        raise InputError("probability: expected numbers in [0, 1].")
    with np.errstate(divide="ignore"):
        return cast(Floats, np.clip(np.log(p) - np.log1p(-p), -LARGEST, LARGEST))


def softmax(logits: ArrayLike, inv_temperature: ArrayLike | None = None, *, out: Array | None = None) -> Array:
    """(N, C) logits -> (N, C) probabilities in the logits' precision (float32 at least), summed in float64.

    inv_temperature: one number, or (N,) one a row. Logits tied at +inf share the probability equally, a row
    all at −inf is uniform, a row with a NaN is NaN.
    """
    z = matrix(logits)
    t = None if inv_temperature is None else numbers(inv_temperature, "inv_temperature")
    if t is not None and t.shape not in ((), (len(z),)):
        raise InputError(f"inv_temperature: expected one number or {len(z)} of them, got shape {t.shape}.")
    result = np.empty(z.shape, _result_type(z)) if out is None else out

    def work(rows: slice) -> None:
        powers = differences(z[rows], _argmax(z[rows]))
        if t is not None:
            with np.errstate(invalid="ignore"):
                powers *= t[rows, None] if t.ndim else t
        np.exp(powers, out=powers)
        np.divide(powers, powers.sum(axis=1, keepdims=True), out=result[rows], casting="same_kind")

    for_each_block(work, *z.shape)
    return result


def log_softmax(logits: ArrayLike) -> Array:
    """(N, C) log-probabilities; −inf where the probability is exactly 0. Same rules as `softmax`."""
    z = matrix(logits)
    out = np.empty(z.shape, _result_type(z))

    def work(rows: slice) -> None:
        gaps = differences(z[rows], _argmax(z[rows]))
        np.subtract(gaps, np.log(np.exp(gaps).sum(axis=1, keepdims=True)), out=out[rows], casting="same_kind")

    for_each_block(work, *z.shape)
    return out


# ---------------------------------------------------------------- scores of one set of logits


def _row_by_row(logits: ArrayLike, formula: Callable[[Array, Ints], Floats]) -> Array:
    """`formula(block, top labels)` over blocks of rows; NaN where a row has one."""
    z = matrix(logits)
    out = np.empty(len(z), _result_type(z))

    def work(rows: slice) -> None:
        block = z[rows]
        label = block.argmax(axis=1)
        value = formula(block, label)
        out[rows] = np.where(np.isnan(block[np.arange(len(block)), label]), np.nan, np.clip(value, -LARGEST, LARGEST))

    with np.errstate(invalid="ignore"):
        for_each_block(work, *z.shape)
    return out


def msr(logits: ArrayLike) -> Array:
    """Maximum softmax response max_k p_k in [1/C, 1]: the confidence that is reported, not the one to rank by."""
    return _row_by_row(logits, lambda block, label: sigmoid(-_log_rest(block, label, None, is_top=True)))


def entropy(logits: ArrayLike) -> Array:
    """Negated predictive entropy Σ p ln p in [−ln C, 0].

    Every term below is ≥ 0, so nothing cancels and confident rows keep their order.
    """

    def formula(block: Array, label: Ints) -> Floats:
        gaps = differences(block, label)
        gaps[np.arange(len(block)), label] = -np.inf
        powers = np.exp(gaps)
        rest = powers.sum(axis=1)
        gaps[np.isneginf(gaps)] = 0.0  # 0·log 0 = 0
        spread = -np.einsum("ij,ij->i", powers, gaps)
        return cast(Floats, -(np.log1p(rest) + spread / (1.0 + rest)))

    return _row_by_row(logits, formula)


def max_logit(logits: ArrayLike) -> Array:
    """max_k z_k (MLS), saturated at ±float32's largest."""
    return _row_by_row(logits, lambda block, label: block[np.arange(len(block)), label].astype(np.float64))


def margin(logits: ArrayLike, form: Literal["probability", "logit"] = "probability") -> Array:
    """p_(1) − p_(2) in [0, 1], or z_(1) − z_(2) with form="logit". With one class: 1, or float32's largest."""
    if form not in ("probability", "logit"):
        raise InputError(f'form: expected "probability" or "logit", got {form!r}.')

    def formula(block: Array, label: Ints) -> Floats:
        gaps = differences(block, label)
        gaps[np.arange(len(block)), label] = -np.inf
        second = gaps.max(axis=1)
        if form == "logit":
            return cast(Floats, -second)
        return cast(Floats, -np.expm1(second) / (1.0 + np.exp(gaps).sum(axis=1)))

    return _row_by_row(logits, formula)


def energy(logits: ArrayLike) -> Array:
    """log Σ_k exp z_k, saturated at ±float32's largest."""

    def formula(block: Array, label: Ints) -> Floats:
        peak = block[np.arange(len(block)), label].astype(np.float64)
        return cast(Floats, peak + np.log(np.exp(differences(block, label)).sum(axis=1)))

    return _row_by_row(logits, formula)


def external(values: ArrayLike) -> Array:
    """A confidence that the model computes itself (ConfidNet, DeVries): (N,) or (N, 1), higher = more confident."""
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise InputError(f"external: expected one number a row, got shape {array.shape} of {array.dtype}.")
    kept = array.astype(_result_type(array) if array.dtype.kind == "f" else np.float64)
    clipped: Array = np.clip(kept, -LARGEST, LARGEST)
    return clipped


def reservation(logits: ArrayLike, extra: ArrayLike | None = None) -> Array:
    """−p_{C+1} in [−1, 0]: Deep Gamblers' probability of abstaining, negated.

    logits: (N, C), with the abstention class's logit (N,) in `extra`; or (N, C + 1) with that class last.
    """
    z = matrix(logits)
    if extra is not None:
        column = np.asarray(extra).reshape(-1, 1)
        if len(column) != len(z):
            raise InputError(f"extra: expected {len(z)} rows, got {len(column)}.")
        out = np.empty(len(z), _result_type(z))
        for rows in row_blocks(*z.shape):
            out[rows] = reservation(np.hstack([z[rows], column[rows]]))
        return out
    if z.shape[1] < 2:
        raise InputError("logits: expected at least one class beside the reservation.")
    last = np.full(len(z), z.shape[1] - 1)
    return (-sigmoid(log_odds(z, last))).astype(_result_type(z))


# ---------------------------------------------------------------- Monte-Carlo dropout


def _passes(logits: ArrayLike) -> Array:
    z = np.asarray(logits)
    if z.ndim != 3 or 0 in (z.shape[0], z.shape[2]):
        raise InputError(f"logits: expected (passes, rows, classes) with at least one pass, got shape {z.shape}.")
    return z


def _mean_probabilities(z: Array, rows: slice) -> Floats:
    total = np.zeros(z[0, rows].shape)
    for one in z:
        total += softmax(one[rows].astype(np.float64))
    return total / len(z)


def _mean_entropy(z: Array, rows: slice) -> Floats:
    return cast(Floats, np.mean([-entropy(one[rows].astype(np.float64)) for one in z], axis=0))


def _plain_entropy(p: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return cast(Floats, -np.where(p > 0, p * np.log(p), p).sum(axis=-1))


def _over_passes(logits: ArrayLike, formula: Callable[[Array, slice], Floats]) -> Floats:
    z = _passes(logits)
    out = np.empty(z.shape[1])
    for rows in row_blocks(*z.shape[1:]):
        out[rows] = formula(z, rows)
    return out


def mcd_msr(logits: ArrayLike) -> Floats:
    """max_k of the mean softmax over S passes. logits (S, N, C) -> (N,) in [1/C, 1]. FD-Shifts eq. 37."""
    return _over_passes(logits, lambda z, rows: cast(Floats, _mean_probabilities(z, rows).max(axis=1)))


def mcd_entropy(logits: ArrayLike) -> Floats:
    """Negated entropy of the mean softmax. logits (S, N, C) -> (N,) in [−ln C, 0]. FD-Shifts eq. 38."""
    return _over_passes(logits, lambda z, rows: -_plain_entropy(_mean_probabilities(z, rows)))


def mcd_expected_entropy(logits: ArrayLike) -> Floats:
    """Negated mean of the S entropies. logits (S, N, C) -> (N,) in [−ln C, 0]. FD-Shifts eq. 39."""
    return _over_passes(logits, lambda z, rows: -_mean_entropy(z, rows))


def mcd_mutual_information(logits: ArrayLike) -> Floats:
    """Negated mutual information, −(entropy of the mean − mean entropy) ≤ 0. logits (S, N, C). FD-Shifts eq. 40."""

    def formula(z: Array, rows: slice) -> Floats:
        # Never positive in exact arithmetic; rounding would show as a tiny surplus.
        return np.minimum(_mean_entropy(z, rows) - _plain_entropy(_mean_probabilities(z, rows)), 0.0)

    return _over_passes(logits, formula)


# ---------------------------------------------------------------- Mahalanobis


@dataclass
class Mahalanobis:
    """max_k −(f − μ_k)ᵀ Σ⁻¹ (f − μ_k) ≤ 0 on an exit's features, with one Σ for all classes.

    `shrinkage` mixes Σ with its own mean variance times the identity; by default only as much as a singular Σ
    needs. A class without a row in the fit has no mean and can't be nearest.
    """

    shrinkage: float | None = None
    means_: Floats | None = None
    whitening_: Floats | None = None

    def fit(self, features: ArrayLike, labels: ArrayLike) -> Self:
        """features (N, F), labels (N,); rows labelled −1 are left out."""
        f = matrix(features, "features").astype(np.float64)
        y = check_labels(labels, len(f))
        f, y = f[y >= 0], y[y >= 0]
        if not len(f):
            raise InputError("labels: expected at least one labelled row.")
        if not np.isfinite(f).all():
            raise InputError("features: expected finite numbers.")
        present = np.unique(y)
        means = np.stack([f[y == k].mean(axis=0) for k in present])
        centred = f - means[np.searchsorted(present, y)]
        covariance = centred.T @ centred / len(f)
        values, vectors = np.linalg.eigh(covariance)
        floor = max(float(values.mean()), np.finfo(np.float64).tiny)
        mix = self.shrinkage
        if mix is None:
            mix = 0.0 if values[0] > 1e-10 * floor else 1e-3
        values = (1 - mix) * np.maximum(values, 0.0) + mix * floor
        self.means_ = means
        self.whitening_ = vectors / np.sqrt(np.maximum(values, np.finfo(np.float64).tiny))
        return self

    def __call__(self, features: ArrayLike) -> Floats:
        """(N, F) features -> (N,) scores ≤ 0."""
        if self.means_ is None or self.whitening_ is None:
            raise InputError("mahalanobis: call fit(features, labels) first.")
        f = matrix(features, "features")
        if f.shape[1] != self.means_.shape[1]:
            raise InputError(f"features: expected {self.means_.shape[1]} columns, got {f.shape[1]}.")
        centres = self.means_ @ self.whitening_
        out = np.empty(len(f))
        for rows in row_blocks(len(f), max(f.shape[1], len(centres))):
            white = f[rows].astype(np.float64) @ self.whitening_
            # |w|² − 2w·m + |m|² loses digits near a centre; the direct form is only taken for the nearest.
            nearest = ((centres**2).sum(axis=1) - 2.0 * white @ centres.T).argmin(axis=1)
            out[rows] = -((white - centres[nearest]) ** 2).sum(axis=1)
        return cast(Floats, np.clip(out, -LARGEST, 0.0))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; `from_dict` gives back the same numbers to the last bit."""
        if self.means_ is None or self.whitening_ is None:
            raise InputError("mahalanobis: call fit(features, labels) first.")
        return {
            "name": "mahalanobis",
            "version": 1,
            "shrinkage": self.shrinkage,
            "means": self.means_.tolist(),
            "whitening": self.whitening_.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        if data.get("name") != "mahalanobis" or data.get("version") != 1:
            raise InputError('mahalanobis: expected {"name": "mahalanobis", "version": 1, …}.')
        return cls(data["shrinkage"], np.array(data["means"], float), np.array(data["whitening"], float))


# ---------------------------------------------------------------- by name


@dataclass(frozen=True)
class Score:
    """A score by name: the function, and which of a row's outputs it is called with, in order."""

    name: str
    function: Callable[..., Array]
    inputs: tuple[str, ...] = ("logits",)

    def __call__(self, given: Mapping[str, ArrayLike]) -> Array:
        """`given` holds at least `inputs`, e.g. {"logits": (N, C)}."""
        missing = [name for name in self.inputs if name not in given]
        if missing:
            raise InputError(f'score "{self.name}": needs {", ".join(missing)}, which this exit doesn\'t give.')
        return self.function(*(given[name] for name in self.inputs))


def _mahalanobis_unfitted(features: ArrayLike) -> Array:
    raise InputError('score "mahalanobis": fit scores.Mahalanobis() on a calibration set and register it first.')


_registry: dict[str, Score] = {}


def register(name: str, function: Callable[..., Array], inputs: tuple[str, ...] = ("logits",)) -> None:
    """Make `function(*[given[i] for i in inputs]) -> (N,)` available under a name; replaces one of that name."""
    _registry[name] = Score(name, function, tuple(inputs))


def names() -> tuple[str, ...]:
    """All registered names."""
    return tuple(_registry)


def get(name: str) -> Score:
    """The score of that name."""
    if name not in _registry:
        raise InputError(f"score: expected one of {', '.join(_registry)}, got {name!r}.")
    return _registry[name]


for _function in (msr, entropy, max_logit, margin, energy):
    register(_function.__name__, _function)
for _function in (mcd_msr, mcd_entropy, mcd_expected_entropy, mcd_mutual_information):
    register(_function.__name__, _function, ("passes",))
register("logodds", log_odds)
register("mahalanobis", _mahalanobis_unfitted, ("features",))
register("external", external, ("external",))
register("reservation", reservation, ("logits", "reservation"))
