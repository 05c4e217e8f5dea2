"""Lines of metrics.json as the page says them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from offramp.runtime.jobs.calibrating.report.classes import name_of
from offramp.runtime.jobs.data.expected import Line
from offramp.runtime.jobs.pages.tables import NONE, four, percent


def made_on(found: Mapping[str, Any]) -> str:
    """Model, date and machine in a line."""
    model, machine = found["model"], found["machine"]
    cores = f"{machine['cores']} core{'' if machine['cores'] == 1 else 's'}"
    said = [
        f"{model['name']} {model['version']}" if model["name"] else "",
        f"{model['exits']} exit{'' if model['exits'] == 1 else 's'}, "
        f"{model['classes']:,} class{'' if model['classes'] == 1 else 'es'}",
        f"{found['provenance']['labelled']:,} labelled rows",
        found["created"].replace("T", " ").replace("+00:00", " UTC"),
        ", ".join(part for part in (machine["cpu"], cores, machine["system"]) if part),
    ]
    return " · ".join(part for part in said if part)


def certified(line: Mapping[str, Any]) -> str | None:
    """k of m certifying rows, as it is counted for this kind of promise."""
    if line.get("errors") is not None:
        errors = "error" if line["errors"] == 1 else "errors"
        return f"{line['errors']:,} {errors} in {line['answered']:,} answered of {line['rows']:,}"
    if line.get("lost") is not None:
        return f"{line['lost']:,} lost, {line['gained']:,} gained of {line['rows']:,}"
    return None


def with_intervals(lines: Sequence[Line]) -> list[Line]:
    """The interval of what was seen beside it."""
    return [{**line, "seen_low": line["low"], "seen_high": line["high"]} for line in lines]


def as_cost(lines: Sequence[Line], cost: str) -> list[Line]:
    """The lines with costs called what they are."""
    return [{k: v.replace("FLOPs", cost) if isinstance(v, str) else v for k, v in line.items()} for line in lines]


def estimates(lines: Sequence[Line], cost: str) -> list[Line]:
    """Estimates in words: what was asked, what was seen, how it was kept. Some are shares, some milliseconds."""
    said = []
    for line in lines:
        form = four if line["estimate"] == "milliseconds a row" else percent
        low, high = line["low"], line["high"]
        around = "" if low is None else f" [{form(low)}, {form(high)}]"
        seen = NONE if line["seen"] is None else f"{form(line['seen'])}{around}"
        how = line["kept_by"] if line["met"] else "it couldn't be kept: this is the closest that can"
        name = line["estimate"].replace("FLOPs", cost)
        said.append({**line, "estimate": name, "target_said": form(line["target"]), "seen_said": seen, "how": how})
    return said


def confident_classes(lines: Sequence[Line], names: Sequence[str] | None) -> list[Line]:
    """The classes that each exit is most over- and under-confident of, in words."""

    def spell(found: Sequence[Sequence[Any]]) -> str:
        return ", ".join(f"{name_of(k, names)} {gap:+.2f} ({n})" for k, gap, n in found) or "none"

    return [
        {
            "point": line["point"],
            "exit": line["exit"],
            "share": line["over_confident_share"],
            "over": spell(line["over_confident"]),
            "under": spell(line["under_confident"]),
        }
        for line in lines
        if line.get("over_confident") or line.get("under_confident")
    ]


def provenance(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Where it all comes from, as names and values."""
    about = {key: found[key] for key in ("model", "machine", "created", "times")}
    return list(_spelt({**about, **found["provenance"], "schema of metrics.json": found["schema"]}))


def _spelt(origin: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in origin.items():
        if isinstance(value, Mapping):
            yield from _spelt(value, f"{before}{key} ")
        else:
            spelt = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
            yield f"{before}{key}", NONE if spelt is None else str(spelt)
