"""The report's plots."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from offramp.runtime import plots
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.calibrating.promises import promised
from offramp.runtime.jobs.calibrating.report.exits import classwise_rows
from offramp.runtime.jobs.calibrating.report.measured import Measured
from offramp.runtime.jobs.calibrating.report.reliability import confidences
from offramp.runtime.jobs.data.labelled_rows import evenly
from offramp.runtime.jobs.pages.figures import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Found = Mapping[str, Any]

# Of more operating points than this the rest have their numbers in the tables: names would cover the drawing.
MOST_POINTS = 8
# Points with reliability diagrams, the headline's first.
MOST_DIAGRAMS = 3
# A curve of more rows than this looks no different.
DRAWN_ROWS = 20_000
# Classes that bars have room for.
MOST_BARS = 30


def overview(measured: Measured, found: Found, cost: str) -> list[Figure]:
    """Cost against accuracy, and where rows leave."""
    few = found["operating_points"][:MOST_POINTS]
    more = _more(len(found["operating_points"]) - len(few))
    shares = {
        line["point"]: [line[f"exit_{j}_share"] for j in range(measured.test.exits)]
        for line in reversed(few)
        if line["rows"]
    }
    return [
        Figure(
            f"Accuracy against {cost}",
            "The line joins the rules that no other beats, squares are single exits by number, the star is the oracle: "
            f"every row leaves at its first right exit. All on the {len(measured.test):,} test rows{more}.",
            lambda ax: _cost_accuracy(ax, few, found, cost),
        ),
        Figure(
            "Where rows leave",
            f"The share of the test rows that leaves at each exit, by operating point{more}.",
            lambda ax: _shares(ax, shares),
        ),
    ]


def _more(left_out: int) -> str:
    return f"; {left_out} more points are in the tables only" if left_out > 0 else ""


def _needs(rows: int) -> None:
    if not rows:
        raise InputError("there is no test row")


def _cost_accuracy(ax: "Axes", few: Sequence[Found], found: Found, cost: str) -> None:
    _needs(few[0]["rows"])
    line = sorted((one["flops_fraction"], one["accuracy"]) for one in found["frontier"])
    if line:
        ax.plot(*zip(*line, strict=True), color=plots.ACCENT, linewidth=1.2, zorder=1)
    for one in found["single_exits"]:
        place = one["flops_fraction"], one["accuracy"]
        ax.plot(*place, "s", color=plots.PALE, markeredgecolor=plots.INK, markersize=7, markeredgewidth=0.6, zorder=2)
        ax.annotate(str(one["exit"]), place, textcoords="offset points", xytext=(0, -13), ha="center", fontsize=7)
    best = found["oracle"]
    ax.plot(best["flops_fraction"], best["accuracy"], "*", color=plots.INK, markersize=11, label="oracle")
    labels = _apart(one["point"] for one in few)
    for one, label, marker in zip(few, labels, itertools.cycle("oD^vPX<>"), strict=False):
        ax.plot(one["flops_fraction"], one["accuracy"], marker, markersize=7, label=label, zorder=3)
    ax.legend(loc="lower right", fontsize="small")
    ax.set(xlabel=f"{cost}, as a share of the full model's", ylabel="accuracy")
    ax.xaxis.set_major_formatter(_percents)
    ax.yaxis.set_major_formatter(_percents)


def _percents(value: float, _: Any = None) -> str:
    return f"{100 * value:.4g}%"


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _apart(names: Iterable[str], most: int = 24) -> list[str]:
    """Short names, numbered where they would be the same."""
    short = [_short(name, most) for name in names]
    times = Counter(short)
    return [one if times[one] == 1 else f"{one} ({k})" for k, one in enumerate(short)]


def _shares(ax: "Axes", shares: Mapping[str, Sequence[float]]) -> None:
    _needs(len(shares))
    plots.exit_shares(dict(zip(_apart(shares), shares.values(), strict=True)), ax=ax)
    ax.xaxis.set_major_formatter(_percents)


def trust(measured: Measured, found: Found) -> list[Figure]:
    """Is confidence right, and does it tell errors apart? The headline's point first."""
    test, first = measured.test, found["headline"]
    names = [first, *(name for name in measured.points if name != first)]
    made = [
        Figure(
            f"Reliability of {_short(name)}, {when}",
            f"n = {len(test):,}. Bars are accuracy by bin, the bands their 95% intervals, the numbers rows; the "
            "line is a smooth estimate. On the diagonal confidence is right.",
            _reliability(confidence, ~measured.wrong[name]),
        )
        for name in names[:MOST_DIAGRAMS]
        for when, confidence in confidences(measured, name)
    ]
    more = _more(len(names) - MOST_POINTS)
    return [
        Figure(
            "Error against coverage",
            f"Who answers only the surest rows errs less. Dots are where each point abstains, dotted lines what is "
            f"promised{more}.",
            lambda ax: _risk_coverage(ax, measured, names[:MOST_POINTS]),
        ),
        *made,
        Figure(
            "EEFP by exit",
            "Above ½ an exit is more confident where leaving is right: where it is right, or nobody deeper would be. "
            "The last exit has none.",
            lambda ax: _eefp(ax, found),
        ),
    ]


def _reliability(confidence: Any, right: Any) -> Any:
    def draw(ax: "Axes") -> None:
        _needs(len(right))
        # Without an error, or without an answer that is right, there is no curve to estimate.
        plots.reliability_diagram(confidence, right, smooth=bool(0 < right.sum() < len(right)), ax=ax)

    return draw


def _risk_coverage(ax: "Axes", measured: Measured, names: Sequence[str]) -> None:
    _needs(len(measured.test))
    some = evenly(len(measured.test), DRAWN_ROWS)
    curves = [(measured.outcomes[name].log_odds[some], measured.wrong[name][some]) for name in names]
    plots.risk_coverage(dict(zip(_apart(names), curves, strict=True)), ax=ax)
    for name, line in zip(names, ax.get_lines(), strict=False):
        kept = ~measured.outcomes[name].abstain
        if kept.any():
            ax.plot(kept.mean(), measured.wrong[name][kept].mean(), "o", color=line.get_color())
    bounds = {promised(measured.points[name]).risk for name in names} - {None}
    for bound in sorted(bound for bound in bounds if bound is not None):
        ax.axhline(bound, linestyle=":", color=plots.WARM, linewidth=1, label=f"promised {bound:.3g}")
    ax.xaxis.set_major_formatter(_percents)
    ax.yaxis.set_major_formatter(_percents)
    ax.legend(loc="upper left", fontsize="small")


def _eefp(ax: "Axes", found: Found) -> None:
    known = [line for line in found["exits"] if line["eefp"] is not None]
    if not known:
        raise InputError("it has no value at any exit")
    exits = [str(line["exit"]) for line in known]
    values = [line["eefp"] for line in known]
    ax.bar(exits, values, color=plots.ACCENT)
    sure = [k for k, line in enumerate(known) if line["eefp_low"] is not None]
    low = [values[k] - known[k]["eefp_low"] for k in sure]
    high = [known[k]["eefp_high"] - values[k] for k in sure]
    ax.errorbar(
        sure, [values[k] for k in sure], [np.maximum(low, 0), np.maximum(high, 0)], fmt="none", ecolor=plots.INK
    )
    ax.axhline(0.5, linestyle="--", color=plots.INK, linewidth=1)
    ax.set(ylim=(0, 1), xlabel="exit", ylabel="EEFP (AUROC), 95% interval")


def classes(measured: Measured, found: Found, names: Sequence[str] | None) -> list[Figure]:
    """How many rows each class has, how many of them are right, and who is over-confident."""
    table, first = found["classes"], found["headline"]
    last = measured.test.exits - 1
    return [
        Figure(
            "Labels",
            f"Labelled rows by class, commonest first: {len(table)} classes occur of {measured.test.classes}.",
            lambda ax: _labels(ax, table),
        ),
        Figure(
            "Accuracy by class",
            f"How many classes have which accuracy at {_short(first)}, by their test rows.",
            lambda ax: _accuracies(ax, table),
        ),
        Figure(
            "Miscalibration by class",
            f"MCS of the rows that are answered so by exit {last}, + over-confident, at {_short(first)}; the "
            f"{MOST_BARS} farthest from 0.",
            lambda ax: _miscalibration(ax, measured, first, names),
        ),
    ]


def _labels(ax: "Axes", table: Sequence[Found]) -> None:
    rows = sorted((line["labelled"] for line in table), reverse=True)
    ax.fill_between(
        np.arange(len(rows) + 1), [*rows, rows[-1]], step="post", color=plots.ACCENT, alpha=0.8, linewidth=0
    )
    ax.set(xlim=(0, len(rows)), ylim=(0, None), xlabel="classes, by number of rows", ylabel="labelled rows")


def _accuracies(ax: "Axes", table: Sequence[Found]) -> None:
    known = [line["accuracy"] for line in table if line["accuracy"] is not None]
    _needs(len(known))
    ax.hist(known, bins=20, range=(0, 1), color=plots.ACCENT)
    ax.set(xlim=(0, 1), xlabel="accuracy", ylabel="classes")
    ax.xaxis.set_major_formatter(_percents)
    ax.locator_params(axis="y", integer=True)


def _miscalibration(ax: "Axes", measured: Measured, name: str, names: Sequence[str] | None) -> None:
    test = measured.test
    _needs(len(test))
    last = test.exits - 1
    rows = classwise_rows(len(test), test.classes)
    p = measured.points[name].calibrator(last).apply(test.logits[last][rows], test.aux(last, rows))
    short = None if names is None else _apart(names, 16)
    plots.cwmcs_by_class(p, test.truth[rows], classes=short, by="predicted", most=MOST_BARS, ax=ax)
