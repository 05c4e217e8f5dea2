"""What was measured, as lines, a table and a drawing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import table
from offramp.server.load.clients import Measured

Line = dict[str, Any]


def errors_of(found: Sequence[Measured]) -> dict[str, int]:
    counted: dict[str, int] = {}
    for one in found:
        for outcome, count in one.outcomes.items():
            if not outcome.startswith("2"):
                counted[outcome] = counted.get(outcome, 0) + count
    return counted


def lines_of(taken: Mapping[tuple[str, int], Mapping[int, Measured]], connections: Sequence[int]) -> list[Line]:
    """A line a server and number of connections, the fastest first. taken: what was measured in which turn.

    of_the_best_peer: the median over turns of the rate over that of the best peer in the same turn.
    """
    lines = []
    for count in connections:
        here = {point: found for (point, c), found in taken.items() if c == count}
        peers = [point for point in here if not point.startswith("offramp")]
        best = here[max(peers, key=lambda point: _rate(here[point]))] if peers else {}
        for point, found in sorted(here.items(), key=lambda item: -_rate(item[1])):
            rates = [one.carried / one.seconds for one in found.values()]
            ratios = [
                one.carried / one.seconds / (best[turn].carried / best[turn].seconds)
                for turn, one in found.items()
                if turn in best and best[turn].carried
            ]
            measured = list(found.values())
            lines.append(
                {
                    "connections": count,
                    "server": point,
                    "turns": len(found),
                    "requests_per_second": _rate(found),
                    "least": min(rates),
                    "most": max(rates),
                    "of_the_best_peer": float(np.median(ratios)) if ratios else None,
                    **{f"p{q * 100:.0f}_ms": float(np.median([one.ms(q) for one in measured])) for q in (0.5, 0.99)},
                    "errors": errors_of(measured),
                    "client": measured[0].client,
                    "client_busy": max(one.busy for one in measured),
                }
            )
    return lines


def _rate(found: Mapping[int, Measured]) -> float:
    return float(np.median([one.carried / one.seconds for one in found.values()]))


def told(lines: Sequence[Line], connections: Sequence[int]) -> str:
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


def plot(lines: Sequence[Line], connections: Sequence[int], path: Path, date: str, about: str) -> None:
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
