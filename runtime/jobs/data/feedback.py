"""Labelled rows that were served and kept, as records: what an offline calibration is made from without a data set."""

from pathlib import Path

import numpy as np
from offramp.runtime.bundle import read_bundle
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.data.labelled_rows import FEWEST_ROWS
from offramp.runtime.jobs.data.opened import OpenedRecords
from offramp.runtime.online.fitting.recalibrator import evenly
from offramp.runtime.online.window import capped
from offramp.runtime.predictions import Records

MOST_ROWS = 50_000


def from_feedback(
    bundle: str | Path, store: str | Path, *, share: float = 1.0, rows: int = MOST_ROWS, seed: int = 0
) -> OpenedRecords:
    """An even sample of the traffic that a bundle served: kept rows with a label and all exits known.

    store: the path of a SQLite file, or postgresql://…. share: of the weight that one sender of labels may have, in all
    and of the rows answered with any one class (see `capped`). rows: the newest that are read. seed: of the sample.

    A row that left early is there only if it was drawn for a shadow run, and some labels may have been sought more
    often than others, so a row stands for 1/(shadow·asked) of those served. What calibration promises is tested by
    counting errors among rows that are alike (see `sgr`, `risk_bound`), which weights would break. So each row is kept
    with a probability in proportion to what it stands for: those that are kept are as good as drawn from the traffic,
    exactly, and there are fewer of them.

    logits are z − max z in float16. FLOPs are a row's at the bundle's typical sizes: kept rows don't say how large they
    were. Raises InputError where there are too few rows or they are another bundle's, StoreError, BundleError,
    RuntimeUnavailable without the extra `online`.
    """
    from offramp.runtime.online.store.kept import read_kept

    manifest = read_bundle(bundle).manifest
    exits = len(manifest.exits)
    kept = read_kept(
        store, model=manifest.name, bundle=manifest.digest, exits=exits, classes=len(manifest.classes), rows=rows
    )
    window = kept.window
    weights = capped(window.complete_weights, window.key, window.served, share)
    sample = window.take(evenly(weights, seed))
    if len(sample) < FEWEST_ROWS:
        raise InputError(
            f"{kept.name}: {kept.labelled} rows have a label, {len(window)} of them all exits known, and {len(sample)} "
            f"of these are an even sample of the traffic; expected at least {FEWEST_ROWS}. Shadow runs make more of "
            "them: serve with a larger share of these, and send labels."
        )
    sizes = manifest.typical_sizes
    flops = np.array(manifest.exit_flops(sizes))
    records = Records(
        logits=sample.logits,
        score=sample.score,
        label=sample.tops,
        flops=flops[:, None].repeat(len(sample), axis=1),
        truth=sample.label,
    )
    described = {
        "feedback": kept.name,
        "labelled": kept.labelled,
        "complete": len(window),
        "from": float(sample.time[0]),
        "until": float(sample.time[-1]),
        "sizes": sizes,
    }
    return OpenedRecords(records, described, tuple(_assumed(sizes, kept.passed_by)), manifest=manifest.digest)


def _assumed(sizes: dict[str, int], passed_by: float) -> list[str]:
    said = []
    if sizes:
        typical = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        said.append(f"costs are those of a row of typical size ({typical}): kept rows don't say how large they were.")
    if passed_by > 0:
        said.append(
            f"{passed_by:.1%} of the rows that left early couldn't be drawn for a shadow run, so these are rarer among "
            "the rows used than in the traffic."
        )
    return said
