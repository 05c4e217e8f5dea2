"""metrics.json: everything that the report shows, and what is behind it."""

from collections.abc import Mapping
from typing import Any

from offramp.runtime import metrics
from offramp.runtime.jobs.calibrating.report.certainty import ASSUMED, certify_against_test, joint
from offramp.runtime.jobs.calibrating.report.classes import by_class, confident_mistakes
from offramp.runtime.jobs.calibrating.report.exits import exits_alone, exits_at
from offramp.runtime.jobs.calibrating.report.frontier import frontier, single_exits
from offramp.runtime.jobs.calibrating.report.headline import headline, sentence
from offramp.runtime.jobs.calibrating.report.measured import Measured
from offramp.runtime.jobs.calibrating.report.reliability import reliability
from offramp.runtime.jobs.calibrating.report.subgroups import Subgroup, subgroups
from offramp.runtime.jobs.calibrating.result import Calibrated
from offramp.runtime.jobs.data.expected import flat
from offramp.runtime.jobs.data.opened import ASSUMED as ASSUMED_COST
from offramp.runtime.jobs.plain_json import number

REPORT, METRICS = "report.html", "metrics.json"
SCHEMA = "offramp-metrics/2"


def metrics_of(result: Calibrated, measured: Measured, groups: Subgroup | None = None) -> dict[str, Any]:
    """JSON-able, tables as lists of lines; docs/guide/calibration.md says what is where."""
    test, points, chooser = result.test, measured.points, result.chosen.chooser
    best = metrics.oracle(test.correct, test.flops)
    promises, counts = result.promises, measured.counts()
    lines = [line for line in result.points if line["point"] in points]
    first = headline(lines, promises, result.estimates)
    cost = cost_name(result.provenance)
    return {
        "schema": SCHEMA,
        "version": result.calibration.version,
        **result.about,
        "headline": first,
        "sentences": {line["point"]: sentence(line, promises, cost) for line in lines},
        "operating_points": lines,
        "thresholds": measured.thresholds(),
        "counts": counts,
        "kept": [{"point": name, **flat(point.expected)} for name, point in result.kept.items()],
        "oracle": {"accuracy": number(best.accuracy), "flops_fraction": number(best.cost / test.full_flops)},
        "frontier": frontier(chooser, test),
        "single_exits": single_exits(test),
        "promises": promises,
        "joint": joint(promises, int(result.provenance.get("looks", 1))),
        "assumed": ASSUMED,
        "certify_against_test": certify_against_test(promises, counts, result.rows),
        "estimates": result.estimates,
        "reliability": reliability(measured),
        "classes": by_class(measured, first, result.rows.labelled, result.classes),
        "confident_mistakes": confident_mistakes(measured, first, result.classes),
        "exits": exits_alone(test, None if chooser.times is None else chooser.times.exit_ms),
        "exits_at_points": [
            line for name, point in points.items() for line in exits_at(name, point, test, measured.outcomes[name])
        ],
        "tried": result.tried,
        "compared": result.compared,
        "refused": result.refused,
        "unmet": result.unmet,
        "notes": result.notes,
        "shifts": result.shifts,
        "shift_promises": result.shift_promises,
        "shift_estimates": result.shift_estimates,
        "subgroups": [] if groups is None else subgroups(groups, points, test),
        "provenance": dict(result.provenance),
    }


def cost_name(origin: Mapping[str, Any]) -> str:
    """What the costs are: FLOPs, or, where own logits came without any, the exits that were counted."""
    return "assumed cost" if origin.get("records", {}).get("flops") == ASSUMED_COST else "FLOPs"
