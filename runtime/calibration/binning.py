"""Step functions of the top-1 confidence: histogram binning, and its average over many binnings."""

from math import lgamma
from typing import Any, Literal

import numpy as np
from offramp.runtime import arrays, scores
from offramp.runtime.arrays import Array, Floats
from offramp.runtime.calibration.protocol import Given
from offramp.runtime.calibration.registry import register
from offramp.runtime.calibration.top_one import TopOne
from offramp.runtime.errors import InputError
from offramp.runtime.metrics.bins import check_bins


class _Steps(TopOne):
    """Base: levels_[b] for edges_[b − 1] < score ≤ edges_[b]; edges (B − 1,) rising in log-odds, levels (B,)."""

    edges_: Floats
    levels_: Floats

    def _score(self, given: Given) -> Array:
        step = np.searchsorted(self.edges_, given.score.astype(np.float64), side="left")
        return scores.logit(self.levels_[step])


@register
class HistogramBinning(_Steps):
    """The share that was right in each bin of confidence. Zadrozny & Elkan 2001.

    strategy: "equal_width" right-closed bins of the confidence, or "equal_mass" ones of the fitted rows, tied
    rows together. An empty bin answers its middle. Levels of exactly 0 and 1 are possible.
    """

    name = "histogram_binning"

    def __init__(self, bins: int = 15, strategy: Literal["equal_width", "equal_mass"] = "equal_width") -> None:
        if strategy not in ("equal_width", "equal_mass"):
            raise InputError(f'strategy: expected "equal_width" or "equal_mass", got {strategy!r}.')
        self.bins, self.strategy = check_bins(bins), strategy

    def options(self) -> dict[str, Any]:
        return {"bins": self.bins, "strategy": self.strategy}

    def _fit_pairs(self, given: Given, correct: Array, w: Floats) -> None:
        s = given.score.astype(np.float64)
        if self.strategy == "equal_width":
            edges = scores.logit(np.arange(1, self.bins) / self.bins)
        else:
            edges = mass_edges(np.sort(s), self.bins)
        step = np.searchsorted(edges, s, side="left")
        mass, right = (arrays.group_sums(step, v, len(edges) + 1) for v in (w, w * correct))
        corners = scores.sigmoid(np.concatenate([[-np.inf], edges, [np.inf]]))
        middles = (corners[1:] + corners[:-1]) / 2
        self.edges_ = edges
        self.levels_ = np.where(mass > 0, right / np.where(mass > 0, mass, 1.0), middles)


def mass_edges(ordered: Floats, bins: int) -> Floats:
    """Edges between equal-mass bins of sorted values, halfway between neighbours; never inside a tie."""
    cuts = np.unique(np.arange(1, bins) * len(ordered) // bins)
    cuts = cuts[(cuts > 0) & (cuts < len(ordered))]
    # A cut that falls inside a tie moves to the tie's end.
    cuts = np.unique(np.searchsorted(ordered, ordered[cuts - 1], side="right"))
    cuts = cuts[cuts < len(ordered)]
    below, above = ordered[cuts - 1], ordered[cuts]
    middle = below + (above - below) / 2
    # Between two neighbouring floats the middle rounds to one of them; the edge belongs to the bin below.
    return np.where((middle >= below) & (middle < above), middle, below)


@register
class BBQ(_Steps):
    """Bayesian binning into quantiles: equal-mass histograms of many sizes, averaged by how well each
    explains the outcomes. Naeini et al. 2015.

    Sizes from n^(1/3)/10 to 10·n^(1/3) (at most n/2); Beta prior of strength 2 spread over the bins around
    their confidence. The average of step functions is one step function, and that is what is kept.
    """

    name = "bbq"

    def __init__(self, strength: float = 2.0) -> None:
        if not strength > 0:
            raise InputError(f"strength: expected a number above 0, got {strength!r}.")
        self.strength = float(strength)

    def options(self) -> dict[str, Any]:
        return {"strength": self.strength}

    def _fit_pairs(self, given: Given, correct: Array, w: Floats) -> None:
        s = given.score.astype(np.float64)
        order = np.argsort(s, kind="stable")
        ordered, right, weight = s[order], (w * correct)[order], w[order]
        cube = np.cbrt(len(s))
        sizes = range(max(1, int(cube / 10)), max(1, min(int(np.ceil(10 * cube)), len(s) // 2)) + 1)
        models = [self._model(ordered, right, weight, size) for size in sizes]
        evidence = np.array([model[2] for model in models])
        share = np.exp(evidence - evidence.max())
        share /= share.sum()
        edges = np.unique(np.concatenate([model[0] for model in models]))
        # One place in each step of the common refinement: its upper edge, and beyond the last.
        places = np.append(edges, np.inf)
        levels = np.zeros(len(places))
        for part, (own, level, _) in zip(share, models, strict=True):
            levels += part * level[np.searchsorted(own, places, side="left")]
        self.edges_, self.levels_ = edges, levels

    def _model(self, ordered: Floats, right: Floats, weight: Floats, size: int) -> tuple[Floats, Floats, float]:
        """Edges, posterior means and log evidence of one binning."""
        edges = mass_edges(ordered, size)
        starts = np.concatenate([[0], np.searchsorted(ordered, edges, side="right")])
        m = np.add.reduceat(right, starts)
        n = np.add.reduceat(weight, starts)
        corners = scores.sigmoid(np.concatenate([[-np.inf], edges, [np.inf]]))
        middle = np.clip((corners[1:] + corners[:-1]) / 2, 1e-6, 1 - 1e-6)
        prior = self.strength / len(n)
        a, b = prior * middle, prior * (1 - middle)
        gamma = np.vectorize(lgamma, otypes=[float])
        each = gamma(prior) - gamma(n + prior) + gamma(m + a) - gamma(a) + gamma(n - m + b) - gamma(b)
        return edges, (m + a) / (n + prior), float(each.sum())
