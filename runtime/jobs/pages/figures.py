"""Plots as inline SVG: all of one size, with captions, in the page's own colours, so that they go dark with it."""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from offramp.runtime import plots
from offramp.runtime.errors import InputError, how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (5.0, 4.0)
# What a drawing's colours are in the page. The further ones tell lines apart that have no meaning of their own.
COLOURS = {
    plots.INK: "var(--ink)",
    plots.ACCENT: "var(--second)",
    plots.PALE: "var(--pale)",
    plots.WARM: "var(--warm)",
    "#0f9d7a": "var(--accent)",
    "#8e44ad": "light-dark(#8e44ad, #d3a4f0)",
    "#b8860b": "light-dark(#8f6a00, #e6c15a)",
    "#c2185b": "light-dark(#b0164f, #ff8fb8)",
    "#546e7a": "light-dark(#546e7a, #a9bcc5)",
}
CYCLE = [plots.ACCENT, plots.WARM, "#0f9d7a", "#8e44ad", "#b8860b", "#c2185b", "#546e7a"]


@dataclass(frozen=True)
class Figure:
    """title and caption: plain text. draw: onto the axes; it may raise where there is nothing to draw."""

    title: str
    caption: str
    draw: Callable[["Axes"], Any]


def figures(wanted: Sequence[Figure]) -> str:
    """All that can be drawn, side by side; why the rest is missing in one line."""
    shown, missing = [], []
    for place, one in enumerate(wanted):
        svg, why = _svg(one, place)
        if why:
            missing.append(f"{one.title}: {why}")
            continue
        shown.append(
            f"<figure>{svg}<figcaption><b>{escape(one.title)}.</b> {escape(one.caption)}</figcaption></figure>"
        )
    left_out = f"<p class='quiet'>Not drawn: {escape('; '.join(missing))}.</p>" if missing else ""
    return (f"<div class='plots'>{''.join(shown)}</div>" if shown else "") + left_out


def _svg(one: Figure, place: int) -> tuple[str, str]:
    """The drawing, or why there is none."""
    try:
        import matplotlib as mpl
        from cycler import cycler
        from matplotlib.figure import Figure as Sheet
    except ImportError:
        return "", f"it needs matplotlib, which isn't installed. {how_to_install('jobs')}"
    # Names are a user's: no "$" in them may be taken for a formula. Ids that don't change from run to run, and are of
    # this drawing alone. Letters stay letters: the page's fonts have more of them than matplotlib's.
    settings: Any = {
        "text.parse_math": False,
        "svg.hashsalt": f"offramp {place} {one.title}",
        "svg.fonttype": "none",
        "font.size": 9.0,
        "axes.prop_cycle": cycler(color=CYCLE),
        "axes.titlesize": "medium",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
        **dict.fromkeys(
            ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"),
            plots.INK,
        ),
    }
    stream = io.StringIO()
    with mpl.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that the font for measuring lacks
        sheet = Sheet(figsize=SIZE, layout="constrained")
        try:
            one.draw(sheet.add_subplot())
        except (InputError, ValueError, FloatingPointError) as error:
            return "", str(error).rstrip(".") or "it isn't defined here"
        sheet.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inlined(stream.getvalue(), one.title), ""


def _inlined(drawing: str, label: str) -> str:
    drawing = drawing[drawing.index("<svg") :].strip()
    drawing = re.sub(r"<metadata>.*?</metadata>\s*", "", drawing, flags=re.DOTALL)
    head, _, rest = drawing.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None, "matplotlib's drawings have one"
    # Its fonts aren't the page's: the page's own name them.
    rest = re.sub(r"(font: [^;'\"]*?)'[^;\"]*", r"\1system-ui, sans-serif", rest)
    for colour, variable in COLOURS.items():
        rest = rest.replace(colour, variable)
    return f'<svg {box.group()} role="img" aria-label="{escape(label)}">{rest.replace("xlink:href", "href")}'
