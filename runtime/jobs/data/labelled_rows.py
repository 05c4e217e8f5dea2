"""The labelled rows that calibration works on: small arrays in memory, logits left on disk until they are read."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime import arrays
from offramp.runtime.arrays import Array, Bools, Ints
from offramp.runtime.errors import InputError
from offramp.runtime.points import OperatingPoint
from offramp.runtime.predictions import Records
from offramp.runtime.simulate import Simulation, simulate

FEWEST_ROWS = 50
# A one-to-one renaming of classes that lifts the accuracy from below half to above this isn't chance.
RENAMED = 0.5


class Picked:
    """Some rows of an (N, C) array, perhaps memory-mapped; read when indexed."""

    def __init__(self, source: Any, rows: Ints) -> None:
        self._source, self._rows = source, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Array:
        return np.asarray(self._source[self._rows[at]])


@dataclass(frozen=True)
class LabelledRows:
    """Rows with labels, at every exit.

    logits: one (N, C) an exit, read when indexed. score, label: (J, N) as the gates saw them. flops: (J, N)
    cumulative. truth: (N,), −1 only where unlabelled rows were asked for. routing: (L, N) or None; layers:
    how many of them each exit has seen. rows: (N,) where they are in the records.
    """

    logits: tuple[Picked, ...]
    score: Array
    label: Ints
    flops: Array
    truth: Ints
    rows: Ints
    classes: int
    routing: Array | None = None
    layers: tuple[int, ...] | None = None
    correct: Bools = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "correct", self.label == self.truth)

    def __len__(self) -> int:
        return len(self.truth)

    @property
    def exits(self) -> int:
        return len(self.logits)

    @property
    def full_flops(self) -> float:
        """Mean FLOPs of running to the end, of which shares are taken: 1 where that's free, NaN without rows."""
        return (float(self.flops[-1].mean()) or 1.0) if len(self) else float("nan")

    def take(self, at: Ints) -> "LabelledRows":
        """Some of these rows, by their place here."""
        return LabelledRows(
            logits=tuple(Picked(z, at) for z in self.logits),
            score=self.score[:, at],
            label=self.label[:, at],
            flops=self.flops[:, at],
            truth=self.truth[at],
            rows=self.rows[at],
            classes=self.classes,
            routing=None if self.routing is None else self.routing[:, at],
            layers=self.layers,
        )

    def aux(self, exit: int, rows: Ints) -> dict[str, Array]:
        """What a calibrator at an exit may be given beside logits."""
        if self.routing is None:
            return {}
        return {"routing": np.asarray(self.routing[: None if self.layers is None else self.layers[exit], rows])}


def labelled_rows(records: Records) -> LabelledRows:
    """Every row of the records, checked for what makes calibration meaningless.

    Raises InputError for records without labels or exits, labels that are no class, and NaN scores.
    """
    if not len(records.logits):
        raise InputError("records: no exit.")
    if records.truth is None:
        raise InputError("records have no labels: calibration needs a `labels` column in the recorded data.")
    classes = {int(z.shape[1]) for z in records.logits}
    if len(classes) > 1:
        raise InputError(f"records: exits differ in their number of classes, {[z.shape[1] for z in records.logits]}.")
    count = len(records)
    truth = arrays.labels(records.truth, count, classes.copy().pop())
    everything = np.arange(count)
    known = truth >= 0
    bad = np.flatnonzero(known & np.isnan(records.score).any(axis=0))
    if len(bad):
        raise InputError(f"records have NaN scores in {arrays.describe_rows(bad)}: correct the data first.")
    return LabelledRows(
        logits=tuple(Picked(z, everything) for z in records.logits),
        score=np.asarray(records.score),
        label=np.asarray(records.label),
        flops=np.asarray(records.flops),
        truth=truth,
        rows=everything,
        classes=classes.pop(),
        routing=records.routing,
        layers=None if records.routing_seen is None else tuple(map(len, records.routing_seen)),
    )


def check_labels(labelled: LabelledRows) -> list[str]:
    """What is odd about the labels, in words. Raises InputError where they can't be what they claim to be.

    labelled: those with a label only. Fewer than 50 are refused; so are labels that fit the predictions well once
    classes are renamed one to one, which is a wrong order of columns.
    """
    if len(labelled) < FEWEST_ROWS:
        raise InputError(f"records have {len(labelled)} labelled rows, expected at least {FEWEST_ROWS}.")
    odd = []
    present = np.unique(labelled.truth)
    right = labelled.correct[-1]
    accuracy = float(right.mean())
    if len(present) == 1:
        odd.append(
            f"every row has the label {present[0]}: what is measured holds for that class only, and nothing is "
            "known of the others."
        )
    else:
        _refuse_renamed(labelled, accuracy)
        commonest = float(np.bincount(labelled.truth).max() / len(labelled))
        if accuracy <= commonest + 2 * (commonest * (1 - commonest) / len(labelled)) ** 0.5:
            odd.append(
                f"the last exit is right on {accuracy:.1%} of the rows, hardly more than the {commonest:.1%} of always "
                "answering the commonest class: are the labels those of these rows?"
            )
    if right.all():
        odd.append("the last exit is right on every row: there is no error to calibrate or to rank failures by.")
    return odd


def _refuse_renamed(labelled: LabelledRows, accuracy: float) -> None:
    if accuracy >= RENAMED:
        return
    from scipy.optimize import linear_sum_assignment
    from scipy.sparse import coo_matrix

    truth, answer = labelled.truth, labelled.label[-1]
    # Only classes that occur: with many thousands of classes the full table would be large.
    names_t, t = np.unique(truth, return_inverse=True)
    names_a, a = np.unique(answer, return_inverse=True)
    table = coo_matrix((np.ones(len(t)), (t, a)), shape=(len(names_t), len(names_a))).toarray()
    rows, columns = linear_sum_assignment(table, maximize=True)
    renamed = float(table[rows, columns].sum() / len(t))
    if renamed > RENAMED and renamed > 2 * accuracy + 0.1:
        moved = next(k for k in np.argsort(-table[rows, columns]) if names_t[rows[k]] != names_a[columns[k]])
        raise InputError(
            f"labels: the last exit is right on {accuracy:.1%} of the rows, but on {renamed:.1%} once classes are "
            f"renamed (rows labelled {names_t[rows[moved]]} are answered {names_a[columns[moved]]}): the labels "
            "count the classes in another order than the model's columns."
        )


def evenly(rows: int, most: int) -> Ints:
    """At most so many places among the rows, evenly spread."""
    return np.arange(rows) if rows <= most else np.unique(np.linspace(0, rows - 1, most).astype(np.int64))


def row_keys(labelled: LabelledRows) -> NDArray[np.uint64]:
    """A number for each row, from its label and its scores at all exits: the same row has it again tomorrow."""
    score = np.ascontiguousarray(labelled.score.T)
    keys = np.empty(len(labelled), np.uint64)
    for i, (row, truth) in enumerate(zip(score, labelled.truth.tolist(), strict=True)):
        digest = hashlib.blake2b(row.tobytes() + truth.to_bytes(8, "little", signed=True), digest_size=8).digest()
        keys[i] = int.from_bytes(digest, "little")
    return keys


def outcome_of(labelled: LabelledRows, point: OperatingPoint) -> Simulation:
    """What the operating point does on these rows (see `simulate`)."""
    return simulate(labelled, point, routing_layers=labelled.layers)
