"""An evaluation as text: the points, what they promise, what they estimate, and the classes that fare worst."""

from collections.abc import Mapping, Sequence
from typing import Any

from offramp.runtime.jobs.calibrating.report.wording import estimates
from offramp.runtime.jobs.data.expected import Line
from offramp.runtime.jobs.evaluating.classes import worst
from offramp.runtime.jobs.evaluating.evaluate import Evaluation
from offramp.runtime.jobs.pages.tables import NONE
from offramp.runtime.jobs.plain_text import aligned, one_line, percent, ranged

MOST_CLASSES = 15
_SHOWN = {True: "yes", False: "no", None: "not shown"}


def describe(found: Evaluation) -> str:
    """All of it for a terminal; of the classes the least accurate 15 at the headline's point."""
    model = found.about["model"]
    version = found.about["calibration"]
    calibrated = f"calibration version {version}" if version else "not calibrated: there is only `full`"
    parts = [
        [f"{one_line(model['name'])} {model['version']}, {calibrated}; {found.how}"],
        aligned([_POINTS, *(_point(line) for line in found.points)]),
    ]
    if any(line["then_accuracy"] is not None for line in found.points if "then_accuracy" in line):
        parts.append(["at calibration:", *aligned([_POINTS[:5], *(_then(line) for line in found.points)])])
    if found.promises:
        parts.append(["promises:", *aligned([_PROMISES, *(_promise(line) for line in found.promises)])])
    if found.estimates:
        said = estimates(found.estimates, "FLOPs")
        parts.append(["estimates, which nobody promised:", *aligned([_ESTIMATES, *(_estimate(line) for line in said)])])
    parts.append(_classes(found))
    parts.append([f"note: {sentence}" for sentence in found.notes])
    return "\n\n".join("\n".join(part) for part in parts if part)


def verdict(found: Evaluation) -> str:
    """Whether a promise is broken, in a sentence."""
    broken, count = found.broken, len(found.promises)
    if broken:
        named = "; ".join(
            f"{one_line(line['point'])}: {line['promise']} at most {percent(line['target'])}, seen "
            f"{ranged(line['seen'], line['low'], line['high'])}"
            for line in broken
        )
        return f"{len(broken)} of {count} promises broken: {named}"
    if not count:
        return "nothing is promised here"
    kept = sum(line["held"] is True for line in found.promises)
    return f"no promise is shown broken: {kept} of {count} shown kept, {count - kept} neither"


_POINTS = ("point", "accuracy", "FLOPs", "coverage", "risk", "exit shares")
_PROMISES = ("point", "promise", "at most", "δ", "seen", "held")
_ESTIMATES = ("point", "estimate", "at most", "seen", "within")
_CLASSES = ("class", "rows", "accuracy", "full's", "coverage", "risk", "FLOPs", "taken for")


def _point(line: Mapping[str, Any]) -> Sequence[str]:
    shares = [value for key, value in line.items() if key.startswith("exit_")]
    return (one_line(line["point"]), *_figures(line, ""), " ".join(f"{share:.0%}" for share in shares))


def _then(line: Mapping[str, Any]) -> Sequence[str]:
    return (one_line(line["point"]), *_figures(line, "then_"))


def _figures(line: Mapping[str, Any], when: str) -> Sequence[str]:
    digits = {"accuracy": 2, "flops_fraction": 1, "coverage": 1, "risk": 2}
    keys = [f"{when}{figure}" for figure in digits]
    return [
        ranged(line.get(key), line.get(f"{key}_low"), line.get(f"{key}_high"), d)
        for key, d in zip(keys, digits.values(), strict=True)
    ]


def _promise(line: Mapping[str, Any]) -> Sequence[str]:
    seen = ranged(line["seen"], line["low"], line["high"])
    delta = "-" if line["delta"] is None else f"{line['delta']:.4g}"
    return (one_line(line["point"]), line["promise"], percent(line["target"]), delta, seen, _SHOWN[line["held"]])


def _estimate(line: Mapping[str, Any]) -> Sequence[str]:
    seen = "not measured here" if line["seen_said"] == NONE else line["seen_said"]
    return (one_line(line["point"]), line["estimate"], line["target_said"], seen, _SHOWN[line["within"]])


def _classes(found: Evaluation) -> list[str]:
    there = [line for line in found.classes if line["point"] == found.headline]
    shown = worst(there, MOST_CLASSES)
    if len(shown) < len(there):
        said = (
            f"the {len(shown)} least accurate of {len(there):,} classes at {one_line(found.headline)} (--json has all):"
        )
    else:
        said = f"classes at {one_line(found.headline)}, the least accurate first:"
    return [said, *aligned([_CLASSES, *(_class(line) for line in shown)])]


def _class(line: Line) -> Sequence[str]:
    other = "" if line["taken_for"] is None else f"{one_line(line['taken_for'])} ({line['times']})"
    return (
        one_line(line["name"]),
        f"{line['rows']:,}",
        ranged(line["accuracy"], line["accuracy_low"], line["accuracy_high"], 1),
        percent(line["full"], 1),
        percent(line["coverage"], 1),
        percent(line["risk"], 1),
        percent(line["flops_fraction"], 1),
        other,
    )
