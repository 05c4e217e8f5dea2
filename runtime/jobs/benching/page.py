"""A bench as one self-contained page: the verdict, what would help, and the figures with a picture of each mode."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from offramp.runtime import plots
from offramp.runtime.jobs.benching.bench import Bench
from offramp.runtime.jobs.benching.describe import by_mode, who
from offramp.runtime.jobs.pages.figures import Figure, figures
from offramp.runtime.jobs.pages.look import document, pairs, section, warning
from offramp.runtime.jobs.pages.tables import Column, count, four, name, percent, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TIMES = [
    Column("", "who", name),
    Column("ms a batch", "ms", four),
    Column("rows a second", "rows_per_second", four),
    Column("times as fast", "speedup", four),
    Column("heads and gates cost, ms", "costs_ms", four),
    Column("leaving early saves, ms", "saves_ms", four),
    Column("rounds", "rounds", count),
]
_POINTS = [
    Column("point", "point", name),
    Column("accuracy", "accuracy", percent),
    Column("FLOPs of full", "flops_fraction", percent),
    Column("answered", "coverage", percent),
]
_HOW = (
    "All take turns at the same rows in each round, in an order that rotates. Medians over rounds, and of ratios "
    "within a round, with 95% intervals by resampling the rounds."
)


def page(found: Bench) -> str:
    """The whole page."""
    about, model, machine = found.about, found.about["model"], found.about["machine"]
    title = f"Does leaving early pay? {model['name']} {model['version']}"
    first, *others = found.verdicts
    hints = "".join(f"<li>{escape(hint.replace('`', ''))}</li>" for hint in first.hints)
    also = "".join(f"<p>{escape(one.sentence)}</p>" for one in others)
    modes = by_mode(found.times)
    return document(
        title,
        [
            f"<header><h1>{escape(title)}</h1></header>",
            f"<p class='lead{'' if first.pays else ' no'}'>{escape(first.sentence)}</p>",
            warning("Take care", found.notes),
            section("What would help", f"<ul>{hints}</ul>" if hints else ""),
            section("The other points", also),
            section("Answers", table(_POINTS, found.points)),
            section("Times", f"<p>{escape(_HOW)}</p>", figures([_figure(lines) for lines in modes])),
            *(
                section(escape(lines[0]["mode"]), table(_TIMES, [{**line, "who": who(line)} for line in lines]))
                for lines in modes
            ),
            section(
                "How it was made",
                pairs(
                    [
                        ("rows", f"{found.rows:,} of {found.of:,}"),
                        ("against", about["rival"]),
                        ("machine", f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}"),
                        ("threads", str(about["threads"])),
                        *((key, str(value)) for key, value in about["versions"].items()),
                    ]
                ),
            ),
        ],
    )


def _table(lines: Sequence[Mapping[str, Any]]) -> str:
    return table(_TIMES, [{**line, "who": who(line)} for line in lines])


def _figure(lines: Sequence[Mapping[str, Any]]) -> Figure:
    def draw(ax: "Axes") -> None:
        values = [line["ms"] for line in lines]
        around = [
            [line["ms"] - line["ms_low"] for line in lines],
            [line["ms_high"] - line["ms"] for line in lines],
        ]
        colours = [plots.WARM if line["point"] is None else plots.ACCENT for line in lines]
        # By place, not by name: two points may be called alike once they are cut off.
        ax.barh(range(len(lines)), values, xerr=around, color=colours, ecolor=plots.INK)
        ax.set_yticks(range(len(lines)), [who(line) for line in lines])
        ax.invert_yaxis()
        ax.set(xlabel="milliseconds a batch")

    return Figure(lines[0]["mode"].capitalize(), "Shorter is faster; with 95% intervals.", draw)
