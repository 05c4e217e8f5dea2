"""A simulation bench as text: a table a load."""

from collections.abc import Mapping, Sequence
from typing import Any

from offramp.runtime.jobs.plain_text import aligned, one_line
from offramp.server.simulating.simulate import SimulationBench

_HEADINGS = ("requests/s", "rows/s", "p50 ms", "p90 ms", "p99 ms", "lanes", "rows a batch", "refused")


def describe(found: SimulationBench) -> str:
    """All of it for a terminal."""
    about, model, machine, measured = found.about, found.about["model"], found.about["machine"], found.about["measured"]
    loads: dict[str, list[Mapping[str, Any]]] = {}
    for line in found.times:
        # A share is another rate for every point.
        name = line["load"].split(",")[0] if line["kind"] == "poisson" else line["load"]
        loads.setdefault(name, []).append(line)
    parts = [
        [
            f"{one_line(model['name'])} {model['version']} simulated: {_count(about['lanes'], 'lane')} on "
            f"{machine['cpu']} with {machine['cores']} cores, {_count(about['rows_per_request'], 'row')} a request",
            f"by a server's record of {measured['seconds']:.0f} s here; {about['seconds']:g} s of each load, "
            f"{about['faster_than_real_time']:.0f} times as fast as they'd take",
        ],
        *(_load(name, lines) for name, lines in loads.items()),
        [f"note: {sentence}" for sentence in found.notes],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _load(name: str, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    return aligned([(name, *_HEADINGS), *map(_line, lines)])


def _line(line: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"  {one_line(line['point'])}",
        _number(line["requests_per_second"]),
        _number(line["rows_per_second"]),
        *(_number(line[f"p{q}_ms"]) for q in (50, 90, 99)),
        f"{line['lanes_busy']:.0%}",
        _number(line["batch_rows"]),
        f"{line['refused']:,}",
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
