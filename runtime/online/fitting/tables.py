"""Fits from tables: what every class costs at every temperature, from one pass over the logits.

exp(β·gap) at β = h, 2h, 3h … are powers of exp(h·gap), so one exponential a logit and a multiplication a node give each
row's whole curve; summed by predicted class it is all that a temperature, or one for each class, is fitted from.
"""

from dataclasses import dataclass

import numpy as np
from offramp.runtime import arrays
from offramp.runtime.arrays import Array, Bools, Floats, Ints
from offramp.runtime.calibration import CwMCS, Temperature
from offramp.runtime.calibration.cwmcs import normalised

# Inverse temperatures that are tabulated: T from 1/3 to 6.7.
STEP, NODES = 0.15, 20
BETAS = STEP * np.arange(1, NODES + 1)
# A block's float32 gaps and powers stay in a core's second-level cache.
_VALUES = 1 << 16
# γ is known no better: neighbours differ by less than a standard error of their losses.
GAMMAS = np.arange(-19, 20) / 20
FLOOR = 0.25


@dataclass(frozen=True)
class RowTables:
    """top: (n,) predicted class. correct: (n,). nll, confidence: (n, K) float32, at each of BETAS."""

    top: Ints
    correct: Bools
    nll: Array
    confidence: Array
    classes: int

    @classmethod
    def of(cls, logits: Array, label: Ints) -> "RowTables":
        """logits: (n, C) z − max z of any float kind. A label that is impossible (−inf) costs nothing."""
        n, classes = logits.shape
        top = np.empty(n, np.int64)
        rest, behind = np.empty((n, NODES), np.float32), np.empty(n, np.float32)
        one = np.ones(classes, np.float32)

        def work(rows: slice) -> None:
            gaps = logits[rows].astype(np.float32)
            here = np.arange(len(gaps))
            best = gaps.argmax(axis=1)
            top[rows] = best
            behind[rows] = gaps[here, best] - gaps[here, label[rows]]
            gaps *= np.float32(STEP)
            step = np.exp(gaps, out=gaps)
            step[here, best] = 0.0
            power = step.copy()
            out = rest[rows]
            for k in range(NODES):
                if k:
                    power *= step
                out[:, k] = power @ one

        arrays.for_each_block(work, n, classes, _VALUES)
        behind[~np.isfinite(behind)] = 0.0
        nll = np.log1p(rest)
        nll += behind[:, None] * BETAS.astype(np.float32)
        return cls(top, top == label, nll, 1 / (1 + rest), classes)

    def by_class(self, values: Array, w: Floats, part: Ints | None = None, parts: int = 1) -> Floats:
        """(parts, C, K) Σ w·values, (n, K), of the rows of each part that are predicted as each class."""
        cell = self.top if part is None else part * self.classes + self.top
        order = np.argsort(cell, kind="stable")
        starts = np.flatnonzero(np.diff(cell[order], prepend=-1))
        out = np.zeros((parts * self.classes, values.shape[1]))
        if len(starts):
            weighted = values[order]
            weighted *= w[order, None].astype(weighted.dtype)
            out[cell[order][starts]] = np.add.reduceat(weighted, starts, axis=0, dtype=np.float64)
        return out.reshape(parts, self.classes, -1)


# Nodes that a curve is interpolated through, and 1/Π(k − m) of each.
_NEAR = 6
_SCALES = [1.0 / float(np.prod([k - m for m in range(_NEAR) if m != k])) for k in range(_NEAR)]


def between(table: Array, beta: Floats | float) -> Floats:
    """(…, K) tables at (…) inverse temperatures, by the polynomial through the six nodes around each (Lagrange).

    Beyond the first or the last node it is what it is there.
    """
    at = np.clip(np.asarray(beta, np.float64) / STEP - 1, 0, NODES - 1)
    first = np.clip(np.floor(at).astype(np.int64) - _NEAR // 2 + 1, 0, NODES - _NEAR)
    x = at - first
    parts = [_SCALES[k] * np.prod([x - m for m in range(_NEAR) if m != k], axis=0) for k in range(_NEAR)]
    if not at.ndim:  # one temperature for all: no row is looked up
        return np.asarray(table[..., int(first) : int(first) + _NEAR] @ np.array(parts))
    shape = np.broadcast_shapes(table.shape[:-1], first.shape)
    wide, place = np.broadcast_to(table, (*shape, NODES)), np.broadcast_to(first, shape)
    total = np.zeros(shape)
    for k, part in enumerate(parts):
        total += part * np.take_along_axis(wide, (place + k)[..., None], axis=-1)[..., 0]
    return total


def best_beta(loss: Floats) -> float:
    """The β that minimises a (K,) table of losses, 1 where the table ends before it does."""
    grid = np.linspace(BETAS[0], BETAS[-1], 20 * NODES)
    values = between(loss, grid)
    best = int(values.argmin())
    if best in (0, len(grid) - 1):
        return 1.0
    a, b, c = values[best - 1 : best + 2]
    return float(grid[best] + (grid[1] - grid[0]) * 0.5 * (a - c) / max(a - 2 * b + c, 1e-300))


def fit_temperature(tables: RowTables, w: Floats) -> Temperature:
    """`Temperature` to three digits, T = 1 where the best lies beyond [1/3, 6.7]."""
    made = Temperature()
    beta = best_beta(w @ tables.nll)
    made.classes_, made.temperature_, made.has_optimum_ = tables.classes, 1.0 / beta, beta != 1.0
    return made


def fit_cwmcs(tables: RowTables, w: Floats, *, shrinkage: float = 30.0, folds: int = 5) -> CwMCS:
    """`CwMCS` by predicted class, each cwMCS_k times n_k/(n_k + κ), n_k the class's weight in equal rows.

    γ, on (−1, 1) step 0.05, is judged on rows whose cwMCS_k were measured without them, and of those within a standard
    error of the best the one nearest 0 is taken.
    """
    made = CwMCS(shrinkage=shrinkage, folds=folds, floor=FLOOR, sure=0.0)
    n = len(tables.top)
    # Weights in units of rows: κ is a number of rows.
    w = w * (w.sum() / float(w @ w))
    temperature = 1.0 / best_beta(w @ tables.nll)
    gap = between(tables.confidence, 1.0 / temperature) - tables.correct

    fold = np.random.default_rng(0).permutation(n) % folds
    cell = fold * tables.classes + tables.top
    shape = folds, tables.classes
    mass = arrays.group_sums(cell, w, folds * tables.classes).reshape(shape)
    sums = arrays.group_sums(cell, w * gap, folds * tables.classes).reshape(shape)

    def measured(m: Floats, s: Floats) -> Floats:
        present = m > 0
        raw = np.divide(s, m + shrinkage, out=np.zeros_like(s), where=present)
        return normalised(raw, present, "max", False) if present.any() else raw

    own = measured(mass.sum(axis=0), sums.sum(axis=0))
    others = np.array([measured(mass.sum(axis=0) - mass[k], sums.sum(axis=0) - sums[k]) for k in range(folds)])
    ends = np.array([end for s in (own, *others) for end in (s.min(), s.max())])
    gammas = GAMMAS[(1.0 + np.outer(GAMMAS, ends) >= FLOOR).all(axis=1)]
    table = tables.by_class(tables.nll, w, fold, folds)
    beta = 1.0 / (temperature * (1.0 + gammas[:, None, None] * others))
    losses = between(table, beta).sum(axis=(1, 2))
    best = int(losses.argmin())
    rowwise = others[fold, tables.top]
    moved = between(tables.nll, 1.0 / (temperature * (1.0 + gammas[best] * rowwise)))
    moved -= between(tables.nll, 1.0 / temperature)
    equal = np.flatnonzero(losses <= losses[best] + float((w * moved).std() * np.sqrt(n)))
    gamma = float(gammas[equal[np.abs(gammas[equal]).argmin()]])
    made.classes_, made.temperature_, made.gamma_, made.scores_ = tables.classes, temperature, gamma, own
    made.temperatures_ = temperature * (1.0 + gamma * own)
    return made
