"""The calibration report as one self-contained HTML page: tables, and plots inlined as SVG."""

import base64
import io
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from offramp.runtime import metrics
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.bundles.inspect_page import readable
from offramp.runtime.jobs.calibrating.promises import promised
from offramp.runtime.jobs.calibrating.report import METRICS, REPORT, Subgroup, classwise_rows, metrics_of
from offramp.runtime.jobs.calibrating.result import Calibrated
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, evenly, outcome_of
from offramp.runtime.jobs.data.opened import ASSUMED
from offramp.runtime.jobs.plain_json import to_json
from offramp.runtime.points import OperatingPoint
from offramp.runtime.scores import sigmoid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = Mapping[str, Any]
Format = Callable[[Any], str]

# Pairs of reliability diagrams; of more operating points the rest have their numbers in the tables.
MOST_DIAGRAMS = 6
# A curve of more rows than this looks no different.
DRAWN_ROWS = 20_000

_STYLE = """
:root { color-scheme: light; --ink: #1f2933; --line: #d5dae1; --pale: #f4f6f9; --bad: #b42318; --good: #18794e; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: #fff; margin: 2rem auto; max-width: 1500px;
  padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
p.lead, p.note { color: #52606d; margin: .2rem 0 .8rem; max-width: 80ch; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { padding: .28rem .65rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th { background: var(--pale); font-weight: 600; white-space: nowrap; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.num, td.text { white-space: nowrap; }
td.long { white-space: normal; min-width: 34ch; }
.bad { color: var(--bad); font-weight: 600; } .good { color: var(--good); }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; } .plots figure { margin: 0; flex: 1 1 340px; max-width: 560px; }
.plots img { width: 100%; height: auto; border: 1px solid var(--line); border-radius: 6px; }
ul.warn { border-left: 4px solid var(--bad); padding: .4rem 1.4rem; background: #fdf3f2; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: 13.5px; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
"""


def report_files(result: Calibrated, groups: Subgroup | None = None) -> dict[str, bytes]:
    """metrics.json and report.html, by name."""
    found = metrics_of(result, groups)
    return {METRICS: to_json(found), REPORT: page(result, found).encode()}


def page(result: Calibrated, found: Mapping[str, Any]) -> str:
    """The report of `report.metrics_of(result)` as HTML. Nothing in it is fetched from anywhere."""
    version, origin = result.calibration.version, found["provenance"]
    split = origin["split"]
    cost = cost_name(origin)

    def table(columns: Sequence[tuple[str, str, Format]], lines: Sequence[Line]) -> str:
        return _table([(title.replace("FLOPs", cost), field, form) for title, field, form in columns], lines)

    def promises(lines: Sequence[Line]) -> list[Line]:
        return [{**line, "promise": line["promise"].replace("FLOPs", cost)} for line in lines]

    body = [
        f"<h1>Calibration, version {version}</h1>",
        f"<p class='lead'>{origin['labelled']:,} labelled rows: {split['fit']:,} to fit, {split['select']:,} to "
        f"select, {split['certify']:,} to certify promises, {split['test']:,} for the figures below and nothing else. "
        "Each promise holds by itself with its own delta, not all of them at once. Intervals are 95%.</p>",
        _warnings("This calibration was refused", found["refused"]),
        _warnings("Targets that can't be kept", found["unmet"]),
        _warnings("About the data", found["notes"]),
        "<h2>Operating points</h2>",
        table(_POINTS, found["operating_points"]),
        "<p class='note'>Oracle (every row leaves at its first right exit): accuracy "
        f"{_percent(found['oracle']['accuracy'])} at {_percent(found['oracle']['flops_fraction'])} of the {cost}.</p>",
        _plots(result, found),
        "<h2>Promises</h2>",
        "<p class='note'>“Held” is what the test rows showed: “yes” where the whole interval is within the target, "
        "“no” where all of it is beyond.</p>",
        table(_PROMISES, promises(found["promises"])),
        "<h2>Exits, each on all test rows</h2>",
        table(_EXITS, found["exits"]),
        "<h2>Exits as the operating points use them</h2>",
        "<p class='note'>Confidence is judged on the rows that reach an exit, accuracy on those that leave there. "
        "n·ConfCE^corr and LinCE^cw are truthful: nobody lowers them by reporting other than what is believed; "
        "compare them at equal numbers of rows only. ECE is for orientation.</p>",
        table(_AT_POINTS, found["exits_at_points"]),
        _classes(found["exits_at_points"], result.classes),
        "<h2>Calibrators that were tried</h2>",
        "<p class='note'>On held-out rows of fit and select that reach the exits. The lowest n·ConfCE^corr wins, or "
        "the simplest that can't be told apart from it; LinCE^cw must be non-inferior and EEFP not significantly "
        "lower.</p>",
        table(_TRIED, found["tried"]) if found["tried"] else "<p>None: too few rows, or none asked for.</p>",
    ]
    if found["compared"]:
        body += [
            "<h2>Against the calibration in force</h2>",
            "<p class='note'>New minus old on test rows that neither calibration was made from; paired bootstrap, p by "
            "Holm.</p>",
            table(_COMPARED, [line for line in found["compared"] if line["difference"]])
            if any(line["difference"] for line in found["compared"])
            else "<p>No figure differs.</p>",
        ]
    if found["shifts"]:
        body += [
            "<h2>Under shift</h2>",
            "<p class='note'>Rows labelled −1 are out of scope: an answer is an error there. Failure detection by the "
            "new-class protocol (misclassified in-scope rows left out); data with nothing in scope is mixed with the "
            "test rows.</p>",
            table(_SHIFTS, found["shifts"]),
            "<h3>How far the promises hold there</h3>",
            table([("shift", "shift", _text), *_PROMISES], promises(found["shift_promises"])),
        ]
    if found["subgroups"]:
        body += ["<h2>Subgroups</h2>", table(_SUBGROUPS, found["subgroups"])]
    body += ["<h2>Where this comes from</h2>", _provenance(origin)]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>Calibration, version {version}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def cost_name(origin: Mapping[str, Any]) -> str:
    """What the costs are: FLOPs, or, where own logits came without any, the exits that were counted."""
    return "assumed cost" if origin["records"].get("flops") == ASSUMED else "FLOPs"


# ---------------------------------------------------------------- tables


def _text(value: Any) -> str:
    return "–" if value is None else escape(str(value))


def _long(value: Any) -> str:
    """Text that may be broken into lines."""
    return _text(value)


def _percent(value: Any) -> str:
    return "–" if value is None else f"{value:.2%}"


def _four(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}"


def _count(value: Any) -> str:
    return "–" if value is None else f"{value:,}"


def _yes(value: Any) -> str:
    return {True: "<span class='good'>yes</span>", False: "<span class='bad'>no</span>"}.get(value, "not shown")


def _flag(value: Any) -> str:
    return "<span class='bad'>yes</span>" if value else "no"


def _chosen(value: Any) -> str:
    return "<span class='good'>chosen</span>" if value else ""


def _table(columns: Sequence[tuple[str, str, Format]], lines: Sequence[Line]) -> str:
    """columns: (heading, field, format); "a|b" as a field puts the interval [a, b] behind the value."""
    if not lines:
        return "<p>Nothing.</p>"
    head = "".join(f"<th{_kind(f)}>{escape(title)}</th>" for title, _, f in columns)
    rows = []
    for line in lines:
        cells = "".join(f"<td{_kind(f) or ' class=num'}>{_cell(line, field, f)}</td>" for _, field, f in columns)
        rows.append(f"<tr>{cells}</tr>")
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def _kind(form: Format) -> str:
    return " class=text" if form is _text else " class='text long'" if form is _long else ""


def _cell(line: Line, field: str, form: Format) -> str:
    value = form(line.get(field))
    low, high = line.get(f"{field}_low"), line.get(f"{field}_high")
    return value if low is None or high is None else f"{value} <small>[{form(low)}, {form(high)}]</small>"


_POINTS: list[tuple[str, str, Format]] = [
    ("point", "point", _text),
    ("accuracy", "accuracy", _percent),
    ("drop from full", "drop", _percent),
    ("FLOPs of full", "flops_fraction", _percent),
    ("answered", "coverage", _percent),
    ("error among answered", "risk", _percent),
    ("rows", "rows", _count),
]
_PROMISES: list[tuple[str, str, Format]] = [
    ("point", "point", _text),
    ("promise", "promise", _text),
    ("at most", "target", _percent),
    ("seen", "seen", _percent),
    ("from", "low", _percent),
    ("to", "high", _percent),
    ("exceeded by", "excess", _percent),
    ("held", "held", _yes),
]
_EXITS: list[tuple[str, str, Format]] = [
    ("exit", "exit", _text),
    ("accuracy", "accuracy", _percent),
    ("FLOPs", "flops", lambda v: "–" if v is None else readable(v)),
    ("ms, one row alone", "ms", _four),
    ("EEFP", "eefp", _four),
    ("AUROC_f", "auroc_f", _four),
    ("AURC", "aurc", _four),
    ("AUGRC", "augrc", _four),
    ("ECE", "ece", _four),
]
_AT_POINTS: list[tuple[str, str, Format]] = [
    ("point", "point", _text),
    ("exit", "exit", _text),
    ("share", "share", _percent),
    ("reached by", "reached_by", _count),
    ("accuracy", "accuracy", _percent),
    ("confidence", "confidence", _percent),
    ("calibrator", "calibrator", _text),
    ("n·ConfCE^corr", "n_confce_corr", _four),
    ("before", "n_confce_corr_before", _four),
    ("n·LinCE^cw", "n_lince_cw", _four),
    ("before", "n_lince_cw_before", _four),
    ("ECE", "ece", _four),
    ("before", "ece_before", _four),
    ("MCS", "mcs", _four),
    ("wsMCS", "ws_mcs", _four),
    ("AUROC_f", "auroc_f", _four),
    ("AURC", "aurc", _four),
    ("AUGRC", "augrc", _four),
]
_TRIED: list[tuple[str, str, Format]] = [
    ("point", "point", _text),
    ("exits", "exits", _text),
    ("calibrator", "calibrator", _text),
    ("", "chosen", _chosen),
    ("why", "why", _long),
    ("rows", "rows", _count),
    ("n·ConfCE^corr", "confce_corr", _four),
    ("± to best", "standard_error", _four),
    ("n·LinCE^cw", "lince_cw", _four),
    ("rise at most", "lince_upper", _percent),
    ("EEFP", "eefp", _four),
    ("raw", "eefp_raw", _four),
    ("ECE", "ece", _four),
    ("NLL", "nll", _four),
]
_COMPARED: list[tuple[str, str, Format]] = [
    ("point", "point", _text),
    ("figure", "figure", _text),
    ("rows", "rows", _count),
    ("old", "old", _four),
    ("new", "new", _four),
    ("difference", "difference", _four),
    ("from", "low", _four),
    ("to", "high", _four),
    ("p", "p_value", _four),
    ("worse", "worse", _flag),
]
_SHIFTS: list[tuple[str, str, Format]] = [
    ("shift", "shift", _text),
    ("point", "point", _text),
    ("rows", "rows", _count),
    ("out of scope", "out_of_scope", _count),
    ("accuracy", "accuracy", _percent),
    ("drop", "drop", _percent),
    ("FLOPs of full", "flops_fraction", _percent),
    ("abstained", "abstained", _percent),
    ("on test", "abstained_on_test", _percent),
    ("times", "abstention_ratio", _four),
    ("error among answered", "risk", _percent),
    ("mixed with test", "risk_mixed_with_test", _percent),
    ("AUROC_f", "auroc_f", _four),
    ("AURC", "aurc", _four),
    ("protocol", "protocol", _text),
]
_SUBGROUPS: list[tuple[str, str, Format]] = [
    ("group", "value", _text),
    ("point", "point", _text),
    ("rows", "rows", _count),
    ("accuracy", "accuracy", _percent),
    ("drop", "drop", _percent),
    ("error among answered", "risk", _percent),
    ("answered", "coverage", _percent),
    ("FLOPs of full", "flops_fraction", _percent),
    ("confidence − accuracy", "confidence_minus_accuracy", _percent),
]


def _warnings(title: str, sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    return f"<h2>{escape(title)}</h2><ul class='warn'>{''.join(f'<li>{escape(s)}</li>' for s in sentences)}</ul>"


def _classes(lines: Sequence[Line], names: Sequence[str] | None) -> str:
    rows = []
    for line in lines:
        if not line.get("over_confident") and not line.get("under_confident"):
            continue

        def spell(found: Any) -> str:
            return ", ".join(f"{names[k] if names else k} {gap:+.2f} ({n})" for k, gap, n in found) or "none"

        rows.append(
            {
                "point": line["point"],
                "exit": line["exit"],
                "share": line["over_confident_share"],
                "over": spell(line["over_confident"]),
                "under": spell(line["under_confident"]),
            }
        )
    if not rows:
        return ""
    columns: list[tuple[str, str, Format]] = [
        ("point", "point", _text),
        ("exit", "exit", _text),
        ("classes over-confident", "share", _percent),
        ("most over-confident: MCS (rows answered so)", "over", _long),
        ("most under-confident", "under", _long),
    ]
    return "<h3>Over- and under-confident classes</h3>" + _table(columns, rows)


def _provenance(origin: Mapping[str, Any]) -> str:
    flat: dict[str, Any] = {}
    for key, value in origin.items():
        if isinstance(value, Mapping):
            flat |= {f"{key} {inner}": v for inner, v in value.items()}
        else:
            flat[key] = ", ".join(map(str, value)) if isinstance(value, list) else value
    return f"<dl>{''.join(f'<dt>{escape(str(k))}</dt><dd>{_text(v)}</dd>' for k, v in flat.items())}</dl>"


# ---------------------------------------------------------------- plots


def _plots(result: Calibrated, found: Mapping[str, Any]) -> str:
    try:
        import matplotlib as mpl
    except ImportError:
        return "<p class='note'>Plots need matplotlib, which isn't installed: pip install \"offramp[jobs]\".</p>"
    test = result.test
    if len(test) > DRAWN_ROWS:
        test = test.take(evenly(len(test), DRAWN_ROWS))
    # Names are a user's: no "$" in them may be taken for a formula. Ids that don't change from run to run.
    settings: Any = {"text.parse_math": False, "svg.hashsalt": "offramp", "font.size": 9.0}
    with mpl.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that the plots' font lacks
        figures = [*_overview(result, found, test), *_reliability(result.calibration.points, test)]
    shown = "".join(f"<figure><img alt='{escape(alt, quote=True)}' src='{data}'></figure>" for alt, data in figures)
    return f"<h2>Plots</h2><div class='plots'>{shown}</div>"


def _overview(result: Calibrated, found: Mapping[str, Any], test: LabelledRows) -> list[tuple[str, str]]:
    from offramp.runtime import plots

    points = result.calibration.points
    made: list[tuple[str, Callable[[], Axes]]] = [
        ("cost and accuracy of operating points", lambda: _cost_accuracy(result, found, test)),
        (
            "shares of rows by exit",
            lambda: plots.exit_shares({name: point.expected["exit_shares"] for name, point in points.items()}),
        ),
        ("risk and coverage", lambda: _risk_coverage(points, test)),
    ]
    if test.exits > 1:
        made.append(("EEFP by exit", lambda: plots.eefp_bars(test.score, test.correct)))
    if len(test):
        made.append(("miscalibration by class at the last exit", lambda: _by_class(result, test)))
    return [(alt, data) for alt, draw in made if (data := _svg(draw)) is not None]


def _cost_accuracy(result: Calibrated, found: Mapping[str, Any], test: LabelledRows) -> "Axes":
    from offramp.runtime import plots

    line = [r.thresholds for r in result.chosen.chooser.rules if r.family in ("full", "equal score")]
    curve = metrics.cost_accuracy(test.score, test.correct, test.flops, line)
    curve = metrics.CostAccuracy(curve.thresholds, curve.cost / test.full_flops, curve.accuracy)
    ax = plots.cost_accuracy(curve, unit=f"{cost_name(found['provenance'])}, as a share of the full model's")
    best = found["oracle"]
    ax.plot(best["flops_fraction"], best["accuracy"], "*", color=plots.INK, markersize=11, label="oracle")
    for one, marker in zip(found["operating_points"], itertools.cycle("osD^vPX<>"), strict=False):
        ax.plot(one["flops_fraction"], one["accuracy"], marker, alpha=0.85, label=one["point"])
    ax.legend(loc="lower right", fontsize="small")
    ax.set_title("one threshold for all exits, on test rows")
    return ax


def _risk_coverage(points: Mapping[str, OperatingPoint], test: LabelledRows) -> "Axes":
    from offramp.runtime import plots

    curves, marks = {}, []
    for name, point in points.items():
        outcome = outcome_of(test, point)
        wrong = outcome.label != test.truth
        curves[name] = (outcome.log_odds, wrong)
        kept = ~outcome.abstain
        if kept.any():
            marks.append((float(kept.mean()), float(wrong[kept].mean())))
    ax = plots.risk_coverage(curves)
    for place, (coverage, risk) in enumerate(marks):
        ax.plot(coverage, risk, "o", color=plots.WARM, label="answered (SGR)" if not place else None)
    for bound in sorted({most for point in points.values() if (most := promised(point).risk) is not None}):
        ax.axhline(bound, linestyle=":", color=plots.WARM, linewidth=1, label=f"promised {bound:.3g}")
    ax.legend(loc="upper left", fontsize="small")
    return ax


def _by_class(result: Calibrated, test: LabelledRows) -> "Axes":
    from offramp.runtime import plots

    point = next(iter(result.calibration.points.values()))
    last = test.exits - 1
    rows = classwise_rows(len(test), test.classes)
    p = point.calibrator(last).apply(test.logits[last][rows], test.aux(last, rows))
    ax = plots.cwmcs_by_class(p, test.truth[rows], classes=result.classes, by="predicted")
    ax.set_title(f"last exit at {point.name}, + over-confident")
    return ax


def _reliability(points: Mapping[str, OperatingPoint], test: LabelledRows) -> list[tuple[str, str]]:
    from offramp.runtime import plots

    made = []
    for name, point in list(points.items())[:MOST_DIAGRAMS]:
        outcome = outcome_of(test, point)
        right = outcome.label == test.truth
        kinds = [("before", sigmoid(outcome.score)), ("after", outcome.confidence)]
        for when, confidence in kinds if point.calibrators else [("uncalibrated", outcome.confidence)]:

            def draw(confidence: Any = confidence, right: Any = right, title: str = f"{name}, {when}") -> "Axes":
                # Without an error, or without an answer that is right, there is no curve to estimate.
                ax = plots.reliability_diagram(confidence, right, smooth=0 < right.sum() < len(right))
                ax.set_title(f"{title}: {ax.get_title()}")
                return ax

            data = _svg(draw)
            if data is not None:
                made.append((f"reliability of {name}, {when}", data))
    return made


def _svg(draw: Callable[[], "Axes"]) -> str | None:
    """The drawing as a data URL; None where there is nothing that could be drawn."""
    try:
        figure: Any = draw().figure
    except (InputError, ValueError, FloatingPointError):
        return None
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(stream.getvalue()).decode()}"
