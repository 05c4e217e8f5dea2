"""The cheapest thresholds whose accuracy is at most so far below the full model's, on the rows at hand."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Array, Bools, Floats, Ints
from offramp.runtime.errors import InputError
from offramp.runtime.thresholds.exit_share import (
    cascade_inputs,
    geometric_shares,
    thresholds_for_shares,
)
from offramp.runtime.thresholds.rule import leave_at, reached

INF = float("inf")
# Three exits are searched exhaustively up to this many rows: rows² pairs at worst, by branch and bound.
EXACT_ROWS = 10_000


@dataclass(frozen=True)
class FrontierPoint:
    """Thresholds that nothing found beats in both cost and drop.

    cost: fraction of the full model's mean cost. drop: full accuracy − accuracy, on the rows used.
    """

    thresholds: tuple[float, ...]
    cost: float
    drop: float


@dataclass(frozen=True)
class AccuracyTarget:
    """The cheapest thresholds found with drop + standard_errors·SE ≤ target; at worst those of the full model.

    cost, drop, standard_error: on the rows used; a plain estimate, not a guarantee (see `risk_control`).
    exact: whether no thresholds at all are cheaper within the target. saves: whether cost < 1.
    frontier: points from costliest to cheapest.
    """

    thresholds: tuple[float, ...]
    cost: float
    drop: float
    standard_error: float
    target: float
    exact: bool
    saves: bool
    frontier: tuple[FrontierPoint, ...]


@dataclass(frozen=True)
class _Problem:
    """Per row and exit: cost as a share of the full mean, and accuracy lost against the last exit (−1, 0, 1)."""

    scores: Array
    cost: Floats
    loss: Floats
    orders: Ints  # (J − 1, N) rows by falling score at each exit
    target: float
    margin: float

    def outcome(self, bars: Array, start: int = 0) -> tuple[Floats, Floats]:
        """(N,) cost and loss of every row under thresholds, when it has come as far as exit `start`."""
        exits = start + leave_at(self.scores[start:], bars[start:])
        rows = np.arange(self.scores.shape[1])
        return self.cost[exits, rows], self.loss[exits, rows]

    def allowed(self, total: Floats, squares: Floats) -> Bools:
        """Whether drop + margin·SE ≤ target, from Σ loss and Σ loss²."""
        n = self.scores.shape[1]
        mean = total / n
        error = np.sqrt(np.maximum(squares / n - mean**2, 0.0) / n)
        return np.asarray(mean + self.margin * error <= self.target + 1e-12)

    def line(self, bars: Array, j: int) -> tuple[Floats, Floats, Floats, Floats]:
        """All thresholds at exit j with the others fixed: (K,) thresholds, cost, Σ loss, Σ loss².

        The first is +inf (nobody leaves), then each distinct score among the rows that come this far.
        """
        rows = np.arange(self.scores.shape[1])
        arrived = np.ones(len(rows), bool)
        for i in range(j):
            arrived &= ~reached(self.scores[i], float(bars[i]))
        early_cost, early_loss = self.outcome(bars)
        later_cost, later_loss = self.outcome(bars, j + 1)
        base = np.where(arrived, [later_cost, later_loss], [early_cost, early_loss])
        order = self.orders[j][arrived[self.orders[j]]]
        s = self.scores[j, order].astype(np.float64)
        ends = np.flatnonzero(np.append(s[1:] != s[:-1], True)) if len(s) else np.zeros(0, np.int64)

        def path(now: Floats, later: Floats, total: float) -> Floats:
            return total + np.append(0.0, np.cumsum(now[order] - later[order])[ends])

        return (
            np.append(INF, s[ends]),
            path(self.cost[j], later_cost, float(base[0].sum())),
            path(self.loss[j], later_loss, float(base[1].sum())),
            path(self.loss[j] ** 2, later_loss**2, float((base[1] ** 2).sum())),
        )


def accuracy_target(
    scores: ArrayLike,
    correct: ArrayLike,
    flops: ArrayLike,
    drop: float = 0.01,
    *,
    standard_errors: float = 1.0,
    steps: int = 24,
) -> AccuracyTarget:
    """The cheapest thresholds with accuracy drop ≤ `drop`, by a margin of `standard_errors` of its own error.

    scores, correct: (J, N). flops: (J,) or (J, N) cumulative cost. drop ≥ 0, of the last exit's accuracy on
    the same rows. Up to three exits (and 10,000 rows for three) every threshold is tried. Beyond, coordinate
    descent: each step tries every threshold of one exit with the others fixed, for `steps` prices of
    accuracy from several starts, then within the target; the frontier of all it met is kept.
    """
    s, cost = cascade_inputs(scores, flops)
    right = np.asarray(correct)
    if right.shape != s.shape:
        raise InputError(f"correct: expected shape {s.shape}, as scores has, got {right.shape}.")
    right = arrays.flags(right.reshape(-1), "correct").reshape(s.shape)
    if not drop >= 0 or not standard_errors >= 0:
        raise InputError("drop, standard_errors: expected numbers ≥ 0.")
    exits, rows = s.shape
    full = (*(INF,) * (exits - 1), -INF)
    if exits == 1 or not rows or not cost[-1].any():
        point = FrontierPoint(full, 1.0, 0.0)
        return AccuracyTarget(full, 1.0, 0.0, 0.0, drop, True, False, (point,))
    loss = right[-1].astype(np.float64) - right
    orders = np.argsort(-s[:-1].astype(np.float64), axis=1, kind="stable")
    problem = _Problem(s, cost / cost[-1].mean(), loss, orders, drop, standard_errors)
    exact = exits == 2 or (exits == 3 and rows <= EXACT_ROWS)
    candidates = list(_every_pair(problem) if exact else _descend(problem, steps))
    return _answer(problem, candidates, full, exact)


def _answer(
    problem: _Problem, candidates: list[tuple[float, ...]], full: tuple[float, ...], exact: bool
) -> AccuracyTarget:
    n = problem.scores.shape[1]
    best, found = full, (1.0, 0.0, 0.0)
    points = [FrontierPoint(full, 1.0, 0.0)]
    for bars in dict.fromkeys(candidates):
        spent, lost = problem.outcome(np.array(bars))
        cost, drop = float(spent.mean()), float(lost.mean())
        points.append(FrontierPoint(bars, cost, drop))
        allowed = problem.allowed(np.array(lost.sum()), np.array((lost**2).sum()))
        if allowed and cost < found[0]:
            best, found = bars, (cost, drop, float(lost.std() / np.sqrt(n)))
    return AccuracyTarget(best, *found, problem.target, exact, found[0] < 1.0, pareto(points))


def pareto(points: list[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """The points that no other beats in both cost and drop, from costliest to cheapest."""
    kept: list[FrontierPoint] = []
    lowest = INF
    for point in sorted(points, key=lambda p: (p.cost, p.drop)):
        if point.drop < lowest:
            kept.append(point)
            lowest = point.drop
    return tuple(reversed(kept))


def _line_points(problem: _Problem, bars: Array, j: int) -> Iterator[tuple[float, ...]]:
    """The cheapest allowed threshold of exit j, and the line's own frontier, thinned to 32 points."""
    at, cost, total, squares = problem.line(bars, j)
    allowed = np.flatnonzero(problem.allowed(total, squares))
    chosen = [int(allowed[cost[allowed].argmin()])] if len(allowed) else []
    order = np.lexsort((total, cost))
    lowest = np.minimum.accumulate(total[order])
    front = order[np.append(True, lowest[1:] < lowest[:-1])]
    chosen += front[np.unique(np.linspace(0, len(front) - 1, 32).astype(np.int64))].tolist()
    for k in dict.fromkeys(chosen):
        one = bars.copy()
        one[j] = at[k]
        yield tuple(one.tolist())


def _every_pair(problem: _Problem) -> Iterator[tuple[float, ...]]:
    """Exhaustive for two or three exits. Yields the best allowed, and points along the frontier."""
    exits = len(problem.scores)
    if exits == 2:
        yield from _line_points(problem, np.array([INF, -INF]), 0)
        return
    first, cost_floor, loss_floor = _floors(problem)
    for k in np.unique(np.linspace(0, len(first) - 1, 64).astype(np.int64)):
        yield from _line_points(problem, np.array([first[k], INF, -INF]), 1)
    best, best_bars = INF, None
    possible = np.flatnonzero(loss_floor <= (problem.target + 1e-12) * problem.scores.shape[1])
    for k in possible[np.argsort(cost_floor[possible], kind="stable")]:
        if cost_floor[k] >= best:
            break
        at, cost, total, squares = problem.line(np.array([first[k], INF, -INF]), 1)
        allowed = np.flatnonzero(problem.allowed(total, squares))
        if len(allowed):
            m = allowed[cost[allowed].argmin()]
            if cost[m] < best:
                best, best_bars = float(cost[m]), (float(first[k]), float(at[m]), -INF)
    if best_bars is not None:
        yield best_bars


def _floors(problem: _Problem) -> tuple[Floats, Floats, Floats]:
    """Each threshold of the first of three exits, with the least total cost and loss that any second one gives.

    At best the rows that go on all leave at the second exit, and lose only where that gains.
    """
    s = problem.scores[0, problem.orders[0]].astype(np.float64)
    ends = np.flatnonzero(np.append(s[1:] != s[:-1], True))

    def floor(now: Floats, later: Floats) -> Floats:
        return float(later.sum()) + np.append(0.0, np.cumsum((now - later)[problem.orders[0]])[ends])

    return (
        np.append(INF, s[ends]),
        floor(problem.cost[0], problem.cost[1]),
        floor(problem.loss[0], np.minimum(problem.loss[1], 0.0)),
    )


def _descend(problem: _Problem, steps: int) -> Iterator[tuple[float, ...]]:
    exits = len(problem.scores)
    full = np.array([INF] * (exits - 1) + [-INF])
    starts = [np.array(thresholds_for_shares(problem.scores, geometric_shares(exits, q))) for q in (-1.0, 0.0, 1.0)]
    best, cheapest = full, INF
    # A unit of accuracy is worth from a tenth of the full cost to a thousand times it.
    for price in np.geomspace(0.1, 1000.0, steps):
        for start in (full, *starts):
            bars = _coordinate(problem, start.copy(), float(price))
            yield tuple(bars.tolist())
            spent, lost = problem.outcome(bars)
            if problem.allowed(np.array(lost.sum()), np.array((lost**2).sum())) and spent.mean() < cheapest:
                best, cheapest = bars, float(spent.mean())
    polished = _in_pairs(problem, _coordinate(problem, best.copy(), None))
    yield tuple(polished.tolist())
    for j in range(exits - 1):
        yield from _line_points(problem, polished, j)


def _in_pairs(problem: _Problem, bars: Array) -> Array:
    """Within the target, one exit to each of up to 24 thresholds while another answers with its best, as long as
    that saves: what moving exits one by one can't reach, because the target lies between."""
    early = len(bars) - 1
    cheapest = float(problem.outcome(bars)[0].mean())
    for _ in range(4):
        before, found = cheapest, bars
        for i in range(early):
            values = np.unique(problem.scores[i].astype(np.float64))
            for value in np.append(values[np.unique(np.linspace(0, len(values) - 1, 24).astype(np.int64))], INF):
                for j in range(early):
                    if j == i:
                        continue
                    moved = bars.copy()
                    moved[i] = value
                    at, cost, total, squares = problem.line(moved, j)
                    within = np.flatnonzero(problem.allowed(total, squares))
                    if not len(within):
                        continue
                    k = int(within[cost[within].argmin()])
                    moved[j] = at[k]
                    spent = float(problem.outcome(moved)[0].mean())
                    if spent < cheapest - 1e-12:
                        cheapest, found = spent, moved
        bars = _coordinate(problem, found.copy(), None)
        cheapest = float(problem.outcome(bars)[0].mean())
        if cheapest >= before - 1e-12:
            break
    return bars


def _coordinate(problem: _Problem, bars: Array, price: float | None) -> Array:
    """One exit after another to its best threshold, until nothing moves.

    price: minimise cost + price·drop; None: minimise cost within the target.
    """
    value = INF
    for _ in range(20):
        before = value
        for j in range(len(bars) - 1):
            at, cost, total, squares = problem.line(bars, j)
            within = problem.allowed(total, squares)
            goal = np.where(within, cost, INF) if price is None else cost + price * total
            k = int(goal.argmin())
            if goal[k] < value:
                value, bars[j] = float(goal[k]), at[k]
        if value >= before - 1e-12:
            break
    return bars
