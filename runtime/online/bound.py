"""How large the selective risk can be: upper bounds that hold at every moment at once.

The risk bounded is the running average r̄_n = (1/n)Σ r_i of the labelled, answered rows since a version began, r_i the
probability, given all that came before, that answer i is wrong. It may drift; nothing is assumed but that whether a row
gets its label doesn't depend on its being wrong, or only through `asked`, by whose inverse rows then weigh.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Bools, Floats
from offramp.runtime.errors import InputError
from offramp.runtime.online.betting import STAKES, mixed
from offramp.runtime.online.window import Window

_STEPS = 40


def tally(window: Window) -> tuple[Floats, Floats, Floats]:
    """(G,) distinct weights of the labelled, answered rows, and how many of them are right and wrong.

    All that `betting_bound` needs: tallies of two windows add up, so rows may be forgotten.
    """
    rows = window.take(window.answered)
    weights, group = np.unique(rows.weights, return_inverse=True)
    wrong = arrays.group_sums(group, ~rows.correct, len(weights))
    return weights, arrays.group_sums(group, None, len(weights)) - wrong, wrong


def betting_bound(
    right: ArrayLike, wrong: ArrayLike, delta: float = 0.05, *, weights: ArrayLike = 1.0, heaviest: float | None = None
) -> Floats:
    """Upper bound of the running average risk; below it at *any* time with probability at most `delta`. In (0, 1].

    right, wrong: (..., G) numbers of answers, by weight; plain numbers or (...) where all weigh 1 (weights a number).
    weights: (G,), 1/asked. heaviest: what any weight can be at most, fixed beforehand, default the largest here; larger
    ones are cut to it.

    Against "r̄ is at least m" one bets, a right answer winning and a wrong one losing: with constant stakes ν the wealth
    is Π(1 + ν·w_i(m − e_i)/(W(1 − m))), W the heaviest. As `betting` shows, that is below a martingale whenever
    Σw_i(m − r_i) ≤ 0, also under drift. The bound is the smallest m refuted at δ; larger ones all are. 1 without rows.
    For unequal weights r̄ is the average over what the rows stand for.
    """
    delta = arrays.fraction(delta, "delta")
    w = np.atleast_1d(arrays.numbers(weights, "weights"))
    k, n = (arrays.numbers(v, name) for v, name in ((wrong, "wrong"), (right, "right")))
    if np.ndim(weights) == 0:
        k, n = k[..., None], n[..., None]
    if not ((k >= 0).all() and (n >= 0).all() and (w > 0).all()):
        raise InputError("right, wrong, weights: expected numbers of at least 0, weights above 0.")
    most = float(w.max(initial=1.0)) if heaviest is None else heaviest
    share = np.minimum(w, most) / most
    k, n = np.broadcast_arrays(k, n)

    def refuted(m: Floats) -> Bools:
        return np.asarray(betting_evidence(n, k, m, share) >= -np.log(delta))

    return _smallest(refuted, k.shape[:-1]) if len(w) else np.ones(k.shape[:-1])


def betting_evidence(right: Floats, wrong: Floats, mean: Floats, share: ArrayLike = (1.0,)) -> Floats:
    """(...) log of the evidence against "the running average risk is at least `mean`", in (0, 1).

    right, wrong: (..., G) counts by weight, share: (G,) each weight over the heaviest.
    """
    odds = (mean / (1 - mean))[..., None]
    wealth = sum(
        right[..., g, None] * np.log1p(STAKES * part * odds) + wrong[..., g, None] * np.log1p(-STAKES * part)
        for g, part in enumerate(np.asarray(share, np.float64))
    )
    return mixed(np.asarray(wealth))


def bernstein_bound(errors: ArrayLike, delta: float = 0.05) -> Floats:
    """(n,) bounds of the running average risk after each row, all of which hold at once, by empirical Bernstein.

    errors: (n,) in [0, 1], in the order in which the labels came. With ê_i the predictable mean of the errors before i
    and ψ(λ) = −ln(1 − λ) − λ, exp(λΣ(r_i − e_i) − ψ(λ)Σ(e_i − ê_i)²) is a supermartingale for every λ in [0, 1); the
    bound is the smallest m at which its mean over a fixed grid of λ, with n·m for Σr_i, reaches 1/δ. λ that follow the
    errors, as in the paper's plug-in, would bound an average weighted by them and not r̄.
    Wider than `betting_bound`; for errors that aren't 0 or 1.
    Source: Waudby-Smith & Ramdas 2024, theorem 2; Howard et al. 2021, theorem 4.
    """
    delta = arrays.fraction(delta, "delta")
    e = arrays.vector(errors, "errors")
    if len(e) and not (e.min() >= 0 and e.max() <= 1):
        raise InputError(f"errors: expected numbers in [0, 1], got {e.min()} to {e.max()}.")

    def refuted(m: Floats) -> Bools:
        return np.asarray(bernstein_evidence(e, m) >= -np.log(delta))

    return _smallest(refuted, e.shape)


def bernstein_evidence(errors: Floats, mean: Floats) -> Floats:
    """(n,) log of the evidence after each row against "the running average risk is at least `mean`", (n,)."""
    count = np.arange(1, len(errors) + 1)
    total = np.cumsum(errors)
    spread = np.cumsum((errors - (0.5 + total - errors) / count) ** 2)
    return mixed(np.outer(count * mean - total, STAKES) + np.outer(spread, np.log1p(-STAKES) + STAKES))


def constant_risk_bound(errors: ArrayLike, delta: float = 0.05) -> Floats:
    """(n,) upper bounds of a risk that never changes, after each row; they never rise.

    errors: (n,) of 0 or 1. The smallest `betting_bound` so far: where the risk is constant all of them bound the same
    number. Where it drifts this promises nothing.
    """
    wrong = np.cumsum(arrays.flags(errors, "errors"))
    return np.minimum.accumulate(betting_bound(np.arange(1, len(wrong) + 1) - wrong, wrong, delta))


def _smallest(refuted: Callable[[Floats], Bools], shape: tuple[int, ...]) -> Floats:
    """The smallest m in (0, 1) that is refuted, to 1e-12, rounded up; 1 where none is."""
    low, high = np.zeros(shape), np.ones(shape)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        yes = refuted(np.minimum(middle, 1 - 1e-12))
        low, high = np.where(yes, low, middle), np.where(yes, middle, high)
    return high
