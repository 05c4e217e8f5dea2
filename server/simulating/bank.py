"""Rows of the data, prepared, with the exit that each leaves from at each operating point."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.arrays import Ints
from offramp.runtime.cascade import Cascade
from offramp.runtime.inputs import check_inputs
from offramp.runtime.jobs.benching.rows import pick
from offramp.server.operating_points import OperatingPoints
from offramp.server.query import Group, Query

MOST_ROWS = 1024
"""The p99 of so many rows' lengths and exits is known well enough; to run them takes seconds."""


class Bank:
    """exits: by point, (N,) the exit that each row leaves from. of: rows in the data."""

    def __init__(self, cascade: Cascade, data: str | Path, points: Sequence[str], *, seed: int = 0) -> None:
        picked = pick(cascade.bundle, data, most=MOST_ROWS, seed=seed)
        manifest, last = cascade.manifest, len(cascade.exits) - 1
        self._manifest, self._last = manifest, last
        checked = [check_inputs(pool.inputs, manifest) for pool in picked.pools]
        self._arrays = [arrays for arrays, _ in checked]
        self.sizes = [{axis: size for axis, size in sizes.items() if axis != "batch"} for _, sizes in checked]
        self.pool = np.repeat(np.arange(len(picked.pools)), [pool.rows for pool in picked.pools])
        self._at = np.concatenate([np.arange(pool.rows) for pool in picked.pools])
        self.of = picked.of
        offered = OperatingPoints(cascade)
        self.exits: dict[str, Ints] = {}
        for name in points:
            if offered.points[name].exits == (last,):
                self.exits[name] = np.full(len(self.pool), last)
            else:
                at = offered.cascade(name, last)
                self.exits[name] = np.concatenate([at.predict(arrays).exit for arrays in self._arrays])

    def __len__(self) -> int:
        return len(self.pool)

    def query(self, rows: NDArray[np.int64], point: str) -> Query:
        """A request for these rows, as a protocol would have made it."""
        groups = []
        for pool in np.unique(self.pool[rows]).tolist():
            positions = np.flatnonzero(self.pool[rows] == pool)
            at = self._at[rows[positions]]
            arrays = {
                given.name: np.ascontiguousarray(np.take(self._arrays[pool][given.name], at, axis=given.batch_axis))
                for given in self._manifest.inputs
            }
            groups.append(Group(arrays, {**self.sizes[pool], "batch": len(at)}, positions))
        return Query(tuple(groups), len(rows), point, self._last)
