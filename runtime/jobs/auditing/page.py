"""An audit as one self-contained page: the verdict and its reasons, the evidence by exit, and plots of it."""

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
from offramp.runtime.jobs.pages.figures import Figure, figures
from offramp.runtime.jobs.pages.look import document, folded, pairs, section
from offramp.runtime.jobs.pages.tables import NONE, plain_table
from offramp.runtime.jobs.pages.terms import Terms

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


def page(found: Audit, about: dict[str, Any]) -> str:
    """The whole page. about: what the audit's document says of its records and options."""
    each = [(j, one) for j, exit_ in zip(found.numbers, found.exits, strict=True) for one in exit_.features]
    probes = [(j, one.probe) for j, one in zip(found.numbers, found.exits, strict=True)]
    title, terms = f"Routing audit of {about['model']}", Terms()
    reasons = "".join(
        f"<li>Exit {j}: {escape('; '.join(one.missing()) or 'all the evidence is there')}.</li>"
        for j, one in zip(found.numbers, found.exits, strict=True)
    )
    return document(
        title,
        [
            f"<header><h1>{escape(title)}</h1></header>",
            f"<p class='lead{'' if found.yes else ' no'}'>{escape(found.verdict)}</p>",
            section("Why", f"<ul>{reasons}</ul>", f"<p>{_HOW}</p>"),
            section(
                f"Accuracy at matched confidence ({terms.of('matched gap')})",
                f"<p>{_ON_GAPS}</p>",
                plain_table(_GAPS, [_gaps(j, one) for j, one in each], terms),
                figures(
                    [
                        Figure(f"Gap at exit {j}, {one.feature}", "By bin of confidence.", _draw_gaps(one))
                        for j, one in each
                    ]
                ),
            ),
            section(
                "Kernels of equal bandwidth",
                f"<p>{_ON_KERNELS}</p>",
                plain_table(_NLLS, [_nlls(j, one) for j, one in each], terms),
                figures(
                    [
                        Figure(f"Kernels at exit {j}, {one.feature}", "Lower is better.", _draw_sweep(one))
                        for j, one in each
                    ]
                ),
            ),
            section(
                "Networks of equal capacity",
                f"<p>{_ON_NETWORKS}</p>",
                plain_table(_R2S, [_r2s(j, one) for j, one in probes], terms),
                figures([Figure(f"Networks at exit {j}", "A mark a seed.", _draw_probe(one)) for j, one in probes]),
            ),
            folded("How it was made", pairs((str(k), str(v)) for k, v in about.items())),
            folded("Glossary", terms.glossary()),
            terms.explained(),
        ],
    )


_HOW = (
    "Does routing say more about errors than confidence does? “Yes” takes three pieces of evidence at one exit: "
    "for one feature of routing (the mean entropy, its spread, or the last), a gap in accuracy at matched "
    "confidence that a permutation test rejects, and a kernel that sees the feature better than both kernels that "
    "don't, on held-out rows, at p-values adjusted for all features at all exits (Holm); a network that sees "
    "routing better than one that doesn't, or sees it shuffled. AR-CondCal is the kernel that sees r_std."
)
_ON_GAPS = (
    "Rows in the upper third of a feature against those in the lower third, in each bin of confidence. Noise "
    "alone makes gaps, so they have a test and no interval: “would be found” is the gap, alike in all bins, that "
    "the test would have rejected in 80% of such samples. Smaller ones may be there."
)
_ON_KERNELS = (
    "Negative log-likelihood of right and wrong on held-out rows, lower is better. The advantage is the control's "
    "minus that of the kernel that sees the feature, with its paired 95% interval; above 0 is in routing's "
    "favour."
)
_ON_NETWORKS = (
    "Held-out R² on |confidence − right|, mean over seeds. The uplift is what seeing routing adds over the better "
    "of not seeing it and seeing it shuffled, with its 95% t-interval over seeds."
)
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
    return f"{value:.4f}" if np.isfinite(value) else NONE


def _range(ends: tuple[float, float]) -> str:
    return f"[{_number(ends[0])}, {_number(ends[1])}]"


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
