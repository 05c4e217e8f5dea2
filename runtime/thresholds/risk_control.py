"""Exits with a promise: accuracy lost to leaving early is ≤ ε with probability ≥ 1 − δ (Jazbec et al. 2024).

A sequence of thresholds, from safe to daring, is fixed on other data. Each is tested on the rows given here; the answer
is the last one *rejected* as too risky before the first that isn't. `full` has loss 0 and is the fallback.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Array, Floats
from offramp.runtime.errors import InputError
from offramp.runtime.thresholds import binomial
from offramp.runtime.thresholds.exit_share import cascade_inputs
from offramp.runtime.thresholds.rule import leave_at
from offramp.runtime.thresholds.sgr import risk_bound

INF = float("inf")

Bound = Literal["binomial", "hb", "wsr", "plug_in"]
Loss = Literal["lost", "signed"]
Method = Literal["ltt", "ucb"]


@dataclass(frozen=True)
class RiskControl:
    """The last thresholds of the sequence that passed, or the full model's.

    feasible: whether any passed; otherwise the thresholds are `full` and no saving is claimed. index: place
    in the sequence, −1 for full. cost: fraction of the full mean cost. loss: mean loss on the rows used.
    p_value: of the risk being above epsilon; bound: upper confidence bound of the risk at delta. tested: how
    many of the sequence were tested.
    """

    thresholds: tuple[float, ...]
    feasible: bool
    index: int
    cost: float
    loss: float
    p_value: float
    bound: float
    epsilon: float
    delta: float
    tested: int


def risk_control(
    scores: ArrayLike,
    correct: ArrayLike,
    flops: ArrayLike,
    sequence: Sequence[Sequence[float]],
    epsilon: float = 0.01,
    delta: float = 0.05,
    *,
    method: Method = "ltt",
    bound: Bound = "binomial",
    loss: Loss = "lost",
    seed: int = 0,
    proposing: tuple[ArrayLike, ArrayLike] | None = None,
) -> RiskControl:
    """Go along `sequence` while each passes, and answer the last that did.

    scores, correct: (J, N), none of which took part in making the sequence (e.g. the frontier of
    `accuracy_target` on other rows, from costliest to cheapest). flops: (J,) or (J, N), cumulative.
    loss: "lost" is 1 where the full model is right and the cascade wrong, whose mean bounds the drop;
    "signed" is the drop itself, in [−1, 1], for the betting bounds only: what exits gain counts, too.
    bound: "binomial", exact for integer losses; "hb", Hoeffding–Bentkus; "wsr", betting, run once over all
    rows in a random order; "plug_in", betting with stakes learnt from `proposing`, scores and correctness (J, M) of
    other rows, and from the rows gone by (see `plug_in_p_value`).
    method: "ltt" tests at delta (Learn then Test, fixed sequence); "ucb" wants the
    upper bound ≤ epsilon at every step so far, which with these bounds is the same decision from the other
    end. Without rows nothing is feasible.
    """
    s, cost = cascade_inputs(scores, flops)
    right = np.asarray(correct)
    if right.shape != s.shape:
        raise InputError(f"correct: expected shape {s.shape}, as scores has, got {right.shape}.")
    right = arrays.flags(right.reshape(-1), "correct").reshape(s.shape)
    epsilon, delta = arrays.fraction(epsilon, "epsilon"), arrays.fraction(delta, "delta")
    if method not in ("ltt", "ucb"):
        raise InputError(f'method: expected "ltt" or "ucb", got {method!r}.')
    p_value, upper = _test(bound, loss)
    known_score, known_right = s[:, :0], right[:, :0]
    if proposing is not None:
        known_score, known_right = (np.asarray(given) for given in proposing)
        if known_score.shape != known_right.shape or known_score.shape[:1] != s.shape[:1]:
            raise InputError(f"proposing: expected scores and correct of one shape, {len(s)} exits each.")
    exits, rows = s.shape
    order = np.random.default_rng(seed).permutation(rows)
    every = np.arange(rows)
    known: Array = np.zeros(0)
    full_mean = float(cost[-1].mean()) if rows else 1.0
    kept: Array | None = None
    answer = RiskControl((*(INF,) * (exits - 1), -INF), False, -1, 1.0, 0.0, 1.0, 1.0, epsilon, delta, 0)
    for index, bars in enumerate(sequence):
        if len(bars) != exits:
            raise InputError(f"sequence: expected {exits} thresholds in each, got {len(bars)}.")
        if not rows:
            break
        left = leave_at(s, np.asarray(bars, np.float64))
        values = _losses(right, left, loss)[order]
        others = _losses(known_right, leave_at(known_score, np.asarray(bars, np.float64)), loss)
        # The bound is ≤ ε exactly where the test at ε rejects, so both methods ask the cheap question.
        p = p_value(values, others, epsilon)
        answer = replace(answer, tested=index + 1)
        if p > delta:
            break
        kept, known = values, others
        answer = replace(
            answer,
            thresholds=(*(float(bar) for bar in bars[:-1]), -INF),
            feasible=True,
            index=index,
            cost=float(cost[left, every].mean()) / (full_mean or 1.0),
            loss=float(values.mean()),
            p_value=p,
        )
    return answer if kept is None else replace(answer, bound=upper(kept, known, epsilon, delta))


def _losses(right: Array, left: Array, loss: str) -> Floats:
    """(N,) what each row loses to leaving there."""
    drop: Floats = right[-1].astype(np.float64) - right[left, np.arange(right.shape[1])]
    return drop if loss == "signed" else np.maximum(drop, 0.0)


# p-value of mean ≥ ε of losses, given other rows' losses and ε; upper bound, given the same and δ.
PValue = Callable[[Array, Array, float], float]
UpperBound = Callable[[Array, Array, float, float], float]


def _test(bound: str, loss: str) -> tuple[PValue, UpperBound]:
    if loss not in ("lost", "signed"):
        raise InputError(f'loss: expected "lost" or "signed", got {loss!r}.')
    if bound == "plug_in":
        return (
            lambda values, known, epsilon: plug_in_p_value(values, epsilon, known),
            lambda values, known, epsilon, delta: plug_in_bound(values, delta, epsilon, known),
        )
    if loss == "signed" and bound != "wsr":
        raise InputError('loss: "signed" is bounded by betting only; pass bound="wsr" or "plug_in".')
    if loss == "signed":
        return (
            lambda values, known, epsilon: betting_p_value((values + 1) / 2, (epsilon + 1) / 2),
            lambda values, known, epsilon, delta: 2 * betting_bound((values + 1) / 2, delta) - 1,
        )
    tests = {
        "binomial": (binomial_p_value, binomial_bound),
        "hb": (hoeffding_bentkus_p_value, hoeffding_bentkus_bound),
        "wsr": (betting_p_value, betting_bound),
    }
    if bound not in tests:
        raise InputError(f'bound: expected "binomial", "hb", "wsr" or "plug_in", got {bound!r}.')
    p_value, upper = tests[bound]
    return (
        lambda values, known, epsilon: p_value(values, epsilon),
        lambda values, known, epsilon, delta: upper(values, delta),
    )


# ---------------------------------------------------------------- bounds on the mean of independent losses
#
# Without rows nothing is known: every p-value and every bound is 1.


def _bounded(losses: ArrayLike) -> Floats:
    """(n,) losses, checked to lie in [0, 1]."""
    values = arrays.vector(losses, "losses")
    outside = (values < 0) | (values > 1)
    if outside.any():
        where = arrays.describe_rows(np.flatnonzero(outside))
        raise InputError(f"losses: expected numbers in [0, 1], not so in {where}.")
    return values


def binomial_p_value(losses: ArrayLike, epsilon: float) -> float:
    """P(Bin(n, ε) ≤ k) of k = Σ losses, each 0 or 1: exact. InputError for any other loss."""
    wrong = arrays.flags(losses, "losses")
    epsilon = arrays.fraction(epsilon, "epsilon", low_open=False, high_open=False)
    count, n = int(wrong.sum()), len(wrong)
    if count == n or not epsilon:
        return 1.0
    return float(binomial.cdf(count, n, epsilon)) if epsilon < 1 else 0.0


def binomial_bound(losses: ArrayLike, delta: float) -> float:
    """Clopper–Pearson upper bound of the mean of 0/1 losses. InputError for any other loss."""
    wrong = arrays.flags(losses, "losses")
    return float(risk_bound(int(wrong.sum()), len(wrong), arrays.fraction(delta, "delta")))


def hoeffding_bentkus_p_value(losses: ArrayLike, epsilon: float) -> float:
    """min(exp(−n·kl(min(r̂, ε), ε)), e·P(Bin(n, ε) ≤ ⌈n·r̂⌉)), losses in [0, 1]. Bates et al. 2021.

    1 without rows. InputError for a loss outside [0, 1] or NaN.
    """
    values = _bounded(losses)
    return _hoeffding_bentkus(len(values), float(values.sum()), arrays.fraction(epsilon, "epsilon"))


def _hoeffding_bentkus(n: int, total: float, epsilon: float) -> float:
    if not n:
        return 1.0
    mean = min(total / n, epsilon)
    # The count is whole when the losses are; rounding first keeps 3.0000000000000004 from becoming 4.
    count = int(np.ceil(round(total, 9)))
    hoeffding = np.exp(-n * _divergence(mean, epsilon))
    return float(min(1.0, hoeffding, np.e * binomial.cdf(count, n, epsilon)))


def _divergence(a: float, b: float) -> float:
    """Kullback–Leibler divergence of Bernoulli(a) from Bernoulli(b), 0 < b < 1."""
    left = a * np.log(a / b) if a > 0 else 0.0
    right = (1 - a) * np.log((1 - a) / (1 - b)) if a < 1 else 0.0
    return float(left + right)


def hoeffding_bentkus_bound(losses: ArrayLike, delta: float) -> float:
    """The largest ε that `hoeffding_bentkus_p_value` doesn't reject at δ; 1 without rows."""
    values, delta = _bounded(losses), arrays.fraction(delta, "delta")
    if not len(values):
        return 1.0
    n, total = len(values), float(values.sum())
    return _invert(lambda epsilon: _hoeffding_bentkus(n, total, epsilon), float(values.mean()), delta)


def _invert(p_value: Callable[[float], float], low: float, delta: float) -> float:
    """The smallest ε with p ≤ δ, by bisection, rounded up; 1 when there is none."""
    high = 1.0
    if not low < high or p_value(1 - 1e-12) > delta:
        return 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if 0 < middle < 1 and p_value(middle) <= delta:
            high = middle
        else:
            low = middle
    return high


# Shares of the largest allowed stake. Capital is spread over all of them and never moved, so the best one
# wins without being known: stakes set from a running variance bet everything on rare losses and go broke at
# the first.
STAKES = np.geomspace(0.005, 0.999, 32)


def _log_capital(losses: Array, epsilon: float) -> float:
    """log of the most ever held when betting that the mean is below ε; e^that ≥ 1/δ has probability ≤ δ if not.

    Σ over stakes ν of Π (1 + ν(ε − loss)), ν ≤ 1/(1 − ε) so that capital never goes negative.
    """
    # Every stake wins on a loss below ε and pays on one above, so capital peaks only before it pays, and at
    # the end. Losses take few values: capital there follows from how often each came.
    values, place = np.unique(losses, return_inverse=True)
    pays = losses > epsilon
    peaks = np.flatnonzero(np.append(~pays[:-1] & pays[1:], True))
    logs = np.log1p(STAKES * ((epsilon - values) / (1.0 - epsilon))[:, None])
    capital = np.zeros((len(peaks), len(STAKES)))
    if len(values) <= 8:
        for value, log in enumerate(logs):
            capital += np.cumsum(place == value)[peaks, None] * log
    else:
        for k, log in enumerate(logs.T):
            capital[:, k] = np.cumsum(log[place])[peaks]
    top = capital.max(axis=1)
    return float((top + np.log(np.exp(capital - top[:, None]).mean(axis=1))).max())


def betting_p_value(losses: ArrayLike, epsilon: float) -> float:
    """1 / (the largest capital ever held betting that the mean of losses in [0, 1] is below ε), at most 1.

    One game over all rows in the order given, which must not depend on the losses; diversified Kelly stakes,
    Waudby-Smith & Ramdas 2024. 1 without rows. InputError for a loss outside [0, 1] or NaN.
    """
    return _betting(_bounded(losses), arrays.fraction(epsilon, "epsilon"))


def _betting(losses: Floats, epsilon: float) -> float:
    return float(min(1.0, np.exp(-_log_capital(losses, epsilon)))) if len(losses) else 1.0


def betting_bound(losses: ArrayLike, delta: float) -> float:
    """The smallest ε whose game is won at δ; 1 without rows. Capital grows with ε, so bisection finds it."""
    values, delta = _bounded(losses), arrays.fraction(delta, "delta")
    return _invert(lambda epsilon: _betting(values, epsilon), 0.0, delta)


# ---------------------------------------------------------------- betting with stakes learnt elsewhere

# Of the largest stake that can't go broke: one loss then still leaves something.
_MOST_STAKED = 0.99


def plug_in_p_value(losses: ArrayLike, epsilon: float, known: ArrayLike = ()) -> float:
    """p-value of "the mean loss is at least ε" for losses −1, 0 or 1, from a bet against it with learnt stakes.

    Wealth begins at 1 and becomes W_i = W_{i−1} · (1 + λ_i(ε − loss_i)). λ_i maximises the mean log growth over
    `known`, the losses of rows that aren't tested, the losses before i, and one more loss of 1; it lies in
    [0, 0.99/(1 − ε)], so that every factor is above 0. p = 1 / max_i W_i, at most 1; 1 without rows.

    Why it holds: λ_i ≥ 0 depends on what came before row i only. Where E[loss_i | past] ≥ ε, therefore
    E[W_i | past] = W_{i−1}(1 + λ_i(ε − E[loss_i | past])) ≤ W_{i−1}: W is a nonnegative supermartingale that begins at
    1, and by Ville P(max_i W_i ≥ 1/δ) ≤ δ. Wrong stakes cost power, never the promise. Rows that a rule gains
    (loss −1) multiply wealth by 1 + λ(1 + ε), which a test on lost rows alone doesn't see. The order of the rows
    mustn't depend on their losses.
    Source: Waudby-Smith & Ramdas 2024, sections 4 and B (predictable plug-in, growth-optimal stakes).
    """
    values, before = _whole_losses(losses, "losses"), _whole_losses(known, "known")
    epsilon = arrays.fraction(epsilon, "epsilon")
    return _ruin(values, plug_in_stakes(values, epsilon, before), epsilon) if len(values) else 1.0


def plug_in_bound(losses: ArrayLike, delta: float, epsilon: float, known: ArrayLike = ()) -> float:
    """The smallest mean that the bet of `plug_in_p_value` at `epsilon` refutes at δ; 1 without rows or such a mean.

    The stakes stay those for epsilon, so wealth grows with the mean betted against, and all larger ones are refuted.
    """
    values, before = _whole_losses(losses, "losses"), _whole_losses(known, "known")
    epsilon, delta = arrays.fraction(epsilon, "epsilon"), arrays.fraction(delta, "delta")
    if not len(values):
        return 1.0
    stakes = plug_in_stakes(values, epsilon, before)
    return _invert(lambda mean: _ruin(values, stakes, mean), -1.0, delta)


def plug_in_stakes(losses: Floats, epsilon: float, known: Floats) -> Floats:
    """(n,) the stake on each row, from `known` and the losses before it."""
    seen = np.stack([losses[:-1] == value for value in (1, 0, -1)])
    first = np.array([(known == 1).sum() + 1, (known == 0).sum(), (known == -1).sum()])
    counts = first[:, None] + np.concatenate([np.zeros((3, 1)), np.cumsum(seen, axis=1)], axis=1)
    return best_stakes(counts, epsilon)


def best_stakes(counts: ArrayLike, epsilon: float) -> Floats:
    """The λ in [0, 0.99/(1 − ε)] of the largest log growth, from (3, …) counts of the losses 1, 0 and −1."""
    often = np.asarray(counts, np.float64)
    wins = np.array([epsilon - 1, epsilon, epsilon + 1]).reshape(3, *(1,) * (often.ndim - 1))
    low, high = np.zeros(often.shape[1:]), np.full(often.shape[1:], _MOST_STAKED / (1 - epsilon))
    for _ in range(30):  # growth is concave
        middle = (low + high) / 2
        rises = (often * wins / (1 + middle * wins)).sum(axis=0) > 0
        low, high = np.where(rises, middle, low), np.where(rises, high, middle)
    return low


def _ruin(losses: Floats, stakes: Floats, mean: float) -> float:
    """1 / the most ever held; 1 where the first bet already loses."""
    factors = 1 + stakes * (mean - losses)
    with np.errstate(divide="ignore"):
        wealth = np.cumsum(np.log(np.maximum(factors, 0.0)))
    return float(min(1.0, np.exp(-wealth.max())))


def _whole_losses(losses: ArrayLike, name: str) -> Floats:
    values = arrays.vector(losses, name)
    other = ~np.isin(values, (-1.0, 0.0, 1.0))
    if other.any():
        raise InputError(f"{name}: expected -1, 0 or 1, not so in {arrays.describe_rows(np.flatnonzero(other))}.")
    return values
