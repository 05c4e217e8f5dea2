"""Plots of what the metrics measure. Needs matplotlib, which is loaded when the first one is drawn.

Each function draws on `ax` (a new one by default) and returns it; nothing is shown or saved.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import metrics
from offramp.runtime.errors import InputError, how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A smooth curve is drawn where at least this many rows bear on it.
LEAST_ROWS = 10
INK, ACCENT, PALE, WARM = "#1f2933", "#2563eb", "#c7d7f5", "#d9622b"


def _axes(ax: "Axes | None", size: tuple[float, float] = (5.0, 4.0)) -> "Axes":
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"plots: matplotlib isn't installed. {how_to_install('jobs')}") from error
    # A bare figure: no window system is touched and pyplot keeps no list of it.
    made: Axes = Figure(figsize=size, layout="constrained").add_subplot()
    return made


def reliability_diagram(
    probabilities: ArrayLike, labels: ArrayLike, *, bins: int = 15, smooth: bool = True, ax: "Axes | None" = None
) -> "Axes":
    """Accuracy against confidence: bars by bin, the 95% band of each, how many rows it holds, and the smooth curve.

    probabilities, labels: as for `metrics.ece`. smooth=False leaves the curve out.
    """
    ax = _axes(ax)
    table = metrics.reliability(probabilities, labels, bins)
    middle, width = (table.edges[1:] + table.edges[:-1]) / 2, 1 / bins
    filled = np.flatnonzero(table.count)
    ax.bar(middle[filled], table.accuracy[filled], width * 0.94, color=PALE, label="accuracy by bin")
    right = np.rint(table.accuracy[filled] * table.count[filled]).astype(int)
    sure = np.array([metrics.share_interval(int(k), int(table.count[b])) for k, b in zip(right, filled, strict=True)])
    for number, (b, (low, high)) in enumerate(zip(filled, sure.reshape(-1, 2), strict=True)):
        edges = middle[b] - 0.2 * width, middle[b] + 0.2 * width
        label = None if number else "its 95% interval"
        ax.fill_between(edges, low, high, color=WARM, alpha=0.45, linewidth=0, label=label)
        ax.annotate(f"{table.count[b]:,}", (middle[b], 0.01), ha="center", va="bottom", rotation=90, fontsize=6.5)
    ax.plot([0, 1], [0, 1], "--", color=INK, linewidth=1, label="calibrated")
    if smooth and table.count.sum():
        curve = metrics.smooth_reliability(probabilities, labels)
        # Where hardly a row lies the curve is a guess: so many are within reach of a Gaussian of that width.
        within_reach = 2 * np.sqrt(np.pi) * curve.width * curve.density * table.count.sum()
        seen = within_reach >= LEAST_ROWS
        ax.plot(curve.confidence, np.where(seen, curve.accuracy, np.nan), color=ACCENT, label="smooth curve")
    ece, smece = metrics.ece(probabilities, labels, bins), metrics.smooth_ece(probabilities, labels)
    ax.set(
        xlim=(0, 1),
        ylim=(0, 1),
        xlabel="confidence",
        ylabel="accuracy",
        title=f"ECE {ece:.4f}, smooth {smece:.4f}, n = {int(table.count.sum()):,}",
    )
    ax.legend(loc="upper left", fontsize="small")
    return ax


def risk_coverage(curves: Mapping[str, tuple[ArrayLike, ArrayLike]], *, ax: "Axes | None" = None) -> "Axes":
    """Selective risk against coverage. curves: name -> (score, error), as for `metrics.risk_coverage`."""
    ax = _axes(ax)
    for name, (score, error) in curves.items():
        curve = metrics.risk_coverage(score, error)
        ax.plot(curve.coverage, curve.risk, label=f"{name}  AURC {metrics.aurc(score, error):.4f}")
    ax.set(xlim=(0, 1), xlabel="coverage", ylabel="error among the answered")
    ax.set_ylim(bottom=0)
    ax.legend(loc="upper left", fontsize="small")
    return ax


def cost_accuracy(
    curve: metrics.CostAccuracy,
    points: Mapping[str, tuple[float, float]] | None = None,
    *,
    unit: str = "FLOPs a row",
    ax: "Axes | None" = None,
) -> "Axes":
    """The cost–accuracy curve, with operating points name -> (cost, accuracy) on it."""
    ax = _axes(ax)
    order = np.argsort(curve.cost, kind="stable")
    ax.plot(curve.cost[order], curve.accuracy[order], color=ACCENT)
    for name, (cost, accuracy) in (points or {}).items():
        ax.plot(cost, accuracy, "o", color=WARM)
        ax.annotate(name, (cost, accuracy), textcoords="offset points", xytext=(6, -10), fontsize="small")
    ax.set(xlabel=unit, ylabel="accuracy")
    return ax


def exit_shares(shares: Mapping[str, Sequence[float]], *, ax: "Axes | None" = None) -> "Axes":
    """Which share of the rows leaves at each exit, one stacked bar an operating point: name -> (J,) shares."""
    if len({len(share) for share in shares.values()}) > 1:
        raise InputError("shares: expected the same number of exits for every operating point.")
    ax = _axes(ax)
    names = list(shares)
    table = np.array([shares[name] for name in names], np.float64).reshape(len(names), -1)
    left = np.zeros(len(names))
    for j, column in enumerate(table.T):
        depth = j / max(table.shape[1] - 1, 1)
        ax.barh(names, column, left=left, color=ACCENT, alpha=0.25 + 0.75 * depth, label=f"exit {j}")
        left += column
    ax.set(xlim=(0, 1), xlabel="share of rows")
    ax.legend(ncols=3, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return ax


def _bars(ax: "Axes", values: Any, label: str, names: Sequence[str]) -> None:
    """One bar a value that is defined. By place, not by name: two classes may be called the same."""
    known = np.flatnonzero(~np.isnan(values))
    place = np.arange(len(known))
    ax.bar(place, values[known], color=np.where(values[known] >= 0, ACCENT, WARM).tolist())
    ax.set_xticks(place, [names[k] for k in known.tolist()])
    ax.set_ylabel(label)


def eefp_bars(scores: ArrayLike, correct: ArrayLike, *, ax: "Axes | None" = None) -> "Axes":
    """EEFP of each exit that has one; the last has none. scores, correct: (J, N)."""
    ax = _axes(ax)
    values = metrics.eefp(scores, correct)
    _bars(ax, values, "EEFP (AUROC)", [str(j) for j in range(len(values))])
    ax.axhline(0.5, linestyle="--", color=INK, linewidth=1)
    ax.set(ylim=(0, 1), xlabel="exit")
    return ax


def cwmcs_by_class(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    classes: Sequence[str] | None = None,
    by: metrics.By = "true",
    most: int = 30,
    ax: "Axes | None" = None,
) -> "Axes":
    """Signed miscalibration by class, + over- and − under-confident, sorted; of many classes the `most` extreme."""
    ax = _axes(ax, (7.0, 4.0))
    values = metrics.cw_mcs(probabilities, labels, by=by)
    names = [str(k) for k in range(len(values))] if classes is None else list(classes)
    if len(names) != len(values):
        raise InputError(f"classes: expected {len(values)} names, got {len(names)}.")
    known = np.flatnonzero(~np.isnan(values))
    kept = known[np.argsort(-np.abs(values[known]), kind="stable")[:most]]
    kept = kept[np.argsort(-values[kept], kind="stable")]
    _bars(ax, values[kept], f"MCS by {by} class", [names[k] for k in kept])
    ax.axhline(0.0, color=INK, linewidth=1)
    ax.tick_params(axis="x", rotation=90, labelsize="x-small")
    return ax


def matched_gaps(gap: metrics.MatchedGap, *, ax: "Axes | None" = None) -> "Axes":
    """Accuracy of high- minus low-routing rows in each confidence bin; bars as opaque as their bin is full."""
    ax = _axes(ax)
    bins = len(gap.gaps)
    smaller = np.minimum(gap.low_rows, gap.high_rows)
    shared = np.flatnonzero(~np.isnan(gap.gaps))
    for b in shared:
        strength = 0.25 + 0.75 * smaller[b] / smaller[shared].max()
        ax.bar((b + 0.5) / bins, gap.gaps[b], 0.9 / bins, color=ACCENT, alpha=float(strength))
    ax.axhline(0.0, color=INK, linewidth=1)
    ax.set(
        xlim=(0, 1),
        xlabel="confidence",
        ylabel="accuracy, high − low routing entropy",
        title=f"max {gap.max:.3f}, weighted {gap.weighted:.3f}, {gap.shared_bins} shared bins",
    )
    return ax
