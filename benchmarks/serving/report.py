"""What was measured, as lines, a table and a drawing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import table
from offramp.server.load.clients import Measured


def errors_of(found: Sequence[Measured]) -> dict[str, int]:
    counted: dict[str, int] = {}
    for one in found:
        for outcome, count in one.outcomes.items():
            if not outcome.startswith("2"):
                counted[outcome] = counted.get(outcome, 0) + count
    return counted


def lines_of(taken: dict[tuple[str, int], list[Measured]], connections: Sequence[int]) -> list[dict[str, Any]]:
    """A line a server and number of connections, the fastest first."""
    lines = []
    for count in connections:
        here = {point: found for (point, c), found in taken.items() if c == count}
        best = max((_rate(found) for point, found in here.items() if not point.startswith("offramp")), default=0.0)
        for point, found in sorted(here.items(), key=lambda item: -_rate(item[1])):
            rates = [one.carried / one.seconds for one in found]
            lines.append(
                {
                    "connections": count,
                    "server": point,
                    "requests_per_second": _rate(found),
                    "least": min(rates),
                    "most": max(rates),
                    "of_the_best_peer": _rate(found) / best if best else None,
                    **{f"p{q * 100:.0f}_ms": float(np.median([one.ms(q) for one in found])) for q in (0.5, 0.99)},
                    "errors": errors_of(found),
                    "client": found[0].client,
                    "client_busy": max(one.busy for one in found),
                }
            )
    return lines


def _rate(found: Sequence[Measured]) -> float:
    return float(np.median([one.carried / one.seconds for one in found]))


def told(lines: Sequence[dict[str, Any]], connections: Sequence[int]) -> str:
    parts = []
    for count in connections:
        rows = [(f"{count} connections", "requests/s", "of the best peer", "p50 ms", "p99 ms", "errors", "client")]
        rows += [
            (
                f"  {line['server']}",
                f"{line['requests_per_second']:,.0f} [{line['least']:,.0f}, {line['most']:,.0f}]",
                "-" if line["of_the_best_peer"] is None else f"{line['of_the_best_peer']:.2f}x",
                f"{line['p50_ms']:.1f}",
                f"{line['p99_ms']:.1f}",
                ", ".join(f"{n} {what}" for what, n in line["errors"].items()) or "none",
                f"{line['client_busy']:.0%}",
            )
            for line in lines
            if line["connections"] == count
        ]
        parts.append(table(rows))
    return "\n\n".join(parts)


def plot(lines: Sequence[dict[str, Any]], connections: Sequence[int], path: Path, date: str, about: str) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(connections), figsize=(5.5 * len(connections), 4), squeeze=False)
    for axis, count in zip(axes[0], connections, strict=True):
        here = [line for line in lines if line["connections"] == count][::-1]
        rates = [line["requests_per_second"] for line in here]
        around = [
            [rate - line["least"] for rate, line in zip(rates, here, strict=True)],
            [line["most"] - rate for rate, line in zip(rates, here, strict=True)],
        ]
        colours = ["C0" if line["server"].startswith("offramp") else "0.7" for line in here]
        axis.barh([line["server"] for line in here], rates, xerr=around, color=colours)
        axis.set_title(f"{count} connections, one row a request", fontsize=10)
        axis.set_xlabel("requests/s: median, least and most")
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{about}, {date}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
