"""Figures of each operating point on groups of test rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.data.expected import Line, expected
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, outcome_of
from offramp.runtime.jobs.plain_json import number
from offramp.runtime.points import OperatingPoint


@dataclass(frozen=True)
class Subgroup:
    """A name and one value a row of the records, as text: rows of one value are a group."""

    name: str
    values: NDArray[Any]

    @classmethod
    def of(cls, name: str, values: ArrayLike, rows: int) -> "Subgroup":
        """Raises InputError unless there is one plain value a row."""
        found = np.asarray(values)
        if found.shape != (rows,) or found.dtype.kind not in "biufSU":
            raise InputError(
                f"subgroup {name!r}: expected one value a row, {rows} of them, got {found.dtype} {found.shape}."
            )
        return cls(name, found.astype(str))


def subgroups(groups: Subgroup, points: Mapping[str, OperatingPoint], test: LabelledRows) -> list[Line]:
    """Each point's figures on each group of test rows."""
    table = []
    values = groups.values[test.rows]
    for value in np.unique(values).tolist():
        rows = np.flatnonzero(values == value)
        part = test.take(rows)
        for point_name, point in points.items():
            outcome = outcome_of(part, point)
            right = outcome.label == part.truth
            figures = expected(part, point, outcome)
            interval = figures["intervals"]
            table.append(
                {
                    "subgroup": groups.name,
                    "value": str(value),
                    "point": point_name,
                    "rows": len(rows),
                    **{key: figures[key] for key in ("accuracy", "drop", "risk", "coverage", "flops_fraction")},
                    "accuracy_low": None if interval["accuracy"] is None else interval["accuracy"][0],
                    "accuracy_high": None if interval["accuracy"] is None else interval["accuracy"][1],
                    "confidence_minus_accuracy": number((outcome.confidence - right).mean()),
                }
            )
    return table
