"""An audit as one self-contained page: the verdict and its reasons, the evidence by exit, and plots of it."""

import io
import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from offramp.runtime import plots
from offramp.runtime.jobs.auditing.evidence import (
    CONTROLS,
    KERNELS,
    MULTIPLES,
    ROUTED,
    Audit,
    FeatureAudit,
    RoutingProbe,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = {
    "nw_confidence": "confidence",
    "nw_confidence_entropy": "confidence, entropy",
    ROUTED: "confidence, feature",
    "linear": "linear(c)",
    "ridge": "ridge(c, H)",
    "mlp": "MLP(c)",
    "mlp_routing": "MLP(c, H)",
    "mlp_shuffled": "MLP(c, H shuffled)",
}
_COLUMNS = 3
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem;
  color: #1f2933; background: #fff }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .3rem .7rem; border-bottom: 1px solid #d8dee4 }
td { white-space: nowrap }
th:first-child, td:first-child { text-align: left }
.verdict { border-left: .4rem solid #d9622b; padding: .5rem 1rem; background: #f6f8fa; font-size: 1.1rem }
.yes { border-color: #2563eb }
.wide { overflow-x: auto } .wide svg { max-width: 100%; height: auto }
p.how { max-width: 46rem }
"""


def page(found: Audit, about: dict[str, Any]) -> str:
    """The whole page. about: what the audit's document says of its records and options."""
    each = [(j, one) for j, exit_ in zip(found.numbers, found.exits, strict=True) for one in exit_.features]
    title = f"Routing audit of {about['model']}"
    reasons = "".join(
        f"<li>Exit {j}: {escape('; '.join(one.missing()) or 'all the evidence is there')}.</li>"
        for j, one in zip(found.numbers, found.exits, strict=True)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p class="how">Does routing say more about errors than confidence does? “Yes” takes three pieces of evidence at one
exit: for one feature of routing (the mean entropy, its spread, or the last), a gap in accuracy at matched confidence
that a permutation test rejects, and a kernel that sees the feature better than both kernels that don't, on held-out
rows, at p-values adjusted for all features at all exits (Holm); a network that sees routing better than one that
doesn't, or sees it shuffled. AR-CondCal is the kernel that sees r_std.</p>
<p class="verdict{" yes" if found.yes else ""}">{escape(found.verdict)}</p>
<ul>{reasons}</ul>
<h2>Accuracy at matched confidence</h2>
<p class="how">Rows in the upper third of a feature against those in the lower third, in each bin of confidence. Noise
alone makes gaps, so they have a test and no interval: “would be found” is the gap, alike in all bins, that the test
would have rejected in 80% of such samples. Smaller ones may be there.</p>
{_table(_GAPS, [_gaps(j, one) for j, one in each])}
{_figure([(f"exit {j}, {one.feature}", _draw_gaps(one)) for j, one in each])}
<h2>Kernels of equal bandwidth</h2>
<p class="how">Negative log-likelihood of right and wrong on held-out rows, lower is better. The advantage is the
control's minus that of the kernel that sees the feature, with its paired 95% interval; above 0 is in routing's
favour.</p>
{_table(_NLLS, [_nlls(j, one) for j, one in each])}
{_figure([(f"exit {j}, {one.feature}", _draw_sweep(one)) for j, one in each])}
<h2>Networks of equal capacity</h2>
<p class="how">Held-out R² on |confidence − right|, mean over seeds. The uplift is what seeing routing adds over the
better of not seeing it and seeing it shuffled, with its 95% t-interval over seeds.</p>
{_table(_R2S, [_r2s(j, one.probe) for j, one in zip(found.numbers, found.exits, strict=True)])}
{_figure([(f"exit {j}", _draw_probe(one.probe)) for j, one in zip(found.numbers, found.exits, strict=True)])}
<h2>How it was made</h2>
{_table(["", ""], [[str(k), str(v)] for k, v in about.items()])}
</body></html>
"""


_GAPS = ["exit", "feature", "largest gap", "p", "weighted gap", "would be found", "p", "shared bins"]
_NLLS = ["exit", "feature", *(_NAMES[k] for k in KERNELS), *(f"advantage over {_NAMES[k]}" for k in CONTROLS)]
_NLLS += ["p", "p (Holm, with the gap's)"]
_R2S = ["exit", *(_NAMES[k] for k in ("linear", "ridge", "mlp", "mlp_routing", "mlp_shuffled")), "uplift"]


def _gaps(j: int, one: FeatureAudit) -> list[str]:
    gap = one.permutation.observed
    return [
        str(j),
        one.feature,
        *(_number(gap.max), _number(one.permutation.max)),
        *(_number(gap.weighted), _number(one.detectable), _number(one.permutation.weighted)),
        str(gap.shared_bins),
    ]


def _nlls(j: int, one: FeatureAudit) -> list[str]:
    kernels = one.kernels
    gains = [kernels.advantage[name] for name in CONTROLS]
    return [
        str(j),
        one.feature,
        *(_number(kernels.nll[name]) for name in KERNELS),
        *(f"{_number(mean)} {_range((low, high))}" for mean, low, high in gains),
        *(_number(kernels.p_value), _number(one.adjusted)),
    ]


def _r2s(j: int, probe: RoutingProbe) -> list[str]:
    return [
        str(j),
        *(_number(float(values.mean())) for values in probe.r2.values()),
        f"{_number(probe.uplift)} {_range((probe.low, probe.high))}",
    ]


def _number(value: float) -> str:
    return f"{value:.4f}" if np.isfinite(value) else "n/a"


def _range(ends: tuple[float, float]) -> str:
    return f"[{_number(ends[0])}, {_number(ends[1])}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f'<div class="wide"><table>{line(head, "th")}{"".join(line(row, "td") for row in rows)}</table></div>'


def _draw_gaps(one: FeatureAudit) -> Any:
    def draw(ax: "Axes") -> None:
        plots.matched_gaps(one.permutation.observed, ax=ax)

    return draw


def _draw_sweep(one: FeatureAudit) -> Any:
    def draw(ax: "Axes") -> None:
        for name, style in zip(KERNELS, ("--", ":", "-"), strict=True):
            colour = plots.WARM if name == ROUTED else plots.INK
            ax.plot(MULTIPLES, [one.kernels.sweep[name][m] for m in MULTIPLES], style, color=colour, label=_NAMES[name])
        ax.set_xscale("log", base=2)
        ax.set_xticks(MULTIPLES, ["¼", "½", "1", "2", "4"])
        ax.set(xlabel="bandwidth, in multiples of Scott's", ylabel="held-out NLL")
        ax.legend(fontsize="small")

    return draw


def _draw_probe(probe: RoutingProbe) -> Any:
    def draw(ax: "Axes") -> None:
        names = list(probe.r2)
        means = [float(probe.r2[name].mean()) for name in names]
        colours = [plots.WARM if name == "mlp_routing" else plots.ACCENT for name in names]
        ax.barh([_NAMES[name] for name in names], means, color=colours)
        for k, name in enumerate(names):
            ax.plot(probe.r2[name], [k] * len(probe.r2[name]), "|", color=plots.INK)
        ax.invert_yaxis()
        ax.axvline(0.0, color=plots.INK, linewidth=1)
        ax.set(xlabel="held-out R²; a mark a seed")

    return draw


def _figure(drawings: Sequence[tuple[str, Any]]) -> str:
    """Plots side by side as inline SVG, the same bytes for the same audit."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "offramp", "svg.fonttype": "none", "font.family": "sans-serif"}):
        columns = min(len(drawings), _COLUMNS)
        rows = math.ceil(len(drawings) / columns)
        figure = Figure(figsize=(5.0 * columns, 3.8 * rows), layout="constrained")
        for k, (title, draw) in enumerate(drawings):
            ax = figure.add_subplot(rows, columns, k + 1)
            draw(ax)
            ax.set_title(f"{title}: {ax.get_title()}" if ax.get_title() else title, fontsize="medium")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return f'<div class="wide">{text[text.index("<svg") :]}</div>'
