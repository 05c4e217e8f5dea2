"""Does routing know something about errors that confidence doesn't? The whole audit, and its verdict (AR §3).

Three pieces of evidence, all of which a "yes" needs: accuracy gaps at matched confidence that a permutation
test rejects; AR-CondCal better than both kernel controls on held-out rows; a network that sees routing
better than one of equal capacity that doesn't, or sees it shuffled. The paper found none of them stable;
expect "no".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays, calibration, scores
from offramp.runtime.arrays import Array, Bools, Floats, Ints
from offramp.runtime.calibration.kernel import KernelCalibrator, Smoother, scott
from offramp.runtime.errors import InputError
from offramp.runtime.metrics.routing import (
    GapInterval,
    Permutation,
    holm,
    matched_gap_interval,
    matched_gap_permutation,
    profile,
)

MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)
KERNELS = ("nw_confidence", "nw_confidence_entropy", "ar_condcal")
# Two-sided 95% of Student's t with 1, 2, … degrees of freedom: for two seeds and more, the last for any more.
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


@dataclass(frozen=True)
class Kernels:
    """Matched controls: held-out binary NLL of each kernel estimate.

    nll: by name. advantage: NLL of each control − NLL of AR-CondCal, a positive number being AR-CondCal's favour, with
    its paired 95% bootstrap interval. sweep: {name: {multiple: NLL}} over multiples of Scott's bandwidth; chosen: the
    multiple with the lowest leave-one-out NLL on the fitted rows.
    """

    nll: dict[str, float]
    advantage: dict[str, tuple[float, float, float]]
    sweep: dict[str, dict[float, float]]
    chosen: dict[str, float]

    @property
    def beats_both(self) -> bool:
        return all(low > 0 for _, low, _ in self.advantage.values())


@dataclass(frozen=True)
class RoutingProbe:
    """Held-out R² on |c − t|: linear(c), ridge(c, H), MLP(c), MLP(c, H), MLP(c, shuffled H), one value a seed.

    uplift: mean over seeds of R² MLP(c, H) − the larger of MLP(c) and shuffled; low, high: its 95% t-interval.
    """

    r2: dict[str, Floats]
    uplift: float
    low: float
    high: float


@dataclass(frozen=True)
class ExitAudit:
    """The evidence at one exit; adjusted: Holm's p of the weighted gap over all exits."""

    permutation: Permutation
    interval: GapInterval
    adjusted: float
    kernels: Kernels
    probe: RoutingProbe

    def missing(self, level: float = 0.05) -> tuple[str, ...]:
        """What a "yes" lacks here."""
        reasons = []
        if not self.adjusted <= level:
            reasons.append(f"the matched-confidence gap is within chance (p = {self.adjusted:.3f})")
        if not self.kernels.beats_both:
            reasons.append("AR-CondCal doesn't beat both confidence controls on held-out rows")
        if not self.probe.low > 0:
            reasons.append("a network that sees routing isn't better than one that doesn't or sees it shuffled")
        return tuple(reasons)


@dataclass(frozen=True)
class Audit:
    """One entry an exit, and the verdict: whether some exit has all the evidence, and a sentence that says
    why. numbers: which exits these are."""

    exits: tuple[ExitAudit, ...]
    yes: bool
    verdict: str
    numbers: tuple[int, ...]


def audit(
    logits: Sequence[ArrayLike],
    labels: ArrayLike,
    routing: Sequence[ArrayLike],
    *,
    numbers: Sequence[int] | None = None,
    permutations: int = 5000,
    replicates: int = 5000,
    seeds: int = 5,
    seed: int = 42,
) -> Audit:
    """Audit every exit.

    logits: (N, C) an exit. labels: (N,), −1 left out. routing: (L_j, N) an exit, of the sub-layers it has
    seen. Gaps are measured on all rows; kernels and probes are fitted on one half of them and measured on
    the other. numbers: what the verdict calls the exits, when these aren't all of the model's.
    """
    y = arrays.labels(labels)
    if len(logits) != len(routing) or not len(logits):
        raise InputError(f"routing: expected one array an exit, {len(logits)} of them, got {len(routing)}.")
    keep = np.flatnonzero(y >= 0)
    if len(keep) < 20:
        raise InputError(f"labels: expected at least 20 labelled rows, got {len(keep)}.")
    order = np.random.default_rng(seed).permutation(len(keep))
    fit, test = np.sort(order[: len(keep) // 2]), np.sort(order[len(keep) // 2 :])
    found = []
    for z, h in zip(logits, routing, strict=True):
        z, h = arrays.matrix(z)[keep], np.asarray(h, np.float64)[:, keep]
        known = h[~np.isnan(h).all(axis=1)]
        score = scores.log_odds(z)
        correct = scores.top_label(z) == y[keep]
        confidence = scores.sigmoid(score)
        r_agg = profile(known).r_agg
        found.append(
            (
                matched_gap_permutation(confidence, correct, r_agg, permutations=permutations, seed=seed),
                matched_gap_interval(confidence, correct, r_agg, replicates=replicates, seed=seed),
                kernel_controls(z, y[keep], known, fit, test, replicates=replicates, seed=seed),
                probe(confidence, correct, known, fit, test, seeds=seeds, seed=seed),
            )
        )
    adjusted = holm([one[0].weighted for one in found])
    exits = tuple(
        ExitAudit(gap, interval, float(p), kernels, probed)
        for (gap, interval, kernels, probed), p in zip(found, adjusted, strict=True)
    )
    named = tuple(range(len(exits)) if numbers is None else numbers)
    return Audit(exits, *_verdict(exits, named), named)


def _verdict(exits: tuple[ExitAudit, ...], numbers: tuple[int, ...]) -> tuple[bool, str]:
    good = [j for j, one in enumerate(exits) if not one.missing()]
    if good:
        where = ", ".join(str(numbers[j]) for j in good)
        return True, (
            f"Yes: at exit {where} routing says more about errors than confidence does, by the permutation test, "
            "the matched kernels and the capacity-matched probe alike."
        )
    p_values = np.nan_to_num([one.adjusted for one in exits], nan=2.0)
    closest = min(range(len(exits)), key=lambda j: (len(exits[j].missing()), p_values[j]))
    reasons = "; ".join(exits[closest].missing())
    return False, f"No: at exit {numbers[closest]}, which comes closest, {reasons}."


# ---------------------------------------------------------------- matched kernels


def kernel_controls(
    z: Array, y: Ints, routing: Array, fit: Ints, test: Ints, *, replicates: int = 5000, seed: int = 0
) -> Kernels:
    """AR-CondCal against estimates that see (c) and (c, entropy): same kernel, same bandwidth rule."""
    correct = scores.top_label(z[test]) == y[test]
    fitted = {name: calibration.get(name).fit(z[fit], y[fit], aux={"routing": routing[:, fit]}) for name in KERNELS}
    held_out = {"logits": z[test], "routing": routing[:, test]}
    losses: dict[str, Floats] = {}
    sweep: dict[str, dict[float, float]] = {}
    chosen: dict[str, float] = {}
    for name, one in fitted.items():
        assert isinstance(one, KernelCalibrator)
        given = calibration.Given(held_out)
        features = one.features(given)
        losses[name] = _binary_losses(one.smoother.exact(features), correct)
        leave_out: dict[float, float] = {}
        sweep[name] = {}
        for multiple in MULTIPLES:
            smoother = Smoother(one.points_, one.targets_, one.weights_, multiple * scott(one.points_))
            sweep[name][multiple] = float(_binary_losses(smoother.exact(features), correct).mean())
            leave_out[multiple] = float(_binary_losses(smoother.leave_one_out(), one.targets_.astype(bool)).mean())
        chosen[name] = min(MULTIPLES, key=lambda multiple: leave_out[multiple])
    random = np.random.default_rng(seed)
    advantage = {}
    for name in KERNELS[:-1]:
        gain = losses[name] - losses["ar_condcal"]
        drawn = np.array([gain[random.integers(0, len(gain), len(gain))].mean() for _ in range(replicates)])
        low, high = np.quantile(drawn, [0.025, 0.975])
        advantage[name] = (float(gain.mean()), float(low), float(high))
    return Kernels({name: float(loss.mean()) for name, loss in losses.items()}, advantage, sweep, chosen)


def _binary_losses(probability: Floats, correct: Bools) -> Floats:
    """−ln of the probability of what happened; a certain mistake counts as one in ten thousand."""
    p = np.clip(probability, 1e-4, 1 - 1e-4)
    return np.asarray(-np.where(correct, np.log(p), np.log1p(-p)))


# ---------------------------------------------------------------- capacity-matched probe


def probe(
    confidence: Floats, correct: Bools, routing: Array, fit: Ints, test: Ints, *, seeds: int = 5, seed: int = 0
) -> RoutingProbe:
    """How well |c − t| is told on held-out rows, with and without the routing entropies H (L, N)."""
    target = np.abs(confidence - correct)
    alone, both = confidence[:, None], np.column_stack([confidence, routing.T])
    r2: dict[str, list[float]] = {name: [] for name in ("linear", "ridge", "mlp", "mlp_routing", "mlp_shuffled")}
    for k in range(seeds):
        random = np.random.default_rng([seed, k])
        # Shuffled in the training half only, as in the paper: what is learnt of it can't be routing.
        shuffled = both.copy()
        shuffled[fit, 1:] = both[random.permutation(fit), 1:]
        r2["linear"].append(_r2(_ridge(alone, target, fit, test, 0.0), target[test]))
        r2["ridge"].append(_r2(_ridge(both, target, fit, test, 1.0), target[test]))
        for name, inputs in (("mlp", alone), ("mlp_routing", both), ("mlp_shuffled", shuffled)):
            r2[name].append(_r2(_mlp(inputs, target, fit, test, np.random.default_rng([seed, k])), target[test]))
    values = {name: np.array(each) for name, each in r2.items()}
    uplift = values["mlp_routing"] - np.maximum(values["mlp"], values["mlp_shuffled"])
    half = _T[min(seeds - 2, len(_T) - 1)] * uplift.std(ddof=1) / np.sqrt(seeds) if seeds > 1 else np.inf
    mean = float(uplift.mean())
    return RoutingProbe(values, mean, mean - float(half), mean + float(half))


def _r2(predicted: Floats, target: Floats) -> float:
    return float(1 - ((target - predicted) ** 2).sum() / ((target - target.mean()) ** 2).sum())


def _standardised(inputs: Floats, fit: Ints) -> Floats:
    spread = inputs[fit].std(axis=0)
    return np.asarray((inputs - inputs[fit].mean(axis=0)) / np.where(spread > 0, spread, 1.0))


def _ridge(inputs: Floats, target: Floats, fit: Ints, test: Ints, penalty: float) -> Floats:
    x = np.column_stack([_standardised(inputs, fit), np.ones(len(inputs))])
    pull = penalty * np.eye(x.shape[1])
    pull[-1, -1] = 0.0
    return np.asarray(x[test] @ np.linalg.lstsq(x[fit].T @ x[fit] + pull, x[fit].T @ target[fit], rcond=None)[0])


def _mlp(inputs: Floats, target: Floats, fit: Ints, test: Ints, random: np.random.Generator) -> Floats:
    """Two layers, hidden 16, ReLU; 200 full-batch steps of Adam, rate 1e-2, weight decay 1e-4."""
    x = _standardised(inputs, fit)
    width = x.shape[1]
    weights = [
        random.uniform(-1, 1, (width, 16)) / np.sqrt(width),
        random.uniform(-1, 1, 16) / np.sqrt(width),
        random.uniform(-1, 1, 16) / 4,
        random.uniform(-1, 1, 1) / 4,
    ]
    first = [np.zeros_like(one) for one in weights]
    second = [np.zeros_like(one) for one in weights]
    batch, goal = x[fit], target[fit]
    for step in range(1, 201):
        hidden = np.maximum(batch @ weights[0] + weights[1], 0.0)
        error = 2 * (hidden @ weights[2] + weights[3] - goal) / len(goal)
        back = np.outer(error, weights[2]) * (hidden > 0)
        gradients = [batch.T @ back, back.sum(axis=0), hidden.T @ error, np.array([error.sum()])]
        for i, gradient in enumerate(gradients):
            gradient = gradient + 1e-4 * weights[i]
            first[i] = 0.9 * first[i] + 0.1 * gradient
            second[i] = 0.999 * second[i] + 0.001 * gradient**2
            size = np.sqrt(second[i] / (1 - 0.999**step)) + 1e-8
            weights[i] = weights[i] - 1e-2 * (first[i] / (1 - 0.9**step)) / size
    return np.asarray(np.maximum(x[test] @ weights[0] + weights[1], 0.0) @ weights[2] + weights[3])
