"""The audit job: does a model's routing say more about its errors than its confidence does?"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime.bundle import Manifest, own_version, read_bundle
from offramp.runtime.errors import InputError
from offramp.runtime.files import check_new_folder, new_folder
from offramp.runtime.jobs.auditing.evidence import Audit, audit
from offramp.runtime.jobs.data.opened import Openable, open_records
from offramp.runtime.jobs.plain_json import plain, to_json

SCHEMA = "offramp-audit/1"
AUDIT, PAGE = "audit.json", "audit.html"


def audit_records(
    records: Openable,
    *,
    manifest: Manifest | None = None,
    rows: ArrayLike | None = None,
    permutations: int = 5000,
    replicates: int = 5000,
    seeds: int = 5,
    seed: int = 42,
) -> Audit:
    """Audit every exit that has seen routing, on recorded data (methods.md section 7).

    records: a folder, opened records, or records in memory. manifest: of the bundle they must be of, which also
        says what records that are too old leave out (see `open_records`). rows: numbers of the rows to look at,
        all by default, so that a job that reports on test rows can keep them out. The rest as in
        `evidence.audit`; rows without a label are left out.
    Time grows with the square of the rows: a minute for 10,000 rows at three exits.
    Raises InputError if the records have no routing outputs or no labels, or don't say which exit has
    seen which routing.
    """
    opened = open_records(records, manifest)
    given = opened.records
    if given.routing is None:
        raise InputError(
            f"{opened.name}: these records have no routing outputs, so there is nothing to audit. "
            "The audit is for models whose export names routing entropies (Attention Residuals)."
        )
    if given.truth is None:
        raise InputError(
            f"{opened.name}: these records have no labels, and the audit is about errors. Record labelled data."
        )
    if given.routing_seen is None:
        raise InputError(f"{opened.name}: routing_seen doesn't say which exit has seen which routing. Record again.")
    seen = given.routing_seen
    numbers = [j for j, layers in enumerate(seen) if layers]
    chosen = np.arange(len(given)) if rows is None else np.asarray(rows)
    routing = np.asarray(given.routing[:, chosen])
    return audit(
        [np.asarray(given.logits[j][chosen]) for j in numbers],
        given.truth[chosen],
        [routing[list(seen[j])] for j in numbers],
        numbers=numbers,
        permutations=permutations,
        replicates=replicates,
        seeds=seeds,
        seed=seed,
    )


def audit_bundle(
    bundle: str | Path,
    records: Openable,
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

    manifest = read_bundle(bundle).manifest
    opened = open_records(records, manifest)
    check_new_folder(Path(out), marker=AUDIT, replace=overwrite, keep=opened.folder)
    options: dict[str, Any] = {"permutations": permutations, "replicates": replicates, "seeds": seeds, "seed": seed}
    found = audit_records(opened, **options)
    about = {
        "model": f"{manifest.name} {manifest.version}",
        "bundle": manifest.digest,
        "records": opened.name,
        "rows": len(opened.records),
        **options,
        "producer": f"offramp {own_version()}",
    }
    with new_folder(Path(out), marker=AUDIT, replace=overwrite, keep=opened.folder) as folder:
        (folder / AUDIT).write_bytes(to_json(document(found, about)))
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
            {"exit": j, "missing": one.missing(), **plain(one)}
            for j, one in zip(found.numbers, found.exits, strict=True)
        ],
    }


def table(found: Audit) -> list[dict[str, Any]]:
    """One flat row an exit, as a data frame takes them (pandas.DataFrame(table(found))): of its best feature."""
    rows = []
    for j, one in zip(found.numbers, found.exits, strict=True):
        best = one.best
        gap, kernels = best.permutation.observed, best.kernels
        rows.append(
            {
                "exit": j,
                "feature": best.feature,
                "gap_max": gap.max,
                "gap_weighted": gap.weighted,
                "shared_bins": gap.shared_bins,
                "p_max": best.permutation.max,
                "p_weighted": best.permutation.weighted,
                "gap_detectable": best.detectable,
                "p_kernel": kernels.p_value,
                "p_holm": best.adjusted,
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
    lines = ["exit  feature  gap (would be found)  p (Holm)  kernel's NLL gain [95%]       R² uplift [95%]"]
    for j, exit_ in zip(found.numbers, found.exits, strict=True):
        for one in exit_.features:
            # The control that is harder to beat decides.
            gain = min(one.kernels.advantage.values())
            lines.append(
                f"{j:<6}{one.feature:<9}{f'{one.permutation.observed.weighted:.4f} ({one.detectable:.3f})':<22}"
                f"{one.adjusted:<10.3f}{f'{gain[0]:+.4f} [{gain[1]:+.4f}, {gain[2]:+.4f}]':<30}"
                f"{exit_.probe.uplift:+.4f} [{exit_.probe.low:+.4f}, {exit_.probe.high:+.4f}]"
            )
    return "\n".join([*lines, "", found.verdict])
