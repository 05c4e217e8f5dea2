"""The audit job: does a model's routing say more about its errors than its confidence does?"""

import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime.bundle import Manifest, read_bundle
from offramp.runtime.errors import InputError
from offramp.runtime.files import check_new_folder, new_folder
from offramp.runtime.jobs.auditing.evidence import Audit, audit
from offramp.runtime.records import Index, read_index, read_records

SCHEMA = "offramp-audit/1"
AUDIT, PAGE = "audit.json", "audit.html"


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
    assert records.truth is not None
    chosen = np.arange(index.rows) if rows is None else np.asarray(rows)
    routing = np.asarray(records.routing[:, chosen])
    return audit(
        [np.asarray(records.logits[j][chosen]) for j in numbers],
        records.truth[chosen],
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


def audit_bundle(
    bundle: str | Path,
    records: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    permutations: int = 5000,
    replicates: int = 5000,
    seeds: int = 5,
    seed: int = 42,
) -> Audit:
    """Audit a bundle on its records and write the folder `out`: audit.json and a self-contained audit.html.

    Options as in `audit_records`. Raises InputError if the records are another bundle's, or can't be audited.
    """
    from offramp.runtime.jobs.auditing.page import page  # plots: nothing that only asks for the verdict needs them

    check_new_folder(Path(out), marker=AUDIT, replace=overwrite, keep=Path(records))
    manifest = read_bundle(bundle).manifest
    index = read_index(records)
    if index.manifest != manifest.digest:
        raise InputError(f"{records}: recorded from another bundle than {bundle}. Record again with this one.")
    options = {"permutations": permutations, "replicates": replicates, "seeds": seeds, "seed": seed}
    found = audit_records(records, manifest=manifest, **options)
    about = {
        "model": f"{manifest.name} {manifest.version}",
        "bundle": manifest.digest,
        "records": str(records),
        "rows": index.rows,
        **options,
        "producer": f"offramp {metadata.version('offramp')}",
    }
    with new_folder(Path(out), marker=AUDIT, replace=overwrite, keep=Path(records)) as folder:
        encoded = msgspec.json.format(msgspec.json.encode(document(found, about)), indent=1)
        (folder / AUDIT).write_bytes(encoded + b"\n")
        (folder / PAGE).write_text(page(found, about), encoding="utf-8")
    return found


def document(found: Audit, about: dict[str, Any]) -> dict[str, Any]:
    """The audit as JSON-able data; what is undefined is None."""
    return {
        "schema": SCHEMA,
        **about,
        "yes": found.yes,
        "verdict": found.verdict,
        "exits": [
            {"exit": j, "missing": one.missing(), **_plain(one)}
            for j, one in zip(found.numbers, found.exits, strict=True)
        ],
    }


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list | np.ndarray):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(found: Audit) -> list[dict[str, Any]]:
    """One flat row an exit, as a data frame takes them: pandas.DataFrame(table(found))."""
    rows = []
    for j, one in zip(found.numbers, found.exits, strict=True):
        gap, kernels = one.permutation.observed, one.kernels
        rows.append(
            {
                "exit": j,
                "gap_max": gap.max,
                "gap_weighted": gap.weighted,
                "shared_bins": gap.shared_bins,
                "p_max": one.permutation.max,
                "p_weighted": one.permutation.weighted,
                "p_holm": one.adjusted,
                **{f"nll_{name}": value for name, value in kernels.nll.items()},
                **{f"advantage_over_{name}": value[0] for name, value in kernels.advantage.items()},
                **{f"r2_{name}": float(values.mean()) for name, values in one.probe.r2.items()},
                "uplift": one.probe.uplift,
                "uplift_low": one.probe.low,
                "uplift_high": one.probe.high,
                "missing": "; ".join(one.missing()),
            }
        )
    return rows


def describe(found: Audit) -> str:
    """The evidence as a table, then the verdict."""
    lines = ["exit  gap (weighted)  p (Holm)  AR-CondCal's NLL gain [95%]  R² uplift [95%]"]
    for j, one in zip(found.numbers, found.exits, strict=True):
        # The control that is harder to beat decides.
        gain = min(one.kernels.advantage.values())
        lines.append(
            f"{j:<6}{one.permutation.observed.weighted:<16.4f}{one.adjusted:<10.3f}"
            f"{f'{gain[0]:+.4f} [{gain[1]:+.4f}, {gain[2]:+.4f}]':<29}"
            f"{one.probe.uplift:+.4f} [{one.probe.low:+.4f}, {one.probe.high:+.4f}]"
        )
    return "\n".join([*lines, "", found.verdict])
