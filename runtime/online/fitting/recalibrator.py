"""New calibrators from labels that came back: each exit's fitted on the rows that reach it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from offramp.runtime import arrays
from offramp.runtime.arrays import Bools, Floats, Ints
from offramp.runtime.calibration import (
    Calibrator,
    Powered,
    RankPreservingIsotonic,
    RankPreservingPower,
    ordered_by,
)
from offramp.runtime.errors import InputError
from offramp.runtime.online.betting import spent
from offramp.runtime.online.fitting.tables import RowTables, fit_cwmcs, fit_temperature
from offramp.runtime.online.window import Memory, Window, capped, effective_rows
from offramp.runtime.points import OperatingPoint
from offramp.runtime.thresholds import SelectiveRisk, sgr_of_any

Method = Literal["rank_preserving", "rank_preserving_isotonic", "cwmcs", "temperature"]
METHODS: tuple[Method, ...] = ("rank_preserving", "rank_preserving_isotonic", "cwmcs", "temperature")

# Scores are gathered into so many cells of equal mass before the power is fitted; α moves by less than 1e-3 of itself.
CELLS = 512


@dataclass(frozen=True)
class Refit:
    """What a window gave: a candidate for the guard.

    point: the incumbent's thresholds with new calibrators; its `abstain_below` is still the incumbent's and has to be
    derived again (see `abstention`). after: seconds, when the last row used was answered; judge rows come later.
    rows: (J,) labelled rows fitted on at each exit, 0 where the incumbent's calibrator was kept. effective: what their
    weights are worth in equal rows, all exits together. capped: share of the weight that keys' caps took away.
    """

    point: OperatingPoint
    after: float
    rows: tuple[int, ...]
    effective: float
    capped: float


@dataclass(frozen=True)
class Recalibrator:
    """Fits one family of calibrators to what a window remembers.

    method: "rank_preserving" (the power family, on whatever calibrator the offline job has chosen),
    "rank_preserving_isotonic", "cwmcs", "temperature". memory: how far back it looks. share: of the weight that one key
    may have, in all and of the rows answered with any one class. least: an exit with fewer rows borrows what it lacks
    from the other exits', or keeps the incumbent's calibrator if they have less. shrinkage: κ of cwMCS's n_k/(n_k + κ).
    """

    method: Method = "rank_preserving"
    memory: Memory = field(default_factory=Memory)
    share: float = 1.0
    least: int = 60
    shrinkage: float = 30.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}.")
        arrays.fraction(self.share, "share", high_open=False)
        if not (self.least >= 1 and self.shrinkage >= 0):
            raise InputError("recalibrator: expected least of at least 1 and shrinkage of at least 0.")

    @property
    def in_pairs(self) -> bool:
        """Whether a candidate that keeps the order of rows goes with each of the method's own, which may not.

        Not with a temperature: that has one parameter for what a power does with one, so `rank_preserving` is better.
        """
        return self.method == "cwmcs"

    def recall(self, window: Window) -> tuple[Window, Floats] | None:
        """The labelled rows that a candidate is fitted on and what each weighs by its age; None with too few.

        cwMCS has a parameter a class, which outlasts most changes: rows from before are better than too few for it.
        """
        memory = replace(self.memory, adaptive=False) if self.method == "cwmcs" else self.memory
        return memory.recall(window)

    def refit(self, window: Window, incumbent: OperatingPoint) -> Refit | None:
        """A candidate from one operating point's window, oldest row first; None where too little is remembered.

        A row weighs 1/asked, times what its age leaves of it, as far as its key's cap allows. Exit j's calibrator is
        fitted on the rows that reached it and needs no other weight: which those are doesn't depend on their labels.
        """
        _check(window, incumbent)
        recalled = self.recall(window)
        return None if recalled is None else self.fit(*recalled, incumbent)

    def candidates(self, window: Window, incumbent: OperatingPoint) -> Iterator[tuple[Refit, Window]]:
        """What is worth a trial now, each with the rows that it was fitted on.

        Of cwMCS there are two: before what it gives, a power of the confidence that the incumbent gives (`Powered`).
        That mends most drifts, and nobody has to show first that the order stays.
        """
        _check(window, incumbent)
        if self.in_pairs and (recalled := self.memory.recall(window)) is not None:
            moved = self.fit(*recalled, incumbent, reorder=False)
            if moved is not None:
                yield moved, recalled[0]
        if (recalled := self.recall(window)) is not None and (refit := self.fit(*recalled, incumbent)) is not None:
            yield refit, recalled[0]

    def fit(self, rows: Window, age: Floats, incumbent: OperatingPoint, *, reorder: bool = True) -> Refit | None:
        """A candidate from what `recall` gave; None where no exit has rows enough.

        reorder: whether it is of the method's family; if not, a power of the confidence that the incumbent gives.
        """
        _check(rows, incumbent)
        whole = rows.weights * age
        weights = capped(whole, rows.key, rows.served, self.share)
        calibrators = [incumbent.calibrator(j) for j in range(rows.exits)]
        counts = [0] * rows.exits
        pairs = {j: _At.of(rows, j, weights) for j in incumbent.exits}
        for j, at in pairs.items():
            others = [one for k, one in pairs.items() if k != j]
            if (borrowed := self._borrowed(len(at.rows), others)) is not None:
                some, now = [at, *borrowed], calibrators[j]
                calibrators[j] = self._fit(some, now, rows.classes) if reorder else _powered(some, now)
                counts[j] = sum(len(one.rows) for one in (at, *borrowed))
        if not any(counts):
            return None
        lost = 1.0 - float(weights.sum() / whole.sum())
        point = replace(incumbent, calibrators=tuple(calibrators), expected={}, provenance={})
        return Refit(point, float(rows.time[-1]), tuple(counts), effective_rows(weights), lost)

    def _borrowed(self, own: int, others: "Sequence[_At]") -> "list[_At] | None":
        """What an exit with too few rows gets of the others': as much weight as it lacks. None if they have less."""
        if own >= self.least:
            return []
        there = sum(len(one.rows) for one in others)
        lacking = self.least - own
        if there < lacking:
            return None
        return [replace(one, weights=one.weights * (lacking / there)) for one in others if len(one.rows)]

    def _fit(self, pairs: "list[_At]", now: Calibrator, classes: int) -> Calibrator:
        first = ordered_by(now)
        if self.method == "rank_preserving" and first.preserves_argmax and not first.preserves_ranking:
            return _powered(pairs, now)  # the order that is in force is the one to be kept
        w = np.concatenate([one.weights for one in pairs])
        if self.method in ("cwmcs", "temperature"):
            logits = [one.window.logits[one.exit, one.rows] for one in pairs]
            label = np.concatenate([one.window.label[one.rows] for one in pairs])
            tables = RowTables.of(logits[0] if len(logits) == 1 else np.concatenate(logits), label)
            if self.method == "temperature":
                return fit_temperature(tables, w)
            return fit_cwmcs(tables, w, shrinkage=self.shrinkage)
        score = np.concatenate([one.window.score[one.exit, one.rows] for one in pairs]).astype(np.float64)
        right = np.concatenate([one.correct for one in pairs])
        if self.method == "rank_preserving_isotonic":
            return RankPreservingIsotonic().fit_scores(score, right, classes, weights=w)
        score, right, w = gathered(score, right, w)
        return RankPreservingPower().fit_scores(score, right, classes, weights=w)


def _check(rows: Window, incumbent: OperatingPoint) -> None:
    if len(incumbent.thresholds) != rows.exits:
        raise InputError(f"incumbent: expected {rows.exits} exits, as the window's, got {incumbent.thresholds}.")


def usable(rows: Window, exit: int) -> Bools:
    """(n,) rows that reached an exit, where it was run: one that no answer needs isn't."""
    return np.asarray(rows.reached(exit) & rows.known & ~np.isnan(rows.score[exit]))


@dataclass(frozen=True)
class _At:
    """Rows of a window at an exit, with their weights."""

    window: Window
    exit: int
    rows: Ints
    weights: Floats

    @classmethod
    def of(cls, window: Window, exit: int, weights: Floats) -> "_At":
        rows = np.flatnonzero(usable(window, exit) & (weights > 0))
        return cls(window, exit, rows, weights[rows])

    @property
    def correct(self) -> Bools:
        top = self.window.logits[self.exit, self.rows].argmax(axis=1)
        return np.asarray(top == self.window.label[self.rows])


def _powered(pairs: Sequence[_At], now: Calibrator) -> Calibrator:
    """A power of what a calibrator gives, or of what it was itself put on."""
    first = ordered_by(now)
    odds = np.concatenate([one.window.log_odds_at(one.exit, first, one.rows) for one in pairs])
    right = np.concatenate([one.correct for one in pairs])
    odds, right, w = gathered(odds, right, np.concatenate([one.weights for one in pairs]))
    return Powered(first).fit_odds(odds, right, w, pairs[0].window.classes)


def gathered(score: Floats, correct: Bools, w: Floats, cells: int = CELLS) -> tuple[Floats, Bools, Floats]:
    """Rows gathered into cells of neighbouring scores, a right and a wrong row of the cell's mean score each."""
    if len(score) <= 2 * cells:
        return score, correct, w
    order = np.argsort(score, kind="stable")
    starts = np.arange(cells) * len(score) // cells
    mass = np.add.reduceat(w[order], starts)
    middle = np.add.reduceat((w * score)[order], starts) / mass
    right = np.add.reduceat((w * correct)[order], starts)
    both = np.concatenate([right, mass - right])
    kept = both > 1e-12 * mass.max()
    return np.tile(middle, 2)[kept], np.repeat([True, False], cells)[kept], both[kept]


# ---------------------------------------------------------------- abstention


def abstention(
    window: Window,
    incumbent: OperatingPoint,
    candidate: OperatingPoint,
    *,
    risk: float,
    delta: float,
    version: int,
    seed: int = 0,
) -> SelectiveRisk:
    """Where the candidate must begin to answer so that its selective risk is at most `risk`, by SGR.

    window: labelled rows of the operating point that neither side was fitted on, the guard's judge rows, abstained ones
    among them. version: the new version's number from 1; its test is at δ_v = 6δ/(π²v²), so that the promises of all
    versions together fail with probability at most δ. The rows may have chosen between the two sides: the walk passes
    only where both pass (`sgr_of_any`). SGR counts rows, so where labels were sought with unequal probabilities they
    are thinned to equal ones at random. Not feasible: threshold +inf, and everything abstains rather than break a
    promise. The exits and their thresholds stay as they are.
    """
    rows = window.take(window.known)
    rows = rows.take(evenly(rows.weights, seed))
    wrong = ~rows.correct
    odds = np.stack([rows.log_odds(incumbent), rows.log_odds(candidate)])
    return sgr_of_any(odds, np.stack([wrong, wrong]), 1, risk, spent(delta, version))


def evenly(weights: Floats, seed: int = 0) -> Bools:
    """(n,) rows kept with probability w/max w: those that are stand for equally many each."""
    if not len(weights) or weights.min() == weights.max():
        return np.ones(len(weights), bool)
    return np.asarray(np.random.default_rng(seed).random(len(weights)) * weights.max() < weights)
