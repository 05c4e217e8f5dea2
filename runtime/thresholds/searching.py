"""Exit rules with one dial and a set of open exits: few enough for a thousand rows not to be fitted in their noise.

The one search for rules: `accuracy_target`, `joint_choice` and every target of the calibration job choose from it.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Array, Bools, Floats
from offramp.runtime.errors import InputError
from offramp.runtime.thresholds.exit_share import cascade_inputs, geometric_shares, thresholds_for_shares
from offramp.runtime.thresholds.one_dial import (
    MOST_EXITS_FOR_ALL_SETS,
    along,
    between_rows,
    between_values,
    exit_sets,
)
from offramp.runtime.thresholds.rule import leave_at

INF = float("inf")
STEPS = 200
# Costs that differ by less are equal: a head more or less, a batch more or less.
EQUAL_COST = 0.02
# Curves (a family over a set of exits) that are kept: those that come within noise of the best somewhere.
MOST_CURVES = 40
# A beam this wide where there are too many exits for all sets, judged at so many prices of a point of accuracy.
BEAM, PRICES = 24, np.geomspace(0.3, 300.0, 8)
# Shares are quantiles: more rows than this don't move them.
ROWS_FOR_SHARES = 5000

ExitCost = Callable[[tuple[int, ...]], Array]
"""(J,) or (J, N) cumulative cost of leaving at each exit when these exits, the last among them, are open."""


@dataclass(frozen=True)
class Rule:
    """Thresholds, with what they do on the rows that proposed them.

    family: what turns with the dial, and the early exits that are open: "equal score at 0, 2", one score for all of
    them; "equal confidence", the same after a map of each exit's; "exit shares", share_j ∝ q^j; "everybody at 1".
    cost: fraction of the full mean. cost_error: a standard error of it.
    drop: accuracy lost; lost: share of rows that the full model has right and the rule wrong. margin: a standard error
    of the drop, counting one row more than seen to differ: no difference among few rows is no proof of none.
    """

    family: str
    thresholds: tuple[float, ...]
    cost: float
    drop: float
    lost: float
    margin: float
    cost_error: float = 0.0

    @property
    def exits(self) -> tuple[int, ...]:
        """The exits that can answer."""
        last = self.thresholds.index(-INF)
        return tuple(j for j, bar in enumerate(self.thresholds[: last + 1]) if bar != INF)

    @property
    def complexity(self) -> tuple[int, int]:
        """Exits that can answer, then thresholds to be kept: of rules equal within noise the simplest wins."""
        return len(self.exits), sum(np.isfinite(bar) for bar in self.thresholds)

    def drop_in_hand(self, standard_errors: float) -> float:
        """The drop, with standard errors in hand. What leaving early seems to gain counts only beyond one more."""
        gained = self.drop + (standard_errors + 1) * self.margin
        return min(max(self.drop, 0.0) + standard_errors * self.margin, gained)


def search(
    scores: ArrayLike,
    correct: ArrayLike,
    flops: ArrayLike,
    *,
    maps: tuple[ArrayLike, ArrayLike] | None = None,
    exit_cost: ExitCost | None = None,
) -> tuple[Rule, ...]:
    """Rules of all families over sets of open exits; the first is `full`.

    scores, correct: (J, N). flops: (J,) or (J, N), cumulative cost. Everybody at one exit is among the rules, and every
    set of exits that comes within noise of the best anywhere, as whole curves from the costliest to the cheapest: all
    sets up to 10 exits, a beam beyond. No threshold lies on a row's score.
    maps: slopes and intercepts, (J − 1,) each, that make the early exits' scores comparable, e.g. log-odds of being
    right: the family "equal confidence". An exit whose slope isn't above 0 stays closed in it.
    exit_cost: where closing an exit changes what the others cost.
    """
    s, cost = cascade_inputs(scores, flops)
    right = correctness(correct, s)
    pair = None
    if maps is not None:
        slopes, shifts = (np.asarray(one, np.float64) for one in maps)
        if not slopes.shape == shifts.shape == (len(s) - 1,) or not (np.isfinite(slopes) & np.isfinite(shifts)).all():
            raise InputError(f"maps: expected slopes and intercepts, {len(s) - 1} finite numbers each.")
        pair = slopes, shifts
    return tuple(_Search(s, right, cost, pair, exit_cost).rules())


def correctness(correct: ArrayLike, scores: Array) -> Bools:
    """(J, N) booleans. InputError for another shape than the scores', or anything but 0 and 1."""
    right = np.asarray(correct)
    if right.shape != scores.shape:
        raise InputError(f"correct: expected shape {scores.shape}, as scores has, got {right.shape}.")
    return arrays.flags(right.reshape(-1), "correct").reshape(scores.shape)


def cheapest_within(rules: Sequence[Rule], drop: float, standard_errors: float) -> Rule | None:
    """The cheapest rule with at most this drop and so many standard errors in hand; the simplest of equally cheap ones.

    None where no rule but the full model keeps it.
    """
    within = [rule for rule in rules if rule.drop_in_hand(standard_errors) <= drop + 1e-12]
    cheapest = min((rule.cost for rule in within), default=1.0)
    alike = [rule for rule in within if rule.cost <= cheapest * (1 + EQUAL_COST)]
    best = min(alike, key=lambda rule: (rule.complexity, rule.cost, rule.drop), default=None)
    return best if best is not None and best.cost < 1 else None


def pareto(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules that no other beats in both cost and drop, from costliest to cheapest."""
    kept: list[Rule] = []
    lowest = INF
    for rule in sorted(rules, key=lambda rule: (rule.cost, rule.drop)):
        if rule.drop < lowest:
            kept.append(rule)
            lowest = rule.drop
    return tuple(reversed(kept))


def judge(family: str, bars: Sequence[float], score: Array, correct: Bools, cost: Floats) -> Rule:
    """A rule's figures on some rows; without rows NaN, and nothing in hand."""
    rows = np.arange(score.shape[1])
    thresholds = tuple(float(b) for b in bars)
    if not len(rows):
        return Rule(family, thresholds, np.nan, np.nan, np.nan, np.inf, np.nan)
    left = leave_at(score, np.asarray(bars))
    drop = correct[-1].astype(np.float64) - correct[left, rows]
    whole = float(cost[-1].mean()) or 1.0
    spent = cost[left, rows] / whole
    ratio = float(spent.mean())
    return Rule(
        family=family,
        thresholds=thresholds,
        cost=ratio,
        drop=float(drop.mean()),
        lost=float((drop > 0).mean()),
        margin=float(np.sqrt((drop**2).sum() + 1.0)) / len(rows),
        cost_error=float((spent - ratio * cost[-1] / whole).std()) / np.sqrt(len(rows)),
    )


@dataclass(frozen=True)
class _Curve:
    """One family over one set of open exits: (K,) figures along the dial, and the thresholds at each bar."""

    family: str
    opened: tuple[int, ...]
    bars: Floats
    threshold_of: Callable[[float, int], float]  # bar, exit
    cost: Floats
    drop: Floats
    lost: Floats
    squares: Floats
    cost_error: Floats


class _Search:
    def __init__(
        self,
        score: Array,
        correct: Bools,
        cost: Floats,
        maps: tuple[Floats, Floats] | None,
        exit_cost: ExitCost | None,
    ) -> None:
        self._score, self._correct, self._cost, self._given = score, correct, cost, maps
        self._exits, self._rows = score.shape
        self._exit_cost = exit_cost
        self._full = (*(INF,) * (self._exits - 1), -INF)
        whole = self._costs((self._exits - 1,))[-1]
        self._whole = float(whole.mean()) if self._rows else 1.0
        self._whole = self._whole or 1.0
        self._spent_in_full = whole / self._whole

    def _costs(self, opened: tuple[int, ...]) -> Floats:
        """(J, N) cumulative cost with these exits open."""
        if self._exit_cost is None:
            return self._cost
        given = np.asarray(self._exit_cost(opened), np.float64)
        return np.broadcast_to(given[:, None], self._score.shape) if given.ndim == 1 else given

    def rules(self) -> list[Rule]:
        last = self._exits - 1
        found = [judge("full", self._full, self._score, self._correct, self._costs((last,)))]
        if last == 0 or not self._rows:
            return found
        for j in range(last):
            bars = (*(INF,) * j, -INF, *(INF,) * (last - j - 1), -INF)
            found.append(self._judged(f"everybody at {j}", bars, (j,)))
        maps = self._maps()
        curves = self._near_the_best([*self._curves(maps)])
        taken = {rule.thresholds for rule in found}
        for rule in itertools.chain.from_iterable(map(self._rows_of, curves)):
            if rule.thresholds not in taken:
                taken.add(rule.thresholds)
                found.append(rule)
        for opened in dict.fromkeys(curve.opened for curve in curves):
            if len(opened) > 1:
                for rule in self._by_shares(opened):
                    if rule.thresholds not in taken:
                        taken.add(rule.thresholds)
                        found.append(rule)
        return found

    def _judged(self, family: str, bars: Sequence[float], opened: tuple[int, ...]) -> Rule:
        return judge(family, bars, self._score, self._correct, self._costs((*opened, self._exits - 1)))

    # ------------------------------------------------------------ curves

    def _maps(self) -> list[tuple[str, Floats, Floats]]:
        """The families with one bar: each exit's slope and intercept give what the bar is compared with."""
        ones, zeros = np.ones(self._exits - 1), np.zeros(self._exits - 1)
        own = [] if self._given is None else [("equal confidence", *self._given)]
        return [("equal score", ones, zeros), *own]

    def _curves(self, maps: list[tuple[str, Floats, Floats]]) -> Iterable[_Curve]:
        early = self._score[:-1].astype(np.float64)
        for name, slopes, shifts in maps:
            # Where the score says nothing of being right no threshold is safe: such an exit stays closed.
            usable = [j for j in range(len(early)) if slopes[j] > 0]
            mapped = slopes[:, None] * early + shifts[:, None]
            bars = between_values(mapped[usable], STEPS) if usable else np.zeros(0)
            if not len(bars):
                continue
            allowed = set(usable)
            sets = (
                exit_sets(self._exits) if self._exits <= MOST_EXITS_FOR_ALL_SETS else self._beam(mapped, bars, allowed)
            )
            for opened in sets:
                single_twice = len(opened) == 1 and name != "equal score"  # one bar at one exit is the same rule
                if opened and allowed.issuperset(opened) and not single_twice:
                    yield self._curve(name, opened, mapped, bars, slopes, shifts)

    def _curve(
        self, name: str, opened: tuple[int, ...], mapped: Floats, bars: Floats, slopes: Floats, shifts: Floats
    ) -> _Curve:
        asked = [*opened, self._exits - 1]
        spent = self._costs(tuple(asked))[asked] / self._whole
        drop = self._correct[-1].astype(np.float64) - self._correct[asked]
        sums, leaving = along(
            mapped[list(opened)],
            {
                "cost": spent,
                "cost2": spent**2,
                "cross": spent * self._spent_in_full,
                "drop": drop,
                "lost": np.maximum(drop, 0.0),
                "squares": drop**2,
            },
            bars,
        )
        used = (leaving > 0).all(axis=0)  # elsewhere it is a smaller set's rule
        n = self._rows
        mean, second, cross = (sums[key][used] / n for key in ("cost", "cost2", "cross"))
        # Of the ratio of two means.
        variance = second - 2 * mean * cross + mean**2 * float((self._spent_in_full**2).mean())
        return _Curve(
            family=f"{name} at {', '.join(map(str, opened))}",
            opened=opened,
            bars=bars[used],
            threshold_of=lambda bar, j: float((bar - shifts[j]) / slopes[j]),
            cost=mean,
            drop=sums["drop"][used] / n,
            lost=sums["lost"][used] / n,
            squares=sums["squares"][used],
            cost_error=np.sqrt(np.maximum(variance, 0.0) / n),
        )

    def _beam(self, mapped: Floats, bars: Floats, allowed: set[int]) -> list[tuple[int, ...]]:
        """Sets that grow by an exit at a time; at each size those that are best at some price of accuracy go on."""
        drop = self._correct[-1].astype(np.float64) - self._correct
        kept: list[tuple[int, ...]] = [()]
        found: dict[tuple[int, ...], None] = {}
        for _ in range(min(len(allowed), MOST_EXITS_FOR_ALL_SETS)):
            grown = {tuple(sorted({*opened, j})) for opened in kept for j in allowed if j not in opened}
            values = {}
            for opened in grown:
                asked = [*opened, self._exits - 1]
                spent = self._costs(tuple(asked))[asked] / self._whole
                sums, _ = along(mapped[list(opened)], {"cost": spent, "drop": drop[asked]}, bars)
                worth = sums["cost"] + PRICES[:, None] * sums["drop"]
                values[opened] = worth.min(axis=1)
            kept = list(
                dict.fromkeys(
                    opened
                    for k in range(len(PRICES))
                    for opened in heapq.nsmallest(BEAM // len(PRICES) + 1, values, key=lambda one: values[one][k])
                )
            )
            found |= dict.fromkeys(kept)
        return list(found)

    def _near_the_best(self, curves: list[_Curve]) -> list[_Curve]:
        """Curves that come within a standard error of the best at some cost; those that do so most often."""
        curves = [curve for curve in curves if len(curve.bars)]
        if not curves:
            return []
        cost = np.concatenate([curve.cost for curve in curves])
        drop = np.concatenate([curve.drop for curve in curves])
        order = np.argsort(cost, kind="stable")
        best = np.minimum.accumulate(drop[order])
        near = []
        for curve in curves:
            at = np.searchsorted(cost[order], curve.cost, side="right") - 1
            error = np.sqrt(curve.squares + 1.0) / self._rows
            near.append(int((curve.drop <= best[at] + error).sum()))
        ranked = sorted(range(len(curves)), key=lambda k: (-near[k], len(curves[k].opened)))
        chosen = [k for k in ranked if near[k]][:MOST_CURVES]
        return [curves[k] for k in sorted(chosen)]

    def _rows_of(self, curve: _Curve) -> Iterable[Rule]:
        for k, bar in enumerate(curve.bars):
            thresholds = [INF] * (self._exits - 1)
            for j in curve.opened:
                thresholds[j] = curve.threshold_of(float(bar), j)
            yield Rule(
                family=curve.family,
                thresholds=(*thresholds, -INF),
                cost=float(curve.cost[k]),
                drop=float(curve.drop[k]),
                lost=float(curve.lost[k]),
                margin=float(np.sqrt(curve.squares[k] + 1.0)) / self._rows,
                cost_error=float(curve.cost_error[k]),
            )

    # ------------------------------------------------------------ exit shares

    def _by_shares(self, opened: tuple[int, ...]) -> Iterable[Rule]:
        asked = [*opened, self._exits - 1]
        few = np.unique(np.linspace(0, self._rows - 1, ROWS_FOR_SHARES).astype(np.int64))
        score = self._score[asked][:, few]
        family = f"exit shares at {', '.join(map(str, opened))}"
        steps = STEPS // 2 if self._rows <= ROWS_FOR_SHARES else STEPS // 5
        for log_q in 12 * np.linspace(-1, 1, steps + 1) ** 3:
            shared = thresholds_for_shares(score, geometric_shares(len(asked), float(log_q)))
            bars = dict(zip(asked, between_rows(score, shared), strict=True))
            if all(bars[j] != INF for j in opened):
                yield self._judged(family, [bars.get(j, INF) for j in range(self._exits)], opened)
