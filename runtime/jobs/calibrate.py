"""The calibration job, first form: exit shares for FLOPs budgets, abstention by guaranteed selective risk.

Rows are split once, by a seed: `thresholds` choose when to leave, `certify` is used for nothing but the
promised risk, `report` for nothing but the figures that are written down.
"""

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import read_bundle
from offramp.runtime.errors import BundleError, InputError
from offramp.runtime.points import (
    FULL,
    Calibration,
    OperatingPoint,
    full,
    read_calibration,
    write_calibration,
)
from offramp.runtime.predictions import Records
from offramp.runtime.records import read_index, read_records
from offramp.runtime.simulate import simulate
from offramp.runtime.thresholds import exit_share, sgr

BUDGETS = {"balanced": 0.5, "fast": 0.3}
_SHARES = {"thresholds": 0.4, "certify": 0.3, "report": 0.3}
_FEWEST_ROWS = 50


@dataclass(frozen=True)
class Split:
    """Row numbers of the three disjoint parts."""

    thresholds: NDArray[np.int64]
    certify: NDArray[np.int64]
    report: NDArray[np.int64]


def split_rows(rows: NDArray[np.int64], seed: int) -> Split:
    """Disjoint random parts of the given row numbers, the same for the same seed."""
    order = np.random.default_rng(seed).permutation(rows)
    first = round(len(order) * _SHARES["thresholds"])
    second = first + round(len(order) * _SHARES["certify"])
    return Split(*(np.sort(part) for part in (order[:first], order[first:second], order[second:])))


def expected(records: Records, point: OperatingPoint, rows: NDArray[np.int64]) -> dict[str, Any]:
    """What the point does on these rows: accuracy, FLOPs, coverage, selective risk (None: nothing answered)."""
    assert records.labels is not None
    outcome = simulate(records, point)
    right = outcome.label[rows] == records.labels[rows]
    kept = ~outcome.abstain[rows]
    flops = outcome.flops[rows].mean()
    return {
        "rows": len(rows),
        "accuracy": float(right.mean()),
        "flops": float(flops),
        "flops_fraction": float(flops / records.flops[-1][rows].mean()),
        "coverage": float(kept.mean()),
        "risk": float((~right[kept]).mean()) if kept.any() else None,
        "exit_shares": (np.bincount(outcome.exit[rows], minlength=len(point.thresholds)) / len(rows)).tolist(),
    }


def choose_points(
    records: Records,
    *,
    budgets: Mapping[str, float] = BUDGETS,
    abstain_risk: float | None = 0.05,
    delta: float = 0.05,
    seed: int = 0,
) -> dict[str, OperatingPoint]:
    """`full` and one point a budget, each with its own abstention threshold.

    budgets: name -> share of the full model's FLOPs, in (0, 1]. abstain_risk: error among the answered rows
        promised with probability >= 1 - delta, by SGR; None never abstains. Infeasible: everything abstains,
        and the point's provenance says so.
    Raises InputError without labels, or with fewer than 50 labelled rows.
    """
    if records.labels is None:
        raise InputError("records have no labels: calibration needs a `labels` column in the recorded data.")
    labelled = np.flatnonzero(np.asarray(records.labels) >= 0)
    if len(labelled) < _FEWEST_ROWS:
        raise InputError(f"records have {len(labelled)} labelled rows, expected at least {_FEWEST_ROWS}.")
    bad = labelled[np.isnan(records.score[:, labelled]).any(axis=0)]
    if len(bad):
        raise InputError(f"records have NaN scores, in row {bad[0]} and {len(bad) - 1} more: mend the data first.")
    if FULL in budgets:
        raise InputError(f"budget name {FULL!r} is taken by the whole network: choose another.")
    split = split_rows(labelled, seed)
    chosen = {FULL: replace(full(len(records.logits)), provenance={"method": "whole network"})}
    for name, budget in budgets.items():
        share = exit_share(records.score[:, split.thresholds], records.flops[:, split.thresholds], budget=budget)
        provenance = {
            "method": "exit_share",
            "budget": budget,
            "budget_met": share.budget_met,
            "q": share.q if math.isfinite(share.q) else None,
            "flops_fraction": share.cost,
            "rows": len(split.thresholds),
        }
        chosen[name] = OperatingPoint(share.thresholds, name=name, provenance=provenance)
    done = {}
    for name, point in chosen.items():
        if abstain_risk is not None:
            point = _abstain(records, point, split.certify, abstain_risk, delta)
        done[name] = replace(
            point,
            expected=expected(records, point, split.report),
            provenance={**point.provenance, "seed": seed},
        )
    return done


def _abstain(
    records: Records, point: OperatingPoint, rows: NDArray[np.int64], risk: float, delta: float
) -> OperatingPoint:
    assert records.labels is not None
    outcome = simulate(records, point)
    answer = sgr(outcome.log_odds[rows], outcome.label[rows] != records.labels[rows], risk=risk, delta=delta)
    provenance = {
        "method": f"sgr/{answer.method}",
        "risk": risk,
        "delta": delta,
        "feasible": answer.feasible,
        "coverage": answer.coverage,
        "bound": answer.bound if answer.feasible else None,
        "rows": len(rows),
    }
    return replace(point, abstain_below=answer.threshold, provenance={**point.provenance, "abstention": provenance})


def calibrate(
    bundle: str | Path,
    records: str | Path,
    *,
    budgets: Mapping[str, float] = BUDGETS,
    abstain_risk: float | None = 0.05,
    delta: float = 0.05,
    seed: int = 0,
) -> Calibration:
    """Choose operating points from records and write the bundle's calibration.json, atomically.

    Options as in `choose_points`. Raises InputError if the records came from another bundle.
    """
    opened = read_bundle(bundle)
    index = read_index(records)
    if index.manifest != opened.manifest.digest:
        raise InputError(f"{records}: recorded from another bundle than {bundle}. Record again with this one.")
    points = choose_points(read_records(records), budgets=budgets, abstain_risk=abstain_risk, delta=delta, seed=seed)
    try:
        version = read_calibration(opened.path, opened.manifest).version
    except BundleError:  # a damaged one is replaced, which is what its error message asks for
        version = 0
    new = Calibration(points, version + 1, provenance={"records": index.source, "rows": index.rows})
    write_calibration(
        opened.path,
        opened.manifest,
        new,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        producer=f"offramp {metadata.version('offramp')}",
    )
    return new
