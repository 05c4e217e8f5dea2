"""What the points answer on the rows that are timed: speed is worth nothing without it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from offramp.runtime.arrays import Ints
from offramp.runtime.cascade import Cascade
from offramp.runtime.inputs import rows_of
from offramp.runtime.jobs.benching.rows import Picked
from offramp.runtime.jobs.data.expected import Line, share
from offramp.runtime.points import OperatingPoint
from offramp.runtime.simulate import Simulation, simulate


@dataclass
class _Count:
    exits: Ints
    known: int = 0
    right: int = 0
    answered: int = 0
    spent: int = 0
    whole: int = 0


def answers(
    cascade: Cascade,
    points: Mapping[str, OperatingPoint],
    picked: Picked,
    *,
    allow_nonfinite: bool = False,
    progress: Callable[[], None] | None = None,
) -> list[Line]:
    """A line a point: {"point", "accuracy", "labelled", "flops_fraction", "coverage", "exit_0_share", …}, accuracy with
    its 95% interval, None without labels. The rows are run once through all exits."""
    manifest, exits = cascade.manifest, len(cascade.manifest.exits)
    counts = {name: _Count(np.zeros(exits, np.int64)) for name in points}
    layers = tuple(map(len, manifest.routing_seen)) if manifest.routing else None
    for pool in picked.pools:
        for start in range(0, pool.rows, cascade.batch_rows):
            stop = min(start + cascade.batch_rows, pool.rows)
            part = rows_of(pool.inputs, manifest, start, stop)
            records = cascade.record(part, allow_nonfinite=allow_nonfinite)
            labels = None if pool.labels is None else pool.labels[start:stop]
            for name, point in points.items():
                found = simulate(records, point, routing_layers=layers)
                _add(counts[name], found, labels, int(records.flops[-1].sum()))
            if progress is not None:
                progress()
    return [_line(name, one, len(picked)) for name, one in counts.items()]


def _add(count: _Count, found: Simulation, labels: Ints | None, whole: int) -> None:
    count.exits += np.bincount(found.exit, minlength=len(count.exits))
    count.answered += int((~found.abstain).sum())
    count.spent += int(found.flops.sum())
    count.whole += whole
    if labels is not None:
        count.known += int((labels >= 0).sum())
        count.right += int((found.label == labels)[labels >= 0].sum())


def _line(name: str, count: _Count, rows: int) -> Line:
    low, high = (share(count.right, count.known) if count.known else None) or (None, None)
    return {
        "point": name,
        "accuracy": count.right / count.known if count.known else None,
        "accuracy_low": low,
        "accuracy_high": high,
        "labelled": count.known,
        "flops_fraction": count.spent / count.whole if count.whole else None,
        "coverage": count.answered / rows,
        **{f"exit_{j}_share": n / rows for j, n in enumerate(count.exits.tolist())},
    }
