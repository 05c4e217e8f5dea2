"""The calibration report as one self-contained page: what a manager asks first, what an auditor asks, then the rest."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from offramp.runtime.jobs.calibrating.report import columns, drawings
from offramp.runtime.jobs.calibrating.report.document import METRICS, REPORT, cost_name, metrics_of
from offramp.runtime.jobs.calibrating.report.measured import Measured
from offramp.runtime.jobs.calibrating.report.subgroups import Subgroup
from offramp.runtime.jobs.calibrating.report.wording import (
    as_cost,
    certified,
    confident_classes,
    estimates,
    made_on,
    provenance,
    with_intervals,
)
from offramp.runtime.jobs.calibrating.result import Calibrated
from offramp.runtime.jobs.pages.figures import figures
from offramp.runtime.jobs.pages.look import document, folded, pairs, section, warning
from offramp.runtime.jobs.pages.tables import Column, count, percent, table, threshold
from offramp.runtime.jobs.pages.terms import Terms
from offramp.runtime.jobs.plain_json import to_json

Found = Mapping[str, Any]
# Of more classes the worst are shown.
MOST_CLASSES, WORST_CLASSES = 30, 15


def report_files(result: Calibrated, groups: Subgroup | None = None) -> dict[str, bytes]:
    """metrics.json and report.html, by name."""
    measured = Measured.of(result)
    found = metrics_of(result, measured, groups)
    return {METRICS: to_json(found), REPORT: page(measured, found, result.classes).encode()}


def page(measured: Measured, found: Found, names: Sequence[str] | None) -> str:
    """The report of `metrics_of`'s numbers. names: of the classes, if they have any."""
    cost = cost_name(found["provenance"])
    terms = Terms(cost)
    title = f"Calibration {found['version']} of {found['model']['name'] or 'recorded logits'}"
    first = [
        _head(found, title),
        warning("This calibration was refused", found["refused"]),
        _points(found, cost, terms),
        warning("Targets that can't be kept", found["unmet"]),
        warning("About the data", found["notes"]),
        section("Cost and accuracy", figures(drawings.overview(measured, found, cost))),
        _promises(found, terms),
        _estimates(found, cost, terms),
        _rules(found, terms),
        section(terms.of("Can confidence be trusted?", "confidence"), figures(drawings.trust(measured, found))),
        _classes(measured, found, names, terms),
        _shifts(found, cost, terms),
    ]
    rest = _folded(found, cost, names, terms)
    last = [folded("Glossary", terms.glossary()), terms.explained()]
    return document(title, [*first, *rest, *last])


def _head(found: Found, title: str) -> str:
    name = found["headline"]
    broken = any(line["held"] is False for line in found["promises"] if line["point"] == name)
    return (
        f"<header><h1>{escape(title)}</h1><p class='quiet'>{escape(made_on(found))}</p></header>"
        f"<p class='lead{' no' if broken or found['refused'] else ''}'><b>{escape(name)}</b>: "
        f"{escape(found['sentences'][name])}</p>"
    )


def _costs(wanted: Sequence[Column], cost: str) -> list[Column]:
    """The columns with costs called what they are."""
    return [Column(c.title.replace("FLOPs", cost), c.field, c.form, c.term or c.title) for c in wanted]


def _points(found: Found, cost: str, terms: Terms) -> str:
    lines = found["operating_points"]
    at = next(k for k, column in enumerate(columns.POINTS) if column.field == "flops_fraction") + 1
    times = columns.TIMES if any("ms" in line for line in lines) else []
    wanted = [*columns.POINTS[:at], *times, *columns.POINTS[at:]]
    split, oracle = found["provenance"]["split"], found["oracle"]
    caption = (
        f"Measured on the {split['test']:,} test rows, which decided nothing; 95% intervals in brackets. "
        f"{terms.of('Oracle', 'oracle')}: accuracy {percent(oracle['accuracy'])} at "
        f"{percent(oracle['flops_fraction'])} of the {escape(cost)}."
    )
    if times:
        how = "as they were given" if found["times"] == "given" else "measured on the machine named above"
        caption += f" Times are of one row by itself, {how}."
    return section("Operating points", table(_costs(wanted, cost), lines, terms, caption))


def _promises(found: Found, terms: Terms) -> str:
    check = found["certify_against_test"]
    lines = [{**line, "certified": certified(line)} for line in with_intervals(found["promises"])]
    shown = table(columns.PROMISES, lines, terms) if lines else ""
    return section(
        "What is promised",
        shown,
        f"<p>{escape(found['joint']['sentence'])}</p>",
        f"<p>{escape(found['assumed'])}</p>" if lines else "",
        f"<p{' class=bad' if check['differs'] else ''}>{escape(check['sentence'])}</p>",
        f"<details><summary>Certify against test</summary>{table(columns.CHECKS, check['tests'], terms)}</details>",
    )


def _estimates(found: Found, cost: str, terms: Terms) -> str:
    lines = estimates(found["estimates"], cost)
    if not lines:
        return ""
    return section(
        "What is estimated, not promised",
        "<p>Kept on the rows that rules were chosen on, with errors in hand, and tested on none since. The test rows "
        "say whether it turned out so.</p>",
        table(columns.ESTIMATES, lines, terms),
    )


def _rules(found: Found, terms: Terms) -> str:
    exits = range(found["model"]["exits"])
    rules = [columns.POINT, *(Column(f"exit {j}", f"exit_{j}", threshold, "threshold") for j in exits)]
    counts = [Column(key.replace("_", " "), key, count) for key in found["counts"][0] if key != "point"]
    return section(
        "Rules and counts",
        table(
            [*rules, *columns.ABSTAIN],
            found["thresholds"],
            terms,
            f"A row leaves at the first exit whose {terms.of('score')} (log-odds) reaches its threshold; “off” is "
            "never, “all” is everybody who comes.",
        ),
        table(
            [columns.POINT, *counts],
            found["counts"],
            terms,
            "Test rows. “Lost” were right at the full model and are wrong here, “gained” the other way round.",
        ),
    )


def _classes(measured: Measured, found: Found, names: Sequence[str] | None, terms: Terms) -> str:
    lines, wanted = found["classes"], columns.CLASSES
    at = escape(found["headline"])
    said = f"At {at}, on test rows."
    if len(lines) > MOST_CLASSES:
        surest = sorted(lines, key=lambda line: (line["accuracy_high"] is None, line["accuracy_high"], -line["rows"]))
        said = (
            f"The {WORST_CLASSES} worst of {len(lines)} classes at {at}, by the upper end of the interval: a class of "
            f"two rows doesn't lead by chance. All are in {METRICS}."
        )
        lines = surest[:WORST_CLASSES]
    mistakes = found["confident_mistakes"]
    about = (
        f"The most confident wrong answers of {at} on test rows. There are "
        f"{terms.of('likely label errors', 'confident mistake')} among them: look at those first "
        "where the full model gives the same answer."
    )
    return section(
        "Classes and mistakes",
        figures(drawings.classes(measured, found, names)),
        "<h3>Accuracy by class</h3>",
        table(wanted, lines, terms, said),
        "<h3>Confident mistakes</h3>",
        table(columns.MISTAKES, mistakes, terms, about) if mistakes else "<p>No test row is answered wrongly.</p>",
    )


def _shifts(found: Found, cost: str, terms: Terms) -> str:
    if not found["shifts"]:
        return ""
    promises = with_intervals(as_cost(found["shift_promises"], cost))
    guessed = estimates(found["shift_estimates"], cost)
    return section(
        terms.of("Under shift", "shift"),
        table(
            _costs(columns.SHIFTS, cost),
            found["shifts"],
            terms,
            "Rows labelled −1 are out of scope: an answer is an error there. Failure detection by the new-class "
            "protocol (misclassified in-scope rows left out); data with nothing in scope is mixed with the test rows.",
        ),
        f"<h3>Promises there</h3>{table(columns.SHIFT_PROMISES, promises, terms)}" if promises else "",
        f"<h3>Estimates there</h3>{table(columns.SHIFT_ESTIMATES, guessed, terms)}" if guessed else "",
    )


def _folded(found: Found, cost: str, names: Sequence[str] | None, terms: Terms) -> list[str]:
    differ = [line for line in found["compared"] if line["difference"]]
    confident = confident_classes(found["exits_at_points"], names)
    return [
        folded("Exits, each on all test rows", table(_costs(columns.EXITS, cost), found["exits"], terms)),
        folded(
            "Exits as the operating points use them",
            "<p>Confidence is judged on the rows that reach an exit, accuracy on those that leave there. n·ConfCE^corr "
            "and n·LinCE^cw are truthful: nobody lowers them by reporting other than what is believed; compare them at "
            "equal numbers of rows only. ECE is for orientation.</p>",
            table(columns.AT_POINTS, found["exits_at_points"], terms),
            "<h3>Over- and under-confident classes</h3>" if confident else "",
            table(columns.CONFIDENT_CLASSES, confident, terms) if confident else "",
        ),
        folded(
            f"Calibrators that were tried ({len(found['tried'])})",
            "<p>On rows of fit and select that reach the exits, each judged by a calibrator that hasn't seen it. A "
            "hedged temperature stands unless another is better beyond chance, by n·ConfCE^corr, or by NLL where that "
            "can't tell; LinCE^cw must not be inferior, nor EEFP significantly lower.</p>",
            table(columns.TRIED, found["tried"], terms)
            if found["tried"]
            else "<p>None: too few rows, or none asked for.</p>",
        ),
        folded(
            "Against the calibration in force",
            "<p>New minus old on test rows that neither calibration was made from; paired bootstrap, p by Holm.</p>",
            table(columns.COMPARED, differ, terms) if differ else "<p>No figure differs.</p>",
        )
        if found["compared"]
        else "",
        folded("Kept from earlier versions", table(_costs(columns.KEPT, cost), found["kept"], terms))
        if found["kept"]
        else "",
        folded("Subgroups", table(_costs(columns.SUBGROUPS, cost), found["subgroups"], terms))
        if found["subgroups"]
        else "",
        folded("Where this comes from", pairs(provenance(found))),
    ]
