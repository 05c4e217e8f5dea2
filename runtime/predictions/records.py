"""What a cascade records: every exit's outputs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Records:
    """Every exit's outputs for N rows: what calibration works on.

    logits: (J, N, C), one array or one (N, C) an exit.
    score: float32 (J, N) and label: int64 (J, N), as the cascade's gates saw them.
    flops: int64 (J, N), cumulative: what a row costs that leaves at exit j.
    features: one array an exit (N, …), or None. external, reservation: (J, N), or None.
    routing: (L, N), or None. routing_seen: for each exit, the rows of it that are of layers the exit has seen.
    truth: int64 (N,) true labels, -1 where unknown, or None.
    """

    logits: NDArray[Any] | tuple[NDArray[Any], ...]
    score: NDArray[np.float32]
    label: NDArray[np.int64]
    flops: NDArray[np.int64]
    features: tuple[NDArray[Any], ...] | None = None
    routing: NDArray[Any] | None = None
    external: NDArray[Any] | None = None
    reservation: NDArray[Any] | None = None
    truth: NDArray[np.int64] | None = None
    routing_seen: tuple[tuple[int, ...], ...] | None = None

    def __len__(self) -> int:
        return int(self.score.shape[1])
