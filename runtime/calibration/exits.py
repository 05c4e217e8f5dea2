"""Calibrators for a cascade's exits, each fitted on the rows that it will see."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.calibration.protocol import Calibrator
from offramp.runtime.calibration.registry import get
from offramp.runtime.errors import InputError


def fit_exits(
    name: str,
    logits: Sequence[ArrayLike],
    labels: ArrayLike,
    left: ArrayLike,
    *,
    aux: Sequence[Mapping[str, Any]] | None = None,
    weights: ArrayLike | None = None,
    least: int = 200,
    **options: Any,
) -> tuple[Calibrator, ...]:
    """One calibrator of that name an exit, on the labelled rows that *reach* it.

    logits: (N, C) an exit. labels: (N,). left: (N,) the exit each row leaves at under the operating point, as
    `simulate` says; a row reaches every exit up to that one. aux: {"routing": (L_j, N)} an exit. An exit with fewer
    than `least` such rows keeps the identity. Fitted on all rows instead, a calibrator makes the served ones worse:
    those that reach a deep exit are the hard ones.
    """
    y = arrays.labels(labels)
    exits = len(logits)
    at = arrays.labels(left, len(y), exits, "left")
    w = arrays.weights(weights, len(y))
    if aux is not None and len(aux) != exits:
        raise InputError(f"aux: expected one mapping an exit, {exits} of them, got {len(aux)}.")
    fitted = []
    for j, one in enumerate(logits):
        rows = np.flatnonzero((at >= j) & (y >= 0))
        z = arrays.matrix(np.asarray(one))
        if len(rows) < least:
            fitted.append(get("identity"))
            continue
        extra = {} if aux is None else {key: np.asarray(value)[..., rows] for key, value in aux[j].items()}
        fitted.append(get(name, **options).fit(z[rows], y[rows], aux=extra, weights=None if w is None else w[rows]))
    return tuple(fitted)
