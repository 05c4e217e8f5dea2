"""From a confidence back to a probability vector: softmax(z/τ) whose label has just that confidence.

A temperature of its own for each row never moves the argmax, which scaling the other classes can.
"""

import numpy as np
from offramp.runtime import arrays, scores
from offramp.runtime.arrays import Array, Floats

# The vector's confidence is kept this far from 1/C and 1, where τ would be infinite or 0.
CLIP = 1e-6


def at_confidence(z: Array, target: Floats) -> Array:
    """(N, C) probabilities softmax(z/τ), τ > 0 a row, with sigmoid(target) on the top class.

    z: (N, C) logits without NaN. target: (N,) log-odds, clipped to confidences in [1/C + 1e-6, 1 − 1e-6].
    With g classes tied at the top at most 1/g is attainable, with classes at −inf at least 1/(classes left):
    beyond that τ is the end of its bracket. float32 for float32 logits, else float64.
    """
    out = np.empty(z.shape, np.result_type(z.dtype, np.float32) if z.dtype.itemsize <= 4 else np.float64)
    classes = z.shape[1]
    if classes == 1:
        out[:] = 1.0
        return out
    low, high = scores.logit(np.array([1.0 / classes + CLIP, 1.0 - CLIP]))
    wanted = np.clip(target, low, high)

    def work(rows: slice) -> None:
        block = z[rows]
        label = block.argmax(axis=1)
        gaps = scores.differences(block, label)
        beta = inverse_temperatures(gaps, label, wanted[rows])
        with np.errstate(invalid="ignore"):
            powers = gaps * beta[:, None]
        powers[np.isneginf(gaps)] = -np.inf
        np.exp(powers, out=powers)
        np.divide(powers, powers.sum(axis=1, keepdims=True), out=out[rows], casting="same_kind")

    arrays.for_each_block(work, *z.shape)
    return out


def inverse_temperatures(gaps: Floats, label: Array, target: Floats) -> Floats:
    """(n,) β = 1/τ with log Σ_{k≠ŷ} exp(β·gap_k) = −target; gaps (n, C) = z − z_ŷ ≤ 0.

    The left side is convex and falls with β, so Newton from the left only ever moves right, towards the root.
    """
    n, classes = gaps.shape
    others = gaps.copy()
    others[np.arange(n), label] = -np.inf
    tied = (others == 0).sum(axis=1)
    below = np.where(others < 0, others, -np.inf)
    second = -below.max(axis=1)  # distance of the first class below the top
    spread = np.isfinite(second)
    safe = np.where(spread, second, 1.0)
    # e^{−βm} ≤ Σ ≤ (C − 1)e^{−βm} brackets the root; the upper end is also the answer beyond what is
    # attainable.
    end = (scores.logit(1.0 - CLIP) + np.log(classes)) / safe
    beta = np.maximum(target, 0.0) / safe
    beta[~spread] = 1.0
    with np.errstate(divide="ignore"):
        attainable = target < -np.log(tied)
    beta[spread & ~attainable] = end[spread & ~attainable]
    active = np.flatnonzero(spread & attainable)
    for _ in range(100):
        if not len(active):
            break
        gap = others[active]
        # −inf·0: a class at −inf has no share at any temperature.
        with np.errstate(invalid="ignore"):
            powers = np.exp(np.where(np.isneginf(gap), -np.inf, gap * beta[active, None]))
        total = powers.sum(axis=1)
        slope = np.where(powers > 0, gap, 0.0)
        slope = np.einsum("ij,ij->i", powers, slope) / total
        step = -(np.log(total) + target[active]) / slope
        moved = np.minimum(beta[active] + step, end[active])
        moved = np.maximum(moved, 0.0)
        going = (np.abs(moved - beta[active]) > 1e-14 * moved) & (moved > 0)
        beta[active] = moved
        active = active[going]
    return beta
