"""Served rows and what is known of them: what recalibration, guard, gauges and bounds read."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays, scores
from offramp.runtime.arrays import Array, Bools, Floats, Ints
from offramp.runtime.calibration import Calibrator
from offramp.runtime.errors import InputError
from offramp.runtime.online.fitting.alike import alike_since
from offramp.runtime.points import OperatingPoint

LEAST_ASKED = 1e-3
"""The least probability with which a label may have been sought: none stands for more than a thousand rows, or one
label would outweigh the window."""
_BY_EXIT = ("score", "logits")  # the exits come first there, then the rows


@dataclass(frozen=True)
class Window:
    """Served rows and what is known of them, oldest first. n rows, J exits, C classes.

    time: (n,) float64, seconds since the epoch, when the row was answered.
    labelled: (n,) float64, when its label came, NaN without one.
    version: (n,) int64, the calibration version that answered it.
    point: (n,) str, its operating point.
    exit: (n,) int64, the exit it left at.
    abstained: (n,) bool.
    score: (J, n) float32, raw score (log-odds) of every exit that was run, for the answer or in a shadow run; NaN
        where it wasn't.
    logits: (J, n, C) float16, z − max z; NaN where the exit wasn't run.
    label: (n,) int64, −1 where unknown.
    shadow: (n,) float64, the probability with which the row's remaining exits were run afterwards; 1 where it went the
        whole way by itself.
    asked: (n,) float64, the probability with which a label of the row was sought; NaN where unknown, which counts as 1.
    key: (n,) int64, who sent the label, a number a client; −1 unknown.
    seq: (n,) int64, the row's number in its store; None for rows of no store.
    """

    time: Floats
    labelled: Floats
    version: Ints
    point: Array
    exit: Ints
    abstained: Bools
    score: Array
    logits: Array
    label: Ints
    shadow: Floats
    asked: Floats
    key: Ints
    seq: Ints | None = None

    def __post_init__(self) -> None:
        n = len(self.time)
        if self.logits.ndim != 3 or self.score.shape != self.logits.shape[:2]:
            raise InputError(
                f"window: expected score (exits, rows) and logits (exits, rows, classes), got {self.score.shape} and "
                f"{self.logits.shape}."
            )
        for name, a in self._columns().items():
            if name not in _BY_EXIT and a.shape != (n,):
                raise InputError(f"window: expected {name} of {n} rows, got shape {a.shape}.")
        if self.score.shape[1] != n:
            raise InputError(f"window: expected score of {n} rows, got shape {self.score.shape}.")
        if n and not (self.exit.min() >= 0 and self.exit.max() < self.exits):
            raise InputError(f"window: expected exit from 0 to {self.exits - 1}.")
        if n and self.label.max() >= self.classes:
            raise InputError(f"window: expected label below {self.classes}, got {self.label.max()}.")
        # A NaN passes: it is one that nobody knows.
        for name in ("shadow", "asked"):
            value = getattr(self, name)
            if ((value <= 0) & self._weighed(name) | (value > 1)).any():
                raise InputError(f"window: expected {name} in (0, 1] where it weighs a row.")

    def _weighed(self, name: str) -> Bools:
        """Rows that exist for their probability's sake: labelled ones, ones with all exits known."""
        return self.known if name == "asked" else self.complete

    def __len__(self) -> int:
        return len(self.time)

    @property
    def exits(self) -> int:
        return int(self.logits.shape[0])

    @property
    def classes(self) -> int:
        return int(self.logits.shape[2])

    # ------------------------------------------------------------ fewer rows

    def take(self, rows: ArrayLike) -> "Window":
        """The rows of a mask or of rising row numbers."""
        kept = np.asarray(rows)
        kept = np.flatnonzero(kept) if kept.dtype == bool else kept
        # A window that keeps every row needs no copy of its logits.
        if len(kept) == len(self):
            return self
        held = self._columns()
        return Window(**{name: a[:, kept] if name in _BY_EXIT else a[kept] for name, a in held.items()})

    def at(self, point: str) -> "Window":
        """The rows of one operating point."""
        return self.take(self.point == point)

    def since(self, version: int) -> "Window":
        """The rows that this calibration version answered, or a later one."""
        return self.take(self.version >= version)

    def after(self, time: float) -> "Window":
        """The rows answered later than that."""
        return self.take(self.time > time)

    def then(self, later: "Window") -> "Window":
        """These rows and, behind them, others of the same bundle."""
        return joined([self, later])

    def _columns(self) -> dict[str, Any]:
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: a for name, a in held.items() if a is not None}

    # ------------------------------------------------------------ which rows

    @property
    def known(self) -> Bools:
        """(n,) whether the label is known."""
        return self.label >= 0

    @property
    def answered(self) -> Bools:
        """(n,) labelled and not abstained: the rows that selective risk is about."""
        return self.known & ~self.abstained

    def reached(self, exit: int) -> Bools:
        """(n,) whether the row reached an exit on its way to its answer; shadow runs don't count."""
        return self.exit >= exit

    @property
    def complete(self) -> Bools:
        """(n,) whether every exit was run, for the answer or in a shadow run."""
        return np.asarray(~np.isnan(self.score).any(axis=0))

    # ------------------------------------------------------------ what they weigh

    @property
    def weights(self) -> Floats:
        """(n,) 1/asked, LEAST_ASKED at least: what a labelled row stands for among the served ones."""
        asked = np.where(self.known & ~np.isnan(self.asked), self.asked, 1.0)
        return np.asarray(1.0 / np.maximum(asked, LEAST_ASKED))

    @property
    def complete_weights(self) -> Floats:
        """(n,) 1/(shadow·asked): what a labelled row with all exits known stands for.

        Shadow runs and labels are drawn independently of each other given the row's exit and abstention.
        """
        return np.asarray(self.weights / np.where(self.complete, self.shadow, 1.0))

    # ------------------------------------------------------------ what was answered, and what would be

    @cached_property
    def tops(self) -> Ints:
        """(J, n) the label that each exit gives; meaningless where it wasn't run."""
        flat = self.logits.reshape(-1, self.classes)
        return scores.top_label(flat).reshape(self.logits.shape[:2])

    @property
    def served(self) -> Ints:
        """(n,) the label that each row was answered with."""
        return np.asarray(self.tops[self.exit, np.arange(len(self))])

    @property
    def correct(self) -> Bools:
        """(n,) whether that is the row's label; False where it isn't known."""
        return np.asarray(self.served == self.label)

    def log_odds(self, point: OperatingPoint, rows: ArrayLike | None = None) -> Floats:
        """(n,) log-odds of the confidence that a point's calibrators give each row at the exit it left at.

        rows: row numbers, default all.
        """
        chosen = np.arange(len(self)) if rows is None else np.asarray(rows)
        left = self.exit[chosen]
        out = np.full(len(chosen), np.nan)
        for j in range(self.exits):
            here = np.flatnonzero(left == j)
            if len(here):
                out[here] = self.log_odds_at(j, point.calibrator(j), chosen[here])
        return out

    def log_odds_at(self, exit: int, calibrator: Calibrator, rows: ArrayLike) -> Floats:
        """(len(rows),) calibrated log-odds of rows at an exit that was run for them."""
        at = np.asarray(rows)
        given: dict[str, Any] = {"score": self.score[exit, at]}
        if calibrator.needs - {"score"}:
            given["logits"] = self.logits[exit, at].astype(np.float32)
        return calibrator.score(given)


# ---------------------------------------------------------------- memory


@dataclass(frozen=True)
class Memory:
    """How far back a fit looks.

    rows: the newest labelled rows that count, a sliding window. half_life: labelled rows after which a row counts half,
    infinite for a plain sliding window. least: with a smaller effective number, (Σw)²/Σw², nothing is fitted.
    adaptive: whether rows from before a change, of scores or of how right answers are given their score, are left out.
    """

    rows: int = 10_000
    half_life: float = 600.0
    least: int = 100
    adaptive: bool = True

    def __post_init__(self) -> None:
        if not (self.rows >= 1 and self.half_life > 0 and self.least >= 1):
            raise InputError("memory: expected rows and least of at least 1, half_life above 0.")

    def recall(self, window: Window) -> tuple[Window, Floats] | None:
        """The labelled rows that count and what each weighs by its age, the newest 1; None with too few of them.

        A half-life that leaves fewer than `least` is stretched until they are as many.
        """
        rows = np.flatnonzero(window.known)[-self.rows :]
        if self.adaptive:
            # By the raw score: a reference that changes with the incumbent would take its changes for the rows' own.
            score = window.score[window.exit[rows], rows].astype(np.float64)
            ranks = np.argsort(np.argsort(score, kind="stable"), kind="stable") / max(len(score), 1)
            rows = rows[alike_since(window.correct[rows] - scores.sigmoid(score), ranks) :]
        if len(rows) < self.least:
            return None
        age = np.arange(len(rows))[::-1].astype(np.float64)
        half_life = self.half_life
        while effective_rows(weights := np.exp2(-age / half_life)) < self.least:
            half_life *= 1.1
        return window.take(rows), weights


def effective_rows(weights: ArrayLike) -> float:
    """(Σw)²/Σw²: as many equal rows would be as good. 0 without weight."""
    w = np.asarray(weights, np.float64)
    square = float((w**2).sum())
    return float(w.sum()) ** 2 / square if square > 0 else 0.0


# ---------------------------------------------------------------- keys


def capped(weights: ArrayLike, key: ArrayLike, group: ArrayLike, share: float) -> Floats:
    """Weights under which no key has more than `share` of them, neither of all rows nor of any group.

    weights: (n,) ≥ 0. key: (n,) who sent the label; all that are unknown (−1) are one. group: (n,) what the sender
    can't choose, as the predicted class. share in (0, 1]. Within a group a key's rows all shrink by one factor, and
    only as far as they must. With fewer than 1/share keys in all the share can't be kept, and each may have as much as
    equal ones would have: a lone key is believed, for there is nobody else. In a group where others sent too little to
    weigh it against, a key counts for little or nothing.
    """
    share = arrays.fraction(share, "share", high_open=False)
    w = np.asarray(weights, np.float64).copy()
    who = np.unique(np.asarray(key), return_inverse=True)[1]
    what = np.unique(np.asarray(group), return_inverse=True)[1]
    keys = int(who.max()) + 1 if len(who) else 0
    if not keys or share * keys <= 1 + 1e-12:
        share = 1.0 / keys if keys else 1.0
    if share >= 1:
        return w
    cells = what * keys + who
    every = (int(what.max()) + 1) * keys
    # Each pass only takes weight away; what one level takes may put the other over its share again.
    for _ in range(100):
        before = w.sum()
        mass = arrays.group_sums(cells, w, every).reshape(-1, keys)
        w = w * np.array([_factors(row, share) for row in mass]).reshape(-1)[cells]
        w = w * _factors(arrays.group_sums(who, w, keys), share)[who]
        if before - w.sum() <= 1e-12 * before:
            break
    return w


def _factors(mass: Floats, share: float) -> Floats:
    """(K,) what each key's mass is multiplied with so that none has more than `share` of what is left.

    The limit solves t = share·Σ min(mass, t); 0 where too few keys have any.
    """
    total = mass.sum()
    if mass.max(initial=0.0) <= share * total * (1 + 1e-12):
        return np.ones(len(mass))
    falling = np.sort(mass)[::-1]
    rest, limit = total, 0.0
    for over, largest in enumerate(falling, 1):
        rest -= largest
        if share * over >= 1:
            break
        limit = share * max(rest, 0.0) / (1 - share * over)
        if over == len(falling) or falling[over] <= limit:
            break
    return np.minimum(1.0, limit / np.maximum(mass, 1e-300))


def within_share(key: ArrayLike, share: float, allowance: int = 50) -> Bools:
    """(n,) which rows count, one after the other, so that no key ever has more than share·i + allowance of the first i.

    key: (n,) in the order in which the labels came. Whether a row counts depends on the senders up to it and on no
    label, so a sequential test may leave the others out. share 1 keeps every row.
    """
    share = arrays.fraction(share, "share", high_open=False)
    who = np.asarray(key)
    kept = np.ones(len(who), bool)
    if share >= 1:
        return kept
    counted: dict[Any, int] = {}
    for i, one in enumerate(who.tolist(), 1):
        had = counted.get(one, 0)
        kept[i - 1] = had + 1 <= share * i + allowance
        counted[one] = had + int(kept[i - 1])
    return kept


def joined(windows: Sequence[Window]) -> Window:
    """The rows of several windows of one bundle, one window after the other. windows: at least one."""
    if len(windows) == 1:
        return windows[0]
    columns = [window._columns() for window in windows]
    shared = [name for name in columns[0] if all(name in each for each in columns)]
    return Window(**{name: np.concatenate([c[name] for c in columns], axis=int(name in _BY_EXIT)) for name in shared})
