"""Exit shares by budget: how many rows leave where, so that the mean cost meets a budget (Huang et al. 2018)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Array, Floats, Ints
from offramp.runtime.errors import InputError
from offramp.runtime.thresholds.rule import leave_at

# Shares written as decimals may sum to a little more than 1.
_SLACK = 1e-6


@dataclass(frozen=True)
class ExitShare:
    """Thresholds that spread the rows as share_j = q^j / Σ q^l over the exits.

    thresholds: one an exit, leave at the first j with score_j ≥ thresholds[j]; the last is −inf.
    q: the ratio between one exit's share and the one before it.
    cost: mean cost a row on the given rows, as a fraction of the full model's.
    shares: (J,) fraction of rows that really leave at each exit; ties may move them off the plan.
    budget_met: whether cost ≤ budget; False when even leaving everything as early as ties allow costs more.
    """

    thresholds: tuple[float, ...]
    q: float
    cost: float
    budget: float
    shares: tuple[float, ...]
    budget_met: bool


def cascade_inputs(scores: ArrayLike, flops: ArrayLike) -> tuple[Array, Floats]:
    """Checked (J, N) scores and (J, N) cumulative cost (a (J,) cost is broadcast)."""
    s = np.asarray(scores)
    if s.ndim != 2 or not s.shape[0]:
        raise InputError(f"scores: expected shape (exits, rows), got {s.shape}.")
    if s.dtype.kind not in "fiu":
        raise InputError(f"scores: expected numbers, got dtype {s.dtype}.")
    if s.dtype.kind != "f":
        s = s.astype(np.float64)
    arrays.refuse_nan(np.isnan(s).any(axis=0), "scores")
    cost = arrays.numbers(flops, "flops")
    if cost.shape == s.shape[:1]:
        cost = np.broadcast_to(cost[:, None], s.shape)
    if cost.shape != s.shape:
        raise InputError(f"flops: expected shape {s.shape[:1]} or {s.shape}, got {cost.shape}.")
    if not np.isfinite(cost).all() or (cost < 0).any():
        raise InputError("flops: expected finite numbers ≥ 0.")
    if (np.diff(cost, axis=0) < 0).any():
        raise InputError("flops: expected the cumulative cost of leaving at each exit, which never falls with depth.")
    return s, cost


def mean_cost(cost: Floats, exits: Ints) -> float:
    """Mean over rows of the cost (J, N) at each row's exit; NaN without rows."""
    return float(cost[exits, np.arange(cost.shape[1])].mean()) if cost.shape[1] else float("nan")


def thresholds_for_shares(scores: ArrayLike, shares: ArrayLike) -> tuple[float, ...]:
    """Thresholds under which `shares` (J,) of all rows leave at each exit, quantiles among rows still in play.

    The k highest of the rows in play leave, k the rounded share of all rows; ties with the k-th leave too. A
    share that rounds to no row gives +inf. The last threshold is −inf: what shares that sum to less than 1
    leave over goes there too.
    """
    s = np.asarray(scores)
    if s.ndim != 2 or not s.shape[0]:
        raise InputError(f"scores: expected shape (exits, rows), got {s.shape}.")
    wanted = arrays.numbers(shares, "shares")
    if wanted.shape != s.shape[:1] or not (wanted >= 0).all() or wanted.sum() > 1 + _SLACK:
        raise InputError(f"shares: expected {s.shape[0]} numbers ≥ 0 that sum to at most 1, got {wanted.tolist()}.")
    rows = s.shape[1]
    playing = np.arange(rows)
    chosen: list[float] = []
    for j in range(len(s) - 1):
        k = min(len(playing), int(np.floor(wanted[j] * rows + 0.5)))
        if k == 0:
            chosen.append(float("inf"))
            continue
        here = s[j, playing]
        bar = np.partition(here, len(here) - k)[len(here) - k]
        chosen.append(float(bar))
        playing = playing[here < bar]
    return (*chosen, float("-inf"))


def exit_share(scores: ArrayLike, flops: ArrayLike, budget: float) -> ExitShare:
    """The exit shares whose mean cost comes closest to a budget from below.

    scores: (J, N), higher leaves sooner. flops: (J,) or (J, N), cumulative cost of leaving at each exit, above
    0 at the last one: a budget is a fraction of that.
    budget: fraction in (0, 1] of the mean cost of the full model. Without rows: all exits closed, q = +inf.
    q is found by bisection in log q, then every threshold follows from its share. When no q meets the budget
    the cheapest is returned with budget_met=False. Source: Huang et al. 2018; EEFP eq. 1.
    """
    s, cost = cascade_inputs(scores, flops)
    budget = arrays.fraction(budget, "budget", high_open=False)
    exits, rows = s.shape
    full = cost[-1].mean() if rows else float("nan")
    if full == 0.0:
        raise InputError("flops: expected a cost above 0 at the last exit, of which the budget is a fraction.")
    closed = (*(float("inf"),) * (exits - 1), float("-inf"))
    if not rows or exits == 1 or budget == 1.0:
        share = (*(0.0,) * (exits - 1), 1.0)
        return ExitShare(closed, float("inf"), 1.0 if rows else float("nan"), budget, share, bool(rows))

    def at(log_q: float) -> tuple[tuple[float, ...], float]:
        bars = thresholds_for_shares(s, geometric_shares(exits, log_q))
        return bars, mean_cost(cost, leave_at(s, bars)) / float(full)

    # At |log q| = 60 every row is planned for one end of the cascade.
    low, high = -60.0, 60.0
    best_q, (best, best_cost) = low, at(low)
    met = best_cost <= budget
    if met:
        for _ in range(60):
            middle = (low + high) / 2
            bars, spent = at(middle)
            if spent <= budget:
                low = middle
                # Ties can make the cost jump about: keep the costliest that still fits.
                if spent >= best_cost:
                    best_q, best, best_cost = middle, bars, spent
            else:
                high = middle
    leaving = np.bincount(leave_at(s, best), minlength=exits) / rows
    return ExitShare(best, float(np.exp(best_q)), best_cost, budget, tuple(leaving.tolist()), met)


def geometric_shares(exits: int, log_q: float) -> Floats:
    """(J,) q^j / Σ q^l, without overflow at either end. exits ≥ 1, log_q finite."""
    if not isinstance(exits, int | np.integer) or exits < 1:
        raise InputError(f"exits: expected a whole number of at least 1, got {exits!r}.")
    if not np.isfinite(log_q):
        raise InputError(f"log_q: expected a finite number, got {log_q!r}.")
    powers = log_q * np.arange(exits)
    powers = np.exp(powers - powers.max())
    shares: Floats = powers / powers.sum()
    return shares
