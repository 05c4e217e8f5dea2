"""The exit gate and compaction in numpy: what every kernel must agree with. Written for clarity, in float64."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

_LARGEST = float(np.finfo(np.float32).max)


class GateOutput(NamedTuple):
    """What a gate leaves behind for n rows, each array (n,): numpy arrays, or tensors where the logits were.

    label: int64, the lowest index among the top. confidence: float64 probability of the label.
    score: float32 log-odds of that probability, within ±float32's largest. entropy: float64 >= 0, in nats.
    margin: float64, the top probability less the next (1 for a sole class). leave: bool, score >= threshold.
    A row with a NaN has NaN everywhere, the label -1 and doesn't leave.
    """

    label: Any
    confidence: Any
    score: Any
    entropy: Any
    margin: Any
    leave: Any


class Survivors(NamedTuple):
    """Who goes on. index: int32 (n,), of which the first `count` are the rows that stay, in order. count: (1,)."""

    index: Any
    count: Any


def exit_gate(
    logits: ArrayLike,
    scale: ArrayLike = 1.0,
    bias: ArrayLike = 0.0,
    inv_temperature: ArrayLike = 1.0,
    threshold: float = -np.inf,
    *,
    live: ArrayLike | None = None,
) -> GateOutput:
    """The fused gate: z' = scale * z + bias, its label y, and everything else of t * z', t = inv_temperature[y].

    logits: (n, C), C >= 1, any float type. scale, bias, inv_temperature: scalars or (C,), the last > 0.
    live: (n,) bool, rows that aren't never leave. ±inf logits are taken as ±float32's largest, so classes
    tied at +inf share the probability.
    """
    z = np.asarray(logits).astype(np.float64) * np.asarray(scale, np.float64) + np.asarray(bias, np.float64)
    unknown = np.isnan(z).any(axis=1)
    z = np.clip(np.where(np.isnan(z), -np.inf, z), -_LARGEST, _LARGEST)
    rows, classes = np.arange(len(z)), z.shape[1]
    label = z.argmax(axis=1)
    temperature = np.broadcast_to(np.asarray(inv_temperature, np.float64), (classes,))[label]
    lead = (z - z[rows, label][:, None]) * temperature[:, None]  # <= 0, the label's own is 0
    odds = np.exp(lead)
    total = odds.sum(axis=1)
    rest = lead.copy()
    rest[rows, label] = -np.inf
    runner_up = rest.max(axis=1, initial=-_LARGEST)
    with np.errstate(divide="ignore"):
        crowd = np.log(np.exp(rest - runner_up[:, None]).sum(axis=1))
    score = np.clip(-(runner_up + crowd), -_LARGEST, _LARGEST)
    # 0 * -inf is 0 here: a class that can't be has no uncertainty.
    weighted = np.where(odds > 0, odds * lead, 0.0).sum(axis=1)
    values: dict[str, NDArray[Any]] = {
        "confidence": 1 / total,
        "score": score,
        "entropy": np.log(total) - weighted / total,
        "margin": (1 - np.exp(runner_up)) / total,
    }
    for name, array in values.items():
        values[name] = np.where(unknown, np.nan, array)
    leave = values["score"].astype(np.float32).astype(np.float64) >= threshold
    return GateOutput(
        label=np.where(unknown, -1, label),
        leave=leave if live is None else leave & np.asarray(live, np.bool_),
        confidence=values["confidence"],
        score=values["score"].astype(np.float32),
        entropy=values["entropy"],
        margin=values["margin"],
    )


def rounded_up(threshold: float) -> float:
    """The least float32 that isn't below: a float32 score reaches the one exactly if it reaches the other."""
    with np.errstate(over="ignore"):
        near = np.float32(threshold)
        # Compared as float64: numpy would first round a Python number to the float32 beside it.
        return float(near if float(near) >= threshold else np.nextafter(near, np.float32(np.inf)))


def compact(leave: ArrayLike, live: ArrayLike | None = None) -> Survivors:
    """The rows that don't leave (and are live), in their order."""
    stays = ~np.asarray(leave, np.bool_)
    if live is not None:
        stays &= np.asarray(live, np.bool_)
    kept = np.flatnonzero(stays).astype(np.int32)
    return Survivors(
        np.concatenate([kept, np.zeros(len(stays) - len(kept), np.int32)]), np.array([len(kept)], np.int32)
    )


def gather(
    sources: list[NDArray[Any]], index: ArrayLike, axes: list[int], rows: int | None = None
) -> list[NDArray[Any]]:
    """Rows `index` of every array along its batch axis; beyond the index, up to `rows`, its last row again."""
    picked = np.asarray(index, np.int64)
    at = np.minimum(np.arange(len(picked) if rows is None else rows), len(picked) - 1)
    return [np.take(array, picked[at], axis=axis) for array, axis in zip(sources, axes, strict=True)]
