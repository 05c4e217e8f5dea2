"""From targets to operating points: thresholds, a calibrator an exit, an abstention threshold, figures."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from offramp.runtime.arrays import Bools
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.bundles.time_model import TimeModel
from offramp.runtime.jobs.calibrating.selection import Selector, Tried
from offramp.runtime.jobs.calibrating.targets import (
    DEFAULT,
    AbstainRisk,
    Choice,
    Chooser,
    Target,
    abstention,
    label_of,
    percent,
)
from offramp.runtime.jobs.data.expected import expected
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, outcome_of
from offramp.runtime.jobs.data.splits import Split
from offramp.runtime.points import FULL, OperatingPoint, full

Progress = Callable[[int, int], None]
Line = dict[str, Any]


def choose_points(
    evidence: LabelledRows,
    split: Split,
    *,
    targets: Sequence[Target] = DEFAULT,
    abstain: Sequence[AbstainRisk] = (AbstainRisk(0.05),),
    calibrators: Sequence[str] = ("identity",),
    times: TimeModel | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[dict[str, OperatingPoint], list[Line], list[str], Chooser]:
    """Operating points for the targets, `full` first: points, what was tried, what can't be kept, the chooser.

    evidence: labelled rows. targets: exit rules; of one kind several. abstain: the first applies to every
    point; each further one adds to every point another of its own, "<point>-risk-2%". calibrators: names as
    `resolve` gives them. times: for MaxMs.
    """
    names = [label_of(target) for target in targets]
    _check_names(names, abstain)
    proposing, certify, test = (evidence.take(rows) for rows in (split.propose, split.certify, split.test))
    chooser = Chooser.of(proposing, certify, times)
    selector = Selector(proposing, np.isin(split.propose, split.fit), calibrators, seed)
    whole = full(evidence.exits).thresholds
    choices = {FULL: Choice(whole, {"method": "whole network"})}
    choices |= {name: chooser.choose(target) for name, target in zip(names, targets, strict=True)}
    points: dict[str, OperatingPoint] = {}
    tried: list[Line] = []
    unmet: list[str] = []
    for step, (name, choice) in enumerate(choices.items()):
        fitted, lines = selector.choose(choice.thresholds)
        tried += [_tried(name, line) for line in lines]
        if choice.unmet:
            unmet.append(f"{name}: {choice.unmet}")
        plain = all(one.name == "identity" for one in fitted)
        base = OperatingPoint(
            choice.thresholds,
            name=name,
            calibrators=() if plain else fitted,
            provenance={**choice.provenance, "seed": seed, "calibrators": [one.name for one in fitted]},
        )
        for key, point, complaint in _abstaining(base, certify, abstain, choice.tested):
            if complaint:
                unmet.append(f"{key}: {complaint}")
            points[key] = replace(point, expected=expected(test, point))
        if progress is not None:
            progress(step + 1, len(choices))
    order = {name: k for k, name in enumerate(choices)}
    return dict(sorted(points.items(), key=lambda item: order.get(item[0], len(order)))), tried, unmet, chooser


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
    base: OperatingPoint, certify: LabelledRows, asked: Sequence[AbstainRisk], tested: int
) -> list[tuple[str, OperatingPoint, str | None]]:
    if not asked:
        return [(base.name, base, None)]
    outcome = outcome_of(certify, base)
    wrong: Bools = outcome.label != certify.truth
    made = []
    for k, one in enumerate(asked):
        found = abstention(outcome.log_odds, wrong, one, tested)
        name = base.name if k == 0 else _with_risk(base.name, one)
        point = replace(
            base,
            name=name,
            abstain_below=found.threshold,
            provenance={**base.provenance, "abstention": found.provenance},
        )
        made.append((name, point, found.unmet))
    return made


def _tried(point: str, line: Tried) -> Line:
    values = {key: (None if isinstance(v, float) and not np.isfinite(v) else v) for key, v in asdict(line).items()}
    return {"point": point, **values, "exits": ",".join(map(str, line.exits))}
