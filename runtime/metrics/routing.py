"""Routing of Attention-Residual models: does it say more about errors than confidence does? (AR sections 2–3)

Routing entropies H_l ∈ [0, 1] tell how evenly sub-layer l mixes its prior states. A *matched* comparison
looks at rows of nearly equal confidence that differ in a routing feature.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Floats, Ints
from offramp.runtime.errors import InputError
from offramp.runtime.metrics.bins import check_bins, equal_width
from offramp.runtime.metrics.calibration import ece
from offramp.runtime.metrics.pairs import pairs

NAN = float("nan")


def routing_entropy(weights: ArrayLike) -> Floats:
    """H = −(1/(tokens·log T)) Σ_n Σ_t α ln α of one sub-layer, (N,) in [0, 1].

    weights: α (N, tokens, T) or (N, T), softmax over the T prior states. NaN for T = 1, which is left out of
    every profile.
    """
    alpha = arrays.numbers(weights, "weights")
    if alpha.ndim == 2:
        alpha = alpha[:, None, :]
    if alpha.ndim != 3 or 0 in alpha.shape[1:]:
        raise InputError(f"weights: expected shape (rows, tokens, states), got {np.shape(weights)}.")
    states = alpha.shape[2]
    if states == 1:
        return np.full(len(alpha), NAN)
    logs = np.log(alpha, out=np.zeros_like(alpha), where=alpha > 0)
    entropy: Floats = -(alpha * logs).sum(axis=2).mean(axis=1) / np.log(states)
    return np.clip(entropy, 0.0, 1.0)


@dataclass(frozen=True)
class Profile:
    """Summaries of the sub-layers run so far, (N,) each; std is that of the population (ddof 0)."""

    r_agg: Floats
    r_std: Floats
    last: Floats

    @property
    def concentration(self) -> Floats:
        """1 − r_agg."""
        return 1.0 - self.r_agg

    def weighted(self, confidence: ArrayLike) -> Floats:
        """r_agg·c."""
        return self.r_agg * arrays.numbers(confidence, "confidence")


def profile(routing: ArrayLike) -> Profile:
    """From (L, N) normalised entropies of the sub-layers that an exit has seen; all-NaN layers are left out."""
    h = arrays.numbers(routing, "routing")
    if h.ndim != 2:
        raise InputError(f"routing: expected shape (layers, rows), got {h.shape}.")
    if h.shape[1]:
        h = h[~np.isnan(h).all(axis=1)]
    if not len(h):
        raise InputError("routing: expected at least one sub-layer with several states.")
    arrays.refuse_nan(np.isnan(h).any(axis=0), "routing")
    return Profile(h.mean(axis=0), h.std(axis=0), h[-1])


def tertiles(feature: ArrayLike, cuts: ArrayLike | None = None) -> Ints:
    """(N,) 0, 1, 2 for ρ ≤ q⅓, q⅓ < ρ ≤ q⅔, ρ > q⅔; cuts default to np.quantile(ρ, [1/3, 2/3])."""
    rho = arrays.vector(feature, "feature")
    if not len(rho):
        return np.zeros(0, np.int64)
    at = np.quantile(rho, [1 / 3, 2 / 3]) if cuts is None else arrays.numbers(cuts, "cuts")
    if at.shape != (2,):
        raise InputError(f"cuts: expected two numbers, got shape {at.shape}.")
    return np.asarray((rho > at[0]).astype(np.int64) + (rho > at[1]))


def worst_tertile_ece(probabilities: ArrayLike, labels: ArrayLike, feature: ArrayLike, bins: int = 15) -> float:
    """The largest of the three tertiles' ECEs, in [0, 1]; empty tertiles are left out, NaN without rows.

    probabilities, labels: as for `ece`. feature: (N,). Tertiles are of the labelled rows. AR section 2.2.
    """
    rows = pairs(probabilities, labels)
    rho = arrays.vector(feature, "feature", len(np.asarray(labels)))
    third = tertiles(rho[arrays.labels(labels) >= 0])
    each = [ece(rows.confidence[third == k], rows.correct[third == k], bins) for k in range(3)]
    return float(np.nanmax(each)) if not np.isnan(each).all() else NAN


# ---------------------------------------------------------------- matched confidence


@dataclass(frozen=True)
class MatchedGap:
    """Accuracy of high- against low-feature rows at matched confidence.

    gaps: (M,) accuracy of the top tertile − accuracy of the bottom one in each confidence bin, NaN where
    either has fewer than min_count rows. max, weighted: max and mean of |gap| over the shared bins, the mean
    weighted by the smaller of the two counts; NaN without shared bins. low_rows, high_rows: (M,) counts.
    """

    max: float
    weighted: float
    shared_bins: int
    gaps: Floats
    low_rows: Ints
    high_rows: Ints


def matched_gap(
    confidence: ArrayLike, correct: ArrayLike, feature: ArrayLike, bins: int = 15, min_count: int = 5
) -> MatchedGap:
    """Gap between the outer tertiles of a feature within bins of confidence. AR section 3.1.

    confidence, correct, feature: (N,).
    """
    cells = cells_of(confidence, correct, feature, bins)
    return gap_of(cells, min_count)


def cells_of(confidence: ArrayLike, correct: ArrayLike, feature: ArrayLike, bins: int) -> Ints:
    """(M, 3, 2) rows by confidence bin, tertile and wrong/right: all that the tests below depend on."""
    rows = pairs(confidence, correct)
    rho = arrays.vector(feature, "feature", len(rows))
    number = equal_width(rows.confidence, check_bins(bins))
    cell = (number * 3 + tertiles(rho)) * 2 + rows.correct
    return np.bincount(cell, minlength=bins * 6).reshape(bins, 3, 2)


def gap_of(cells: Ints, min_count: int) -> MatchedGap:
    gaps, weight, low, high = _gaps(cells, min_count)
    shared = int((weight > 0).sum())
    absolute = np.abs(gaps)
    return MatchedGap(
        max=float(np.nanmax(absolute)) if shared else NAN,
        weighted=float((np.where(weight > 0, absolute, 0.0) * weight).sum() / weight.sum()) if shared else NAN,
        shared_bins=shared,
        gaps=gaps,
        low_rows=low,
        high_rows=high,
    )


def _gaps(cells: Ints, min_count: int) -> tuple[Floats, Ints, Ints, Ints]:
    """Gaps (…, M), weights, and the outer tertiles' counts, of cells (…, M, 3, 2)."""
    rows = cells.sum(axis=-1)
    low, high = rows[..., 0], rows[..., 2]
    weight = np.where((low >= min_count) & (high >= min_count), np.minimum(low, high), 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        right = cells[..., 1] / rows
        gaps = np.where(weight > 0, right[..., 2] - right[..., 0], NAN)
    return gaps, weight, low, high


def _statistics(cells: Ints, min_count: int) -> tuple[Floats, Floats]:
    """(R,) max and weighted gap of cells (R, M, 3, 2); NaN without shared bins."""
    gaps, weight, _, _ = _gaps(cells, min_count)
    absolute = np.where(weight > 0, np.abs(gaps), 0.0)
    total = weight.sum(axis=-1)
    with np.errstate(invalid="ignore"):
        mean = (absolute * weight).sum(axis=-1) / np.where(total > 0, total, np.nan)
    return np.where(total > 0, absolute.max(axis=-1), np.nan), mean


@dataclass(frozen=True)
class Permutation:
    """p = (1 + #{null ≥ observed})/(1 + P), for the max and the weighted gap; NaN without shared bins."""

    max: float
    weighted: float
    permutations: int
    observed: MatchedGap


def matched_gap_permutation(
    confidence: ArrayLike,
    correct: ArrayLike,
    feature: ArrayLike,
    bins: int = 15,
    min_count: int = 5,
    *,
    permutations: int = 5000,
    seed: int = 0,
) -> Permutation:
    """Test of no gap: correctness permuted among the rows of each confidence bin. AR section 3.1.

    Only the number of right rows in each tertile matters, and that is hypergeometric: no row is moved.
    """
    cells = cells_of(confidence, correct, feature, bins)
    observed = gap_of(cells, min_count)
    if not observed.shared_bins:
        return Permutation(NAN, NAN, permutations, observed)
    largest, mean = _statistics(_permuted(cells, permutations, seed), min_count)
    return Permutation(_p_value(largest, observed.max), _p_value(mean, observed.weighted), permutations, observed)


def _permuted(cells: Ints, permutations: int, seed: int) -> Ints:
    """(P, M, 3, 2) cells with correctness permuted among the rows of each bin."""
    random = np.random.default_rng(seed)
    rows, right = cells.sum(axis=2), cells[:, :, 1].sum(axis=1)
    everyone = rows.sum(axis=1)
    size = (permutations, len(cells))
    low = random.hypergeometric(right, everyone - right, rows[:, 0], size=size)
    rest, rest_right = everyone - rows[:, 0], right - low
    high = random.hypergeometric(rest_right, rest - rest_right, rows[:, 2], size=size)
    hits = np.stack([low, right - low - high, high], axis=2)
    return np.stack([rows - hits, hits], axis=3)


def detectable_gap(
    confidence: ArrayLike,
    correct: ArrayLike,
    feature: ArrayLike,
    bins: int = 15,
    min_count: int = 5,
    *,
    level: float = 0.05,
    power: float = 0.8,
    permutations: int = 5000,
    seed: int = 0,
) -> float:
    """The smallest gap, in (0, 1], that the test of the weighted gap would find in a share `power` of such samples.

    The gap is one for all bins: the top tertile right by half of it more often than its bin, the bottom one less,
    as far as 0 and 1 let them. What a "within chance" rules out is a gap of this size, no smaller one. NaN without
    shared bins, and where no gap would be found so often.
    """
    level, power = arrays.fraction(level, "level"), arrays.fraction(power, "power")
    cells = cells_of(confidence, correct, feature, bins)
    if not gap_of(cells, min_count).shared_bins:
        return NAN
    critical = np.quantile(_statistics(_permuted(cells, permutations, seed), min_count)[1], 1 - level)
    rows = cells.sum(axis=2)
    share = cells[:, :, 1].sum(axis=1) / np.maximum(rows.sum(axis=1), 1)

    def found(gap: float) -> bool:
        random = np.random.default_rng([seed, 1])
        chance = np.clip(share[:, None] + gap * np.array([-0.5, 0.0, 0.5]), 0.0, 1.0)
        hits = random.binomial(rows, chance, (1000, *rows.shape))
        mean = _statistics(np.stack([rows - hits, hits], axis=3), min_count)[1]
        return bool((mean > critical).mean() >= power)

    low, high = 0.0, 1.0
    if not found(high):
        return NAN
    for _ in range(9):
        middle = (low + high) / 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high


def _p_value(null: Floats, observed: float) -> float:
    # A permutation that gives the very same counts must count as equal, whatever the rounding.
    return float((1 + (null >= observed - 1e-12).sum()) / (1 + len(null)))


def holm(p_values: ArrayLike) -> Floats:
    """Holm's adjusted p-values, in the order given; NaN ones (nothing was tested) stay NaN and don't count."""
    p = arrays.numbers(p_values, "p_values")
    adjusted: Any = np.full(p.shape, NAN)
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind="stable")]
    running = np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1))
    adjusted[order] = np.minimum(running, 1.0)
    return np.asarray(adjusted)
