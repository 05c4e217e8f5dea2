"""Does routing know something about errors that confidence doesn't? The whole audit, and its verdict (AR §3).

Three pieces of evidence, all of which a "yes" needs: of one and the same feature of routing, accuracy gaps at matched
confidence that a permutation test rejects, and a kernel that sees it better than both kernel controls on held-out
rows; and a network that sees routing better than one of equal capacity that doesn't, or sees it shuffled. Features
are r_agg, r_std (AR-CondCal's) and the last entropy; p-values are adjusted for all features at all exits. The paper
found none of them stable; expect "no".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays, calibration, scores
from offramp.runtime.arrays import Array, Bools, Floats, Ints
from offramp.runtime.calibration.kernel import KernelCalibrator, Smoother, scott
from offramp.runtime.errors import InputError
from offramp.runtime.metrics.routing import (
    Permutation,
    detectable_gap,
    holm,
    matched_gap_permutation,
    profile,
)

MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)
CONTROLS = ("nw_confidence", "nw_confidence_entropy")
ROUTED = "routed"
KERNELS = (*CONTROLS, ROUTED)
FEATURES = ("r_agg", "r_std", "last")
LEVEL = 0.05
# Two-sided 95% of Student's t with 1, 2, … degrees of freedom: for two seeds and more, the last for any more.
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


@dataclass(frozen=True)
class Kernels:
    """Matched controls: held-out binary NLL of each kernel estimate, "routed" being the one that sees the feature.

    nll: by name. advantage: NLL of each control − NLL of "routed", a positive number being routing's favour, with
    its paired 95% bootstrap interval. p_value: one-sided, that it has no advantage over one control or the other.
    sweep: {name: {multiple: NLL}} over multiples of Scott's bandwidth; chosen: the multiple with the lowest
    leave-one-out NLL on the fitted rows.
    """

    nll: dict[str, float]
    advantage: dict[str, tuple[float, float, float]]
    p_value: float
    sweep: dict[str, dict[float, float]]
    chosen: dict[str, float]


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
class FeatureAudit:
    """What one feature of routing shows at one exit.

    p_value: the larger of the weighted gap's and the kernel's, as both must hold. adjusted: Holm's, over the `tests`
    features of all exits. detectable: the gap that would have been found in 80% of such samples, at LEVEL over
    `tests`; NaN where none would.
    """

    feature: str
    permutation: Permutation
    kernels: Kernels
    detectable: float
    p_value: float
    adjusted: float
    tests: int

    def missing(self, level: float = LEVEL) -> tuple[str, ...]:
        """What a "yes" lacks of this feature."""
        if self.adjusted <= level:
            return ()
        reasons = []
        # One of the two is above the share that the first test of Holm has, or adjusted would be at most the level.
        if not self.permutation.weighted <= level / self.tests:
            found = "" if np.isnan(self.detectable) else f"; a gap of {self.detectable:.3f} would have been found"
            reasons.append(
                f"the matched-confidence gap in {self.feature} is within chance "
                f"(p = {self.permutation.weighted:.3f}, {self.tests} tests{found})"
            )
        if not self.kernels.p_value <= level / self.tests:
            reasons.append(
                f"a kernel that sees {self.feature} doesn't beat both confidence controls on held-out rows "
                f"(p = {self.kernels.p_value:.3f})"
            )
        return tuple(reasons)


@dataclass(frozen=True)
class ExitAudit:
    """The evidence at one exit: of each feature that tells rows apart, and the probe, which sees them all."""

    features: tuple[FeatureAudit, ...]
    probe: RoutingProbe

    @property
    def best(self) -> FeatureAudit:
        """The feature that comes closest to a "yes"; of those with one p-value, that with the largest gain."""

        def distance(one: FeatureAudit) -> tuple[float, ...]:
            gain = min(mean for mean, _, _ in one.kernels.advantage.values())
            return len(one.missing()), float(np.nan_to_num(one.p_value, nan=2.0)), -gain

        return min(self.features, key=distance)

    def missing(self, level: float = LEVEL) -> tuple[str, ...]:
        """What a "yes" lacks here, by the feature that comes closest."""
        reasons = self.best.missing(level)
        if not self.probe.low > 0:
            return (*reasons, "a network that sees routing isn't better than one that doesn't or sees it shuffled")
        return reasons


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
    per_exit = []
    for z, h in zip(logits, routing, strict=True):
        z, h = arrays.matrix(z)[keep], np.asarray(h, np.float64)[:, keep]
        known = h[~np.isnan(h).all(axis=1)]
        per_exit.append((z, known, features_of(known)))
    tests = sum(len(features) for _, _, features in per_exit)
    found = []
    for z, known, features in per_exit:
        score = scores.log_odds(z)
        correct = scores.top_label(z) == y[keep]
        confidence = scores.sigmoid(score)
        kernels = kernel_controls(z, y[keep], features, fit, test, replicates=replicates, seed=seed)
        gaps = [
            (
                matched_gap_permutation(confidence, correct, rho, permutations=permutations, seed=seed),
                detectable_gap(confidence, correct, rho, level=LEVEL / tests, permutations=permutations, seed=seed),
            )
            for rho in features.values()
        ]
        found.append((kernels, gaps, probe(confidence, correct, known, fit, test, seeds=seeds, seed=seed)))
    # Both conditions must hold of the same feature, so its p is the larger one (an intersection–union test).
    p_values = [
        float(np.maximum(gap.weighted, one.p_value))
        for kernels, gaps, _ in found
        for one, (gap, _) in zip(kernels.values(), gaps, strict=True)
    ]
    adjusted = iter(zip(p_values, holm(p_values).tolist(), strict=True))
    exits = tuple(
        ExitAudit(
            tuple(
                FeatureAudit(name, gap, one, detectable, *next(adjusted), tests)
                for (name, one), (gap, detectable) in zip(kernels.items(), gaps, strict=True)
            ),
            probed,
        )
        for kernels, gaps, probed in found
    )
    named = tuple(range(len(exits)) if numbers is None else numbers)
    return Audit(exits, *_verdict(exits, named), named)


def features_of(routing: Array) -> dict[str, Floats]:
    """The features (N,) of entropies (L, N) that tell rows apart, each order once; r_agg alone where none does."""
    every = profile(routing)
    found: dict[str, Floats] = {}
    for name in FEATURES:
        rho: Floats = getattr(every, name)
        ranks = np.unique(rho, return_inverse=True)[1]
        known = any(np.array_equal(ranks, np.unique(other, return_inverse=True)[1]) for other in found.values())
        # A spread of rounding errors is none: one layer's r_std is 0.
        if np.ptp(rho) > 1e-9 and not known:
            found[name] = rho
    return found or {FEATURES[0]: every.r_agg}


def _verdict(exits: tuple[ExitAudit, ...], numbers: tuple[int, ...]) -> tuple[bool, str]:
    good = [j for j, one in enumerate(exits) if not one.missing()]
    if good:
        where = ", ".join(f"{numbers[j]} ({exits[j].best.feature})" for j in good)
        return True, (
            f"Yes: at exit {where} routing says more about errors than confidence does, by the permutation test, "
            "the matched kernels and the capacity-matched probe alike."
        )
    p_values = np.nan_to_num([one.best.adjusted for one in exits], nan=2.0)
    closest = min(range(len(exits)), key=lambda j: (len(exits[j].missing()), p_values[j]))
    reasons = "; ".join(exits[closest].missing())
    return False, f"No: at exit {numbers[closest]}, which comes closest, {reasons}."


# ---------------------------------------------------------------- matched kernels


def kernel_controls(
    z: Array, y: Ints, features: Mapping[str, Floats], fit: Ints, test: Ints, *, replicates: int = 5000, seed: int = 0
) -> dict[str, Kernels]:
    """For each feature, an estimate that sees (c, feature) against those that see (c) and (c, entropy).

    Same kernel, same bandwidth rule; the feature is rescaled to [0, 1] on the fitted rows, as AR-CondCal does r_std.
    """
    right = (scores.top_label(z) == y).astype(np.float64)
    confidence = scores.sigmoid(scores.log_odds(z))
    seen = {}
    for name in CONTROLS:
        control = calibration.get(name)
        assert isinstance(control, KernelCalibrator)
        seen[name] = control.features(calibration.Given({"logits": z}))
    for name, rho in features.items():
        low, span = rho[fit].min(), np.ptp(rho[fit])
        seen[name] = np.stack([confidence, (rho - low) / (span if span > 0 else 1.0)], axis=1)
    losses: dict[str, Floats] = {}
    sweep: dict[str, dict[float, float]] = {}
    chosen: dict[str, float] = {}
    for name, points in seen.items():
        leave_out: dict[float, float] = {}
        sweep[name] = {}
        for multiple in MULTIPLES:
            smoother = Smoother(points[fit], right[fit], np.ones(len(fit)), multiple * scott(points[fit]))
            loss = _binary_losses(smoother.exact(points[test]), right[test].astype(bool))
            if multiple == 1.0:
                losses[name] = loss
            sweep[name][multiple] = float(loss.mean())
            leave_out[multiple] = float(_binary_losses(smoother.leave_one_out(), right[fit].astype(bool)).mean())
        chosen[name] = min(MULTIPLES, key=lambda multiple: leave_out[multiple])
    gains = np.array([[losses[control] - losses[name] for control in CONTROLS] for name in features])
    random = np.random.default_rng(seed)
    drawn = np.array([gains[:, :, random.integers(0, len(test), len(test))].mean(axis=2) for _ in range(replicates)])
    found = {}
    for k, name in enumerate(features):
        ends = np.quantile(drawn[:, k], [0.025, 0.975], axis=0)
        names = dict(zip(KERNELS, (*CONTROLS, name), strict=True))
        found[name] = Kernels(
            nll={as_: float(losses[own].mean()) for as_, own in names.items()},
            advantage={
                control: (float(gains[k, i].mean()), float(ends[0, i]), float(ends[1, i]))
                for i, control in enumerate(CONTROLS)
            },
            p_value=float((1 + (drawn[:, k] <= 0).sum(axis=0).max()) / (1 + replicates)),
            sweep={as_: sweep[own] for as_, own in names.items()},
            chosen={as_: chosen[own] for as_, own in names.items()},
        )
    return found


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
