"""The cheapest rule whose accuracy is at most so far below the full model's, on the rows at hand."""

from dataclasses import dataclass

from numpy.typing import ArrayLike
from offramp.runtime.errors import InputError
from offramp.runtime.thresholds.searching import Rule, cheapest_within, pareto, search


@dataclass(frozen=True)
class AccuracyTarget:
    """The cheapest rule found that keeps the target with standard errors in hand; at worst the full model.

    cost, drop, standard_error: on the rows used; a plain estimate, not a guarantee (see `risk_control`). The error is
    that of the drop, counting one row more than seen to differ. saves: whether cost < 1.
    frontier: the rules that no other found beats in both cost and drop, from costliest to cheapest.
    """

    thresholds: tuple[float, ...]
    cost: float
    drop: float
    standard_error: float
    target: float
    saves: bool
    frontier: tuple[Rule, ...]


def accuracy_target(
    scores: ArrayLike,
    correct: ArrayLike,
    flops: ArrayLike,
    drop: float = 0.01,
    *,
    standard_errors: float = 1.0,
) -> AccuracyTarget:
    """The cheapest rule with accuracy drop ≤ `drop`, by a margin of `standard_errors` of its own error.

    scores, correct: (J, N). flops: (J,) or (J, N) cumulative cost. drop ≥ 0, of the last exit's accuracy on the same
    rows. What leaving early gains counts only beyond one standard error more. Of rules that cost the same within 2% the
    simplest is taken: fewer exits, then fewer thresholds (see `search`).
    """
    if not drop >= 0 or not standard_errors >= 0:
        raise InputError("drop, standard_errors: expected numbers ≥ 0.")
    rules = search(scores, correct, flops)
    best = cheapest_within(rules, drop, standard_errors)
    taken = rules[0] if best is None else best
    error = taken.margin if best is not None else 0.0
    return AccuracyTarget(taken.thresholds, taken.cost, taken.drop, error, drop, best is not None, pareto(rules))
