"""Rows of the data: how long they are, and the exit that each leaves from at each operating point."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from offramp.runtime.arrays import Ints
from offramp.runtime.cascade import Cascade
from offramp.runtime.inputs import check_inputs
from offramp.runtime.jobs.benching.rows import pick
from offramp.server.operating_points import OperatingPoints

MOST_ROWS = 1024
"""The p99 of so many rows' lengths and exits is known well enough; to run them takes seconds."""


class Bank:
    """sizes: (N,) of the symbolic axes, the batch apart. exits: by point, (N,). of: rows in the data."""

    def __init__(self, cascade: Cascade, data: str | Path, points: Sequence[str], *, seed: int = 0) -> None:
        picked = pick(cascade.bundle, data, most=MOST_ROWS, seed=seed)
        manifest, last = cascade.manifest, len(cascade.exits) - 1
        checked = [check_inputs(pool.inputs, manifest) for pool in picked.pools]
        axes = manifest.axes[1:]
        self.sizes = [
            tuple(sizes[axis] for axis in axes)
            for (_, sizes), pool in zip(checked, picked.pools, strict=True)
            for _ in range(pool.rows)
        ]
        self.of = picked.of
        offered = OperatingPoints(cascade)
        self.exits: dict[str, Ints] = {}
        for name in points:
            if offered.points[name].exits == (last,):
                self.exits[name] = np.full(len(self.sizes), last)
            else:
                at = offered.cascade(name, last)
                self.exits[name] = np.concatenate([at.predict(arrays).exit for arrays, _ in checked])

    def __len__(self) -> int:
        return len(self.sizes)
