"""The exit gate in numpy: what every kernel must agree with. Written for clarity, computed in float64."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

_LARGEST = float(np.finfo(np.float32).max)


class GateOutput(NamedTuple):
    """What a gate leaves behind for n rows, each array (n,).

    label: int64, the lowest index among the top. confidence: float64 probability of the label.
    score: float32 log-odds of that confidence, within ±float32's largest. entropy: float64 >= 0, in nats.
    margin: float64, the top probability less the next (1 for a sole class). leave: bool, score >= threshold.
    A row with a NaN has NaN everywhere, the label -1 and doesn't leave.
    """

    label: NDArray[np.int64]
    confidence: NDArray[np.float64]
    score: NDArray[np.float32]
    entropy: NDArray[np.float64]
    margin: NDArray[np.float64]
    leave: NDArray[np.bool_]


def exit_gate(
    logits: ArrayLike,
    scale: ArrayLike = 1.0,
    bias: ArrayLike = 0.0,
    inv_temperature: ArrayLike = 1.0,
    threshold: float = -np.inf,
) -> GateOutput:
    """The fused gate: z' = scale * z + bias, its label y, and everything else of t * z', t = inv_temperature[y].

    logits: (n, C), C >= 1, any float type. scale, bias, inv_temperature: scalars or (C,), the last > 0.
    ±inf logits are taken as ±float32's largest, so classes tied at +inf share the probability.
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
    return GateOutput(
        label=np.where(unknown, -1, label),
        leave=values["score"].astype(np.float32).astype(np.float64) >= threshold,
        confidence=values["confidence"],
        score=values["score"].astype(np.float32),
        entropy=values["entropy"],
        margin=values["margin"],
    )
