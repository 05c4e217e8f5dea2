"""A load bench as text: a table a load."""

from collections.abc import Mapping, Sequence
from typing import Any

from offramp.runtime.jobs.plain_text import aligned, one_line, percent, ranged
from offramp.server.load.bench import LoadBench

_HOW = {"closed": "closed loop", "poisson": "open loop", "trace": "open loop, recorded"}


def describe(found: LoadBench) -> str:
    """All of it for a terminal."""
    about, model, machine = found.about, found.about["model"], found.about["machine"]
    rows = f"{about['rows']:,} rows" if about["rows"] == about["of"] else f"{about['rows']:,} of {about['of']:,} rows"
    labelled = {line["point"]: line for line in found.points}
    loads: dict[str, list[Mapping[str, Any]]] = {}
    for line in found.times:
        loads.setdefault(line["load"], []).append(line)
    parts = [
        [
            f"{one_line(model['name'])} {model['version']} at {about['address']} on {rows}, "
            f"{about['rows_per_request']} a request",
            f"asked from {machine['cpu']} with {machine['cores']} cores; {about['turns']} turns of "
            f"{about['seconds']:g} s: median [least, most]; as much as {found.baseline} in the same turn",
        ],
        aligned([("point", "accuracy", "coverage", "exit shares"), *map(_point, found.points)]),
        *(_load(lines, found.baseline, labelled) for lines in loads.values()),
        [f"note: {sentence}" for sentence in found.notes],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _point(line: Mapping[str, Any]) -> Sequence[str]:
    shares = " ".join(f"{value:.0%}" for value in line["exit_shares"] or [])
    accuracy = ranged(line["accuracy"], line["accuracy_low"], line["accuracy_high"], 1)
    return (one_line(line["point"]), accuracy, percent(line["coverage"], 1), shares)


def _load(lines: Sequence[Mapping[str, Any]], baseline: str, labelled: Mapping[str, Any]) -> list[str]:
    first = lines[0]
    title = f"{first['load']} ({_HOW[first['kind']]}, by {first['client']})"
    much, late = f"of {baseline}", f"p99 of {baseline}"
    rows: list[tuple[str, ...]] = [
        (title, "requests/s", much, "rows/s", "p50 ms", "p90 ms", "p99 ms", late, "accuracy", "client", "errors")
    ]
    for line in lines:
        point = one_line(line["point"])
        errors = ", ".join(f"{count:,} {outcome}" for outcome, count in line["errors"].items())
        rows.append(
            (
                f"  {point}{' (baseline)' if line['point'] == baseline else ''}",
                _ranged(line, "requests_per_second"),
                _times(line, "requests_per_second_ratio"),
                _number(line["rows_per_second"]),
                _ranged(line, "p50_ms"),
                _ranged(line, "p90_ms"),
                _ranged(line, "p99_ms"),
                _times(line, "p99_ratio"),
                percent(labelled[line["point"]]["accuracy"], 1),
                f"{line['client_busy']:.0%}",
                errors or "none",
            )
        )
    return aligned(rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ranged(line: Mapping[str, Any], name: str) -> str:
    if line[name] is None:
        return "-"
    return f"{_number(line[name])} [{_number(line[f'{name}_low'])}, {_number(line[f'{name}_high'])}]"


def _times(line: Mapping[str, Any], name: str) -> str:
    return "-" if line[name] is None else f"{line[name]:.2f}x"
