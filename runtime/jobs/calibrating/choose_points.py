"""From targets to operating points: thresholds, a calibrator an exit, an abstention threshold, figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.bundles.time_model import TimeModel
from offramp.runtime.jobs.calibrating.abstention import Judged, abstention
from offramp.runtime.jobs.calibrating.choice import Choice
from offramp.runtime.jobs.calibrating.chooser import Chooser, Cost
from offramp.runtime.jobs.calibrating.selection import Selector, Tried
from offramp.runtime.jobs.calibrating.targets import DEFAULT, AbstainRisk, Target, label_of, percent
from offramp.runtime.jobs.data.expected import Line, expected
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, outcome_of
from offramp.runtime.jobs.data.splits import SplitRows
from offramp.runtime.jobs.plain_json import plain
from offramp.runtime.points import FULL, OperatingPoint, full

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Asked:
    """What operating points are asked for.

    targets: exit rules; of one kind several. abstain: the first applies to every point; each further one adds to
    every point another of its own, "<point>-risk-2%". calibrators: to choose from, as `resolve` gives them.
    cost: what budgets and the search are about, "flops" or measured "ms".
    abstain_all_if_infeasible: a point whose risk can't be promised abstains on every row; otherwise it abstains on
    none and promises nothing.
    """

    targets: tuple[Target, ...] = DEFAULT
    abstain: tuple[AbstainRisk, ...] = (AbstainRisk(0.05),)
    calibrators: tuple[str, ...] = ("identity",)
    seed: int = 0
    cost: Cost = "flops"
    abstain_all_if_infeasible: bool = False


@dataclass(frozen=True)
class Chosen:
    """points: by name, `full` first, with figures on the test rows. tried: calibrators, a line a point and exits.
    unmet: targets that can't be kept, with the closest that can. chooser: what exit rules were chosen from."""

    points: Mapping[str, OperatingPoint]
    tried: tuple[Line, ...]
    unmet: tuple[str, ...]
    chooser: Chooser


def choose_points(
    rows: SplitRows, asked: Asked, times: TimeModel | None = None, progress: Progress | None = None
) -> Chosen:
    """Operating points for the targets: thresholds and calibrators from fit and select, promises from certify.

    times: for `MaxMs`. Raises InputError for names that clash, and for times that are needed and missing.
    """
    names = [label_of(target) for target in asked.targets]
    _check_names(names, asked.abstain)
    chooser = Chooser.of(rows.propose, rows.certify, times, asked.cost, next(iter(asked.abstain), None))
    selector = Selector(rows.propose, rows.is_fit, asked.calibrators, asked.seed)
    choices = {FULL: Choice(full(rows.labelled.exits).thresholds, {"method": "whole network"})}
    choices |= {name: chooser.choose(target) for name, target in zip(names, asked.targets, strict=True)}
    points: dict[str, OperatingPoint] = {}
    tried: list[Line] = []
    unmet: list[str] = []
    for step, (name, choice) in enumerate(choices.items()):
        fitted, lines = selector.choose(_fitted_like(choice.thresholds, choice))
        tried += [_tried(name, line) for line in lines]
        if choice.unmet:
            unmet.append(f"{name}: {choice.unmet}")
        plain = all(one.name == "identity" for one in fitted)
        base = OperatingPoint(
            choice.thresholds,
            name=name,
            calibrators=() if plain else fitted,
            provenance={**choice.provenance, "seed": asked.seed, "calibrators": [one.name for one in fitted]},
        )
        for key, point, complaint in _abstaining(base, rows, asked, choice, selector):
            if complaint:
                unmet.append(f"{key}: {complaint}")
            points[key] = replace(point, expected=expected(rows.test, point))
        if progress is not None:
            progress(step + 1, len(choices))
    order = {name: k for k, name in enumerate(choices)}
    ordered = dict(sorted(points.items(), key=lambda item: order.get(item[0], len(order))))
    return Chosen(ordered, tuple(tried), tuple(unmet), chooser)


def _check_names(names: Sequence[str], abstain: Sequence[AbstainRisk]) -> None:
    if FULL in names:
        raise InputError(f"operating point name {FULL!r} is taken by the whole network: choose another.")
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"operating point name {name!r} is given twice: choose another.")
    risks = [percent(one.risk) for one in abstain]
    for risk in risks:
        if risks.count(risk) > 1:
            raise InputError(f"abstain: the risk {risk} is given twice.")
    added = {_with_risk(name, one) for name in [FULL, *names] for one in abstain[1:]}
    for name in names:
        if name in added:
            raise InputError(
                f"operating point name {name!r} is also that of a point which a further abstain risk adds: "
                "choose another."
            )


def _with_risk(name: str, asked: AbstainRisk) -> str:
    return f"{name}-risk-{percent(asked.risk)}"


def _abstaining(
    base: OperatingPoint, rows: SplitRows, asked: Asked, choice: Choice, selector: Selector
) -> list[tuple[str, OperatingPoint, str | None]]:
    if not asked.abstain:
        return [(base.name, base, None)]
    rivals = _rivals(base, choice, selector)
    certify, propose = (_judged(rivals, base, part) for part in (rows.certify, rows.propose))
    made = []
    for k, one in enumerate(asked.abstain):
        found = abstention(certify, one, propose, choice.share, asked.abstain_all_if_infeasible)
        name = base.name if k == 0 else _with_risk(base.name, one)
        point = replace(
            base,
            name=name,
            abstain_below=found.threshold,
            provenance={**base.provenance, "abstention": found.provenance},
        )
        made.append((name, point, found.unmet))
    return made


def _fitted_like(rule: tuple[float, ...], choice: Choice) -> tuple[float, ...]:
    """The rule whose calibrators a rule has."""
    return rule if choice.like is None or rule == full(len(rule)).thresholds else choice.like


def _rivals(point: OperatingPoint, choice: Choice, selector: Selector) -> list[OperatingPoint]:
    """The rules that the point is tested together with, itself among them, each with its calibrators."""
    return [
        replace(point, thresholds=rule, calibrators=selector.choose(_fitted_like(rule, choice))[0])
        for rule in choice.rivals or (point.thresholds,)
    ]


def _judged(rivals: Sequence[OperatingPoint], point: OperatingPoint, rows: LabelledRows) -> Judged:
    outcomes = [outcome_of(rows, one) for one in rivals]
    return Judged(
        np.stack([one.log_odds for one in outcomes]),
        np.stack([one.label != rows.truth for one in outcomes]),
        [one.thresholds for one in rivals].index(point.thresholds),
    )


def _tried(point: str, line: Tried) -> Line:
    return {"point": point, **plain(line), "exits": ",".join(map(str, line.exits))}
