"""Drift, seen while it happens: alarms that are false with probability at most α over their whole life.

What is watched are shares: of rows that leave at each exit, that score in each tenth of what was usual, that are
answered, that are wrong, and of early leavers that a shadow run's last exit agrees with, which needs no label. The
hypothesis is that since some moment the shares, averaged over the rows' conditional probabilities, stayed in their
limits. The bets of `betting` against it begin anew every so many rows, the j-th at level 6α/(π²j²): what was quiet for
a million rows doesn't drown what begins now, and all of them together err with probability at most α.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays, scores
from offramp.runtime.arrays import Array, Bools, Floats, Ints
from offramp.runtime.errors import InputError
from offramp.runtime.online.betting import STAKES, mixed, spent
from offramp.runtime.online.window import Window

WATCHED = ("exit", "score", "coverage", "risk", "agreement")
TENTHS = 10
TOLERANCE = 0.02


@dataclass(frozen=True)
class Signal:
    """An alarm. what: the thing watched. category: which share, e.g. the exit. share: what it was over the last `rows`
    rows, the ones that decided; low, high: its limits. e_value against `needed`."""

    what: str
    category: int
    share: float
    low: float
    high: float
    rows: int
    e_value: float
    needed: float

    def __str__(self) -> str:
        return (
            f"{self.what} {self.category}: {self.share:.1%} of the last {self.rows} rows, outside "
            f"[{self.low:.1%}, {self.high:.1%}] (e-value {self.e_value:.3g}, {self.needed:.3g} needed)."
        )


@dataclass
class _Since:
    """How often each category came since a moment; its bets' level."""

    level: float
    rows: int
    counts: Floats


@dataclass
class ShareAlarm:
    """Watches the shares of K categories.

    low, high: (K,) limits that each share may lie between. alpha: of a false alarm, ever. every: rows between two
    beginnings. most: of the newest bets that are followed, beside the first.
    """

    what: str
    low: Floats
    high: Floats
    alpha: float = 0.05
    every: int = 2000
    most: int = 64
    _bets: list[_Since] = field(default_factory=list)
    _begun: int = 0
    _rows: int = 0

    def __post_init__(self) -> None:
        self.low, self.high = (np.clip(np.asarray(limit, np.float64), 0, 1) for limit in (self.low, self.high))
        arrays.fraction(self.alpha, "alpha")
        if self.low.shape != self.high.shape or self.low.ndim != 1 or not (self.low <= self.high).all():
            raise InputError("low, high: expected one shape (categories,), low ≤ high.")
        if not (self.every >= 1 and self.most >= 1):
            raise InputError("every, most: expected numbers of at least 1.")

    def update(self, categories: ArrayLike) -> Signal | None:
        """Take (n,) more rows' categories, oldest first, and say whether the shares left their limits.

        A category that isn't in [0, K) is a row of none of them. Rows that weigh unequally must be thinned before.
        """
        seen = np.asarray(categories, np.int64)
        worst: Signal | None = None
        start = 0
        while start < len(seen):
            if self._rows % self.every == 0:
                self._begun += 1
                self._bets.append(_Since(spent(self.alpha, self._begun), 0, np.zeros(len(self.low))))
                if len(self._bets) > self.most + 1:
                    del self._bets[1]
            stop = min(len(seen), start + self.every - self._rows % self.every)
            part = seen[start:stop]
            inside = part[(part >= 0) & (part < len(self.low))]
            counts = arrays.group_sums(inside, None, len(self.low))
            for bet in self._bets:
                bet.rows += len(part)
                bet.counts += counts
            self._rows += len(part)
            start = stop
            found = self._judged()
            if found is not None and (worst is None or found.e_value > worst.e_value):
                worst = found
        return worst

    def _judged(self) -> Signal | None:
        best: Signal | None = None
        for bet in self._bets:
            wealth = self._log_wealth(bet)
            if mixed(mixed(wealth)) >= -math.log(bet.level):
                category = int(mixed(wealth).argmax()) % len(self.low)
                value = math.exp(min(float(mixed(mixed(wealth))), 700.0))
                if best is None or value * bet.level > best.e_value / best.needed:
                    share = float(bet.counts[category] / bet.rows)
                    low, high = float(self.low[category]), float(self.high[category])
                    best = Signal(self.what, category, share, low, high, bet.rows, value, 1 / bet.level)
        return best

    def _log_wealth(self, bet: _Since) -> Floats:
        """(2K, stakes): that each share is above its high limit, then that it is below its low one.

        A hit wins (1 − h)/h and a miss loses the stake, or the other way round; at a limit of 0 or 1, which nothing can
        be beyond, nothing is won.
        """
        hits, rows = bet.counts[:, None], bet.rows
        high, low = self.high[:, None], self.low[:, None]
        with np.errstate(divide="ignore"):
            above = hits * np.log1p(STAKES * (1 - high) / np.maximum(high, 1e-12)) + (rows - hits) * np.log1p(-STAKES)
            below = (rows - hits) * np.log1p(STAKES * low / np.maximum(1 - low, 1e-12)) + hits * np.log1p(-STAKES)
        return np.concatenate([above, below])


def limits(counts: ArrayLike, tolerance: float = TOLERANCE, delta: float = 0.05) -> tuple[Floats, Floats]:
    """(K,) low and (K,) high limits of shares that were seen in a reference sample, `tolerance` beyond what is unsure.

    counts: (K,) of all the sample's rows. Chernoff's interval, n·kl(k/n, p) ≤ ln(2K/δ), holds for all K with
    probability at least 1 − delta.
    """
    k = arrays.numbers(counts, "counts")
    n = float(k.sum())
    if not n > 0:
        raise InputError("counts: expected at least one row.")
    delta = arrays.fraction(delta, "delta")
    share, reach = k / n, math.log(2 * len(k) / delta) / n

    def end(far: float) -> Floats:
        near, away = share.copy(), np.full(len(k), far)
        for _ in range(60):
            middle = (near + away) / 2
            p = np.clip(middle, 1e-300, 1 - 1e-16)
            with np.errstate(divide="ignore", invalid="ignore"):
                left = np.where(share > 0, share * np.log(share / p), 0.0)
                right = np.where(share < 1, (1 - share) * np.log((1 - share) / (1 - p)), 0.0)
            inside = left + right <= reach
            near, away = np.where(inside, middle, near), np.where(inside, away, middle)
        return away

    return np.maximum(end(0.0) - tolerance, 0.0), np.minimum(end(1.0) + tolerance, 1.0)


# ---------------------------------------------------------------- of a served cascade


@dataclass
class Alarms:
    """All that is watched of one operating point. edges: (9,) between the tenths of the reference's served scores.

    heaviest: what a row weighs at most, by what is watched. Rows are thinned at random to weigh equally, and one that
    weighs more is taken for one of these.
    """

    alarms: Mapping[str, ShareAlarm]
    edges: Floats
    heaviest: Mapping[str, float]
    _random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @classmethod
    def of(
        cls,
        reference: Window,
        *,
        risk: float | None = None,
        alpha: float = 0.05,
        tolerance: float = TOLERANCE,
        only: Collection[str] = WATCHED,
    ) -> "Alarms":
        """From rows that show what is usual; risk: the promised one, default that of the reference.

        α is shared out evenly over the five, half of each for the reference's own uncertainty. only: which of them.
        """
        every = np.arange(len(reference))
        scored = _served_score(reference, every) if "score" in only else np.zeros(1)
        made = cls({}, np.quantile(scored, np.arange(1, TENTHS) / TENTHS), _heaviest(reference))
        part = alpha / len(WATCHED)
        alarms = {}
        for what in only:
            seen, size = made._categories(what, reference, every)
            counts = np.bincount(np.where((seen >= 0) & (seen < size), seen, size), minlength=size + 1)
            if what == "risk" and risk is not None:
                low, high = np.zeros(1), np.array([risk])
            elif len(seen):
                low, high = (limit[:size] for limit in limits(counts, tolerance, part / 2))
            else:  # nothing known, nothing unusual
                low, high = np.zeros(size), np.ones(size)
            if what == "risk":
                low = np.zeros(1)
            alarms[what] = ShareAlarm(what, low, high, part / 2)
        made.alarms = alarms
        return made

    def update(self, rows: Window, at: Ints | None = None) -> list[Signal]:
        """Take rows that came since, each once, and say what is out of its limits.

        A row counts for risk when it is labelled, for agreement when it left early and was run to the end. A caller
        whose labels or shadow runs come late passes those rows again to alarms on these alone. at: row numbers, in the
        order in which they count; default all.
        """
        return [one for what in self.alarms if (one := self.update_one(what, rows, at)) is not None]

    def update_one(self, what: str, rows: Window, at: Ints | None = None) -> Signal | None:
        """Take rows for one of them alone: "exit", "score", "coverage", "risk" or "agreement"."""
        if what not in self.alarms:
            raise InputError(f"what: expected one of {', '.join(self.alarms)}, got {what!r}.")
        return self.alarms[what].update(self._categories(what, rows, np.arange(len(rows)) if at is None else at)[0])

    def _categories(self, what: str, rows: Window, at: Ints) -> tuple[Ints, int]:
        """Each row's category, of those that count, and how many there are; a share of one is that of zeros.

        Logits are read of rows that have to be compared, and of no others.
        """
        at = at[counting(what, rows, at)]
        if what == "exit":
            return rows.exit[at], rows.exits
        if what == "score":
            return np.searchsorted(self.edges, _served_score(rows, at)).astype(np.int64), TENTHS
        if what == "coverage":
            return rows.abstained[at].astype(np.int64), 1
        at = self._even(at, 1 / _chance(what, rows)[at], self.heaviest[what])
        served = scores.top_label(rows.logits[rows.exit[at], at])
        if what == "risk":
            return (served == rows.label[at]).astype(np.int64), 1
        return (served != scores.top_label(rows.logits[-1, at])).astype(np.int64), 1

    def _even(self, at: Ints, weights: Floats, heaviest: float) -> Ints:
        """Those of the rows that stand for equally many each."""
        if not len(at) or weights.min() >= heaviest:
            return at
        return at[self._random.random(len(at)) * heaviest < weights]


def counting(what: str, rows: Window, at: Ints) -> Bools:
    """(len(at),) whether a row counts: for risk when labelled and answered, for agreement an early leaver run to the
    end, otherwise any."""
    if what == "risk":
        return np.asarray((rows.label[at] >= 0) & ~rows.abstained[at])
    if what == "agreement":
        return np.asarray((rows.exit[at] < rows.exits - 1) & ~np.isnan(rows.score[:, at]).any(axis=0))
    return np.ones(len(at), bool)


def _served_score(rows: Window, at: Ints) -> Array:
    return np.asarray(rows.score[rows.exit[at], at], np.float64)


def _chance(what: str, rows: Window) -> Floats:
    """(n,) with which probability a row's label was sought, or its remaining exits were run; NaN and 0 count as 1."""
    chance = rows.asked if what == "risk" else rows.shadow
    return np.asarray(np.where(chance > 0, chance, 1.0))


def _heaviest(reference: Window) -> dict[str, float]:
    return {what: float((1 / _chance(what, reference)).max(initial=1.0)) for what in ("risk", "agreement")}
