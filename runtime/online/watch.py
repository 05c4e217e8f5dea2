"""Alarms over a running store: windows overlap, labels and shadow runs come late, and every row counts once."""

from dataclasses import dataclass, field

import numpy as np
from offramp.runtime import arrays
from offramp.runtime.arrays import Bools, Ints
from offramp.runtime.errors import InputError
from offramp.runtime.online.alarms import Alarms, Signal, counting
from offramp.runtime.online.window import Window

# What comes at one time, and so is watched by alarms of its own.
ANSWERS, LABELS, SHADOW_RUNS = ("exit", "score", "coverage"), ("risk",), ("agreement",)


@dataclass
class _Kind:
    """Alarms whose rows come together. least: rows that show what is usual; reference: those of them that are here."""

    of: tuple[str, ...]
    least: int
    reference: Window | None = None
    alarms: Alarms | None = None
    counted: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def take(self, window: Window, mine: Bools, seq: Ints) -> Ints:
        """The numbers of the rows that count and haven't; from now on they have."""
        ready = np.flatnonzero(mine)
        ready = ready[counting(self.of[0], window, ready)]
        new = ready[~np.isin(seq[ready], self.counted)]
        self.counted = seq[ready]
        return new


@dataclass
class Watch:
    """Watches what one version answers at one operating point, from its first rows until another takes its place.

    version: of the calibration. reference: its first rows, which show what is usual; before they are there nothing is
    watched. late: the first rows with a label, and the first early leavers that were run to the end, which show how
    often answers are usually wrong, and usually those of the last exit. risk: the promised one, if any, which stands
    for the usual one. alpha: of any false alarm as long as this watches; one that is made anew, as after a restart,
    has its own.

    standing: what was raised, by what is watched. It stands as long as the version is in force.
    """

    version: int
    reference: int = 2000
    late: int = 400
    risk: float | None = None
    alpha: float = 0.05
    standing: dict[str, Signal] = field(default_factory=dict)
    _since: tuple[float, int] = field(default=(-np.inf, 0), init=False)

    def __post_init__(self) -> None:
        arrays.fraction(self.alpha, "alpha")
        if not (self.reference >= 1 and self.late >= 1):
            raise InputError("watch: expected reference and late of at least 1.")
        self._kinds = [_Kind(ANSWERS, self.reference), _Kind(LABELS, self.late), _Kind(SHADOW_RUNS, self.late)]

    @property
    def watched(self) -> tuple[str, ...]:
        """What is watched by now."""
        return tuple(what for kind in self._kinds if kind.alarms is not None for what in kind.of)

    def look(self, window: Window) -> list[Signal]:
        """What is out of its limits and wasn't at the last look.

        window: the operating point's newest rows as a store has them, oldest first; those of other versions don't
        count. A row counts once for exit, score and coverage, once for risk when its label is there, in the order in
        which labels came, and once for agreement when it was run to the end. One that has left the window before its
        label comes doesn't count for risk: give a window that is longer than labels take. Raises InputError for rows
        without numbers.
        """
        if window.seq is None:
            raise InputError("window: expected rows of a store, with their seq.")
        if not len(window):
            return []
        # Rows that a shorter window had left out may come back when others are deleted.
        self._since = max(self._since, (float(window.time[0]), int(window.seq[0])))
        time, seq = self._since
        mine = (window.version == self.version) & ((window.time > time) | ((window.time == time) & (window.seq >= seq)))
        answers = self._kinds[0]
        found: list[Signal] = []
        for kind in self._kinds:
            if kind is not answers and answers.alarms is None:
                break
            new = kind.take(window, mine, window.seq)
            if kind.of == LABELS:
                new = new[np.argsort(window.labelled[new], kind="stable")]
            if kind.alarms is None:
                new = self._begun(kind, window, new)
            if kind.alarms is not None:
                found += kind.alarms.update(window, new)
        for kind in self._kinds:
            if kind.alarms is not None:
                kind.reference = None  # its limits are all that is needed of it
        raised = [one for one in found if one.what not in self.standing]
        self.standing.update((one.what, one) for one in raised)
        return raised

    def _begun(self, kind: _Kind, window: Window, new: Ints) -> Ints:
        """Learn from rows what is usual; those that are left, which may be judged by it."""
        if kind.of == LABELS and self.risk is not None:
            usual = self._kinds[0].reference
            assert usual is not None  # it was completed in this very look
            kind.alarms = Alarms.of(usual, risk=self.risk, alpha=self.alpha, only=kind.of)
            return new
        have = 0 if kind.reference is None else len(kind.reference)
        first, rest = new[: kind.least - have], new[kind.least - have :]
        more = window.take(np.sort(first))
        kind.reference = more if kind.reference is None else kind.reference.then(more)
        if len(kind.reference) == kind.least:
            kind.alarms = Alarms.of(kind.reference, alpha=self.alpha, only=kind.of)
        return rest
