"""An operating point in one sentence, and the point that the report speaks of first."""

from collections.abc import Mapping, Sequence
from typing import Any

from offramp.runtime.jobs.calibrating.targets import percent
from offramp.runtime.jobs.data.expected import Line
from offramp.runtime.points import FULL


def headline(points: Sequence[Line], promises: Sequence[Line], estimates: Sequence[Line]) -> str:
    """The name of the point that a reader should hear of first.

    The cheapest point, but of those that come first in this order: nothing that it was asked for is shown broken and
    it has an answer for its accuracy (a promise or an estimate of the drop); nothing is shown broken; any. `full`
    where there is no other.
    """
    broken = {line["point"] for line in promises if line["held"] is False}
    broken |= {line["point"] for line in estimates if line["within"] is False}
    about_accuracy = {line["point"] for line in promises if line["promise"] == "accuracy drop"}
    about_accuracy |= {line["point"] for line in estimates if line["estimate"] == "accuracy drop"}
    others = [line for line in points if line["point"] != FULL]
    if not others:
        return FULL
    best = min(
        others,
        key=lambda line: (
            line["point"] in broken,
            line["point"] not in about_accuracy,
            1.0 if line["flops_fraction"] is None else line["flops_fraction"],
        ),
    )
    return str(best["point"])


def sentence(line: Mapping[str, Any], promises: Sequence[Line], cost: str = "FLOPs") -> str:
    """What a point costs, loses, answers and promises. line: of `Calibrated.points`. cost: what FLOPs are called."""
    if not line.get("rows") or line["flops_fraction"] is None:
        return "No row was kept to measure it on."
    spends = f"Costs {line['flops_fraction']:.1%} of the {cost}"
    if line.get("ms_fraction") is not None:
        spends += f" and {line['ms_fraction']:.2f} of the time"
    return f"{spends} {_for(line)}; {_answers(line, promises)}."


def _for(line: Mapping[str, Any]) -> str:
    if line["flops_fraction"] == 1.0 and line["drop"] == 0.0:
        return f"for an accuracy of {line['accuracy']:.1%}"
    points = abs(line["drop"]) * 100
    if points < 0.005:
        return "for the same accuracy"
    noise = line.get("drop_low") is not None and line["drop_low"] <= 0 <= line["drop_high"]
    more = "more" if line["drop"] < 0 else "less"
    return f"for {points:.{1 if points >= 0.1 else 2}f} points {more} accuracy{' (within noise)' if noise else ''}"


def _answers(line: Mapping[str, Any], promises: Sequence[Line]) -> str:
    risks = [p for p in promises if p["point"] == line["point"] and p["promise"] == "risk among the answered"]
    every = line["coverage"] == 1.0
    rows = "every row" if every else f"{_floored(line['coverage'])} of rows"
    if not risks:
        seen = "" if line["risk"] is None else f", {line['risk']:.1%} of them wrongly"
        return f"answers {rows}{seen}; no error is promised"
    return (
        f"answers {rows} with an error of at most {percent(risks[0]['target'])}, at "
        f"{percent(1 - float(risks[0]['delta']))} confidence"
    )


def _floored(share: float) -> str:
    """Never rounded up to all of them."""
    return f"{share:.0%}" if share < 0.99 else f"{int(share * 1000) / 10:g}%"
