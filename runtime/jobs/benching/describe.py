"""A bench as text: a table with bars for each way that rows come, then the verdict."""

from collections.abc import Mapping, Sequence
from typing import Any

from offramp.runtime.jobs.benching.bench import Bench
from offramp.runtime.jobs.plain_text import aligned, one_line, percent, ranged

_WIDTH = 30
PLAIN = "plain session"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def describe(found: Bench) -> str:
    """All of it for a terminal."""
    about, model, machine = found.about, found.about["model"], found.about["machine"]
    rows = f"{found.rows:,} rows" if found.rows == found.of else f"{found.rows:,} of {found.of:,} rows, drawn at random"
    threads = f"{about['threads']} thread{'' if about['threads'] == 1 else 's'}"
    parts = [
        [
            f"{one_line(model['name'])} {model['version']} on {rows}; {threads}, {machine['cpu']}",
            f"against {about['rival']}; everybody takes turns, medians with 95% intervals",
        ],
        aligned([("point", "accuracy", "FLOPs", "coverage", "exit shares"), *(_point(line) for line in found.points)]),
        *(_mode(lines) for lines in by_mode(found.times)),
        [f"note: {sentence}" for sentence in found.notes],
        said(found),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def said(found: Bench) -> list[str]:
    """The verdict on the best point, what would help, and the verdicts on the others."""
    first, *others = found.verdicts
    lines = [f"verdict: {first.sentence}"]
    if not any(line["costs_ms"] is not None for line in found.times):
        lines.append("  calibrate it first: `offramp record`, then `offramp calibrate`")
    lines += [f"  would help: {hint}" for hint in first.hints]
    return [*lines, *(f"also: {one.sentence}" for one in others)]


def _point(line: Mapping[str, Any]) -> Sequence[str]:
    shares = " ".join(f"{value:.0%}" for key, value in line.items() if key.startswith("exit_"))
    accuracy = ranged(line["accuracy"], line["accuracy_low"], line["accuracy_high"], 1)
    flops, coverage = percent(line["flops_fraction"], 1), percent(line["coverage"], 1)
    return (one_line(line["point"]), accuracy, flops, coverage, shares)


def by_mode(times: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The lines of each mode together."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for line in times:
        found.setdefault(line["mode"], []).append(line)
    return list(found.values())


def _mode(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    longest = max(line["ms"] for line in lines)
    rows = [(lines[0]["mode"], "ms a batch", "rows/s", "as fast", f"shorter is faster; {lines[0]['rounds']} rounds")]
    for line in lines:
        low, high = line["speedup_low"], line["speedup_high"]
        ratio = "" if line["point"] is None else f"{line['speedup']:.2f}x [{low:.2f}, {high:.2f}]"
        ms = f"{_three(line['ms'])} [{_three(line['ms_low'])}, {_three(line['ms_high'])}]"
        name, picture = f"  {who(line)}", bar(line["ms"] / longest)
        rows.append((name, ms, f"{line['rows_per_second']:,.0f}", ratio, picture))
    return aligned(rows)


def who(line: Mapping[str, Any]) -> str:
    return PLAIN if line["point"] is None else one_line(line["point"])


def bar(share: float, width: int = _WIDTH) -> str:
    """A bar of so many columns for a share of 1, in eighths of a column."""
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _three(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
