"""The audit job: does a model's routing say more about its errors than its confidence does?"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime.bundle import Manifest
from offramp.runtime.errors import InputError
from offramp.runtime.metrics.audit import Audit, audit
from offramp.runtime.records import Index, read_index, read_records


def audit_records(
    folder: str | Path,
    *,
    manifest: Manifest | None = None,
    rows: ArrayLike | None = None,
    permutations: int = 5000,
    replicates: int = 5000,
    seeds: int = 5,
    seed: int = 42,
) -> Audit:
    """Audit every exit that has seen routing, on recorded data (methods.md section 7).

    manifest: of the bundle that was recorded, if the records are too old to say which routing layers each
        exit has seen. rows: numbers of the rows to look at, all by default, so that a job that reports on
        test rows can keep them out. The rest as in `metrics.audit.audit`; rows without a label are left out.
    Time grows with the square of the rows: half a minute for 10,000 rows at three exits.
    Raises InputError if the records have no routing outputs, or no labels.
    """
    index = read_index(folder)
    if not index.routing:
        raise InputError(
            f"{folder}: these records have no routing outputs, so there is nothing to audit. "
            "The audit is for models whose export names routing entropies (Attention Residuals)."
        )
    if not index.labelled:
        raise InputError(
            f"{folder}: these records have no labels, and the audit is about errors. Record labelled data."
        )
    seen = routing_seen(index, manifest, folder)
    numbers = [j for j, layers in enumerate(seen) if layers]
    records = read_records(folder)
    assert records.routing is not None
    assert records.labels is not None
    chosen = np.arange(index.rows) if rows is None else np.asarray(rows)
    routing = np.asarray(records.routing[:, chosen])
    return audit(
        [np.asarray(records.logits[j][chosen]) for j in numbers],
        records.labels[chosen],
        [routing[seen[j]] for j in numbers],
        numbers=numbers,
        permutations=permutations,
        replicates=replicates,
        seeds=seeds,
        seed=seed,
    )


def routing_seen(index: Index, manifest: Manifest | None, where: str | Path) -> Sequence[Sequence[int]]:
    """For each exit, the rows of the recorded routing that are of layers it has seen."""
    seen = index.routing_seen
    if seen is None:
        if manifest is None or manifest.digest != index.manifest:
            raise InputError(f"{where}: records.json doesn't say which exit has seen which routing. Record again.")
        seen = [[manifest.routing.index(name) for name in e.routing] for e in manifest.exits]
    if len(seen) != index.exits or any(not 0 <= k < index.routing for layers in seen for k in layers):
        raise InputError(f"{where}: routing_seen in records.json doesn't fit its {index.routing} layers. Record again.")
    return seen
