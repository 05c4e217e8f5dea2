"""One call of predict through the cascade graph.

The graph asks its gates and gathers the rows that stay by itself. What it gives back is what every row got at
every exit it reached; here the one decision function is asked again, and writes the answers down.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from offramp.runtime.execution.answers import Answers
from offramp.runtime.execution.route import Costs, Route
from offramp.runtime.inputs import Arrays
from offramp.runtime.predictions import Predictions

RunCascade = Callable[[Mapping[str, Any]], list[Any]]
"""Runs the graph on checked inputs; gives its CASCADE_OUTPUTS."""


def answer_cascade_graph(
    route: Route,
    run_cascade: RunCascade,
    arrays: Arrays,
    sizes: Mapping[str, int],
    fetch: tuple[str, ...],
    limit: int,
    again: Callable[[str], Any],
) -> Predictions:
    """Answer all rows, at most `limit` at once; rows of one piece never wait for those of another.

    Queues would fill the deeper blocks up again. That is worth less than the way through Python and another
    session: 512 rows of MiniLM took 0.95 of the time in four pieces.
    """
    costs = route.costs(sizes)
    if sizes["batch"] == 1 and not fetch:
        return _lone(route, run_cascade, arrays, costs, again)
    answers = Answers(sizes["batch"], len(route.manifest.classes) if "probabilities" in fetch else None)
    ran = [0] * len(route.stages)
    for start in range(0, answers.rows, limit):
        ids = np.arange(start, min(start + limit, answers.rows))
        part = arrays
        if len(ids) < answers.rows:
            part = {i.name: np.take(arrays[i.name], ids, axis=i.batch_axis) for i in route.manifest.inputs}
        _piece(route, run_cascade(part), ids, answers, ran)
    return answers.predictions(costs, ran, dict.fromkeys(fetch, answers.probabilities), again)


def _piece(route: Route, made: list[Any], ids: Any, answers: Answers, ran: list[int]) -> None:
    """Find out who left where, from what one run of the graph gave for the rows `ids`."""
    label, score, logits = made
    at = 0
    for k, step in enumerate(route.steps(logits=answers.probabilities is not None, routing=False)):
        ran[k] += len(ids)
        j = step.exit
        if j is None:
            continue
        here = slice(at, at + len(ids))
        at += len(ids)
        aux = {"logits": logits[here]} if step.logits is not None else {}
        decision = route.gate.decide(j, label[here], score[here], aux)
        if not decision.anyone:
            continue
        rows = answers.keep(j, decision, decision.leave, ids, label[here], score[here])
        if answers.probabilities is not None:
            answers.keep_probabilities(rows, decision.leave, route.gate.calibrators[j], aux)
        ids = ids[~decision.leave]
        if not len(ids):
            break
    assert (at, len(ids)) == (len(label), 0), "the graph and the gate disagree on who leaves"


def _lone(
    route: Route, run_cascade: RunCascade, arrays: Arrays, costs: Costs, again: Callable[[str], Any]
) -> Predictions:
    """A row by itself left at the last exit that answered. Right after a run of ONNX Runtime every call into
    numpy costs ten times what it does in a hot loop, so there are few here."""
    label, score, logits = run_cascade(arrays)
    at = len(label) - 1
    k = route.asked[at]
    step = route.steps(logits=False, routing=False)[k]
    label, score = label[at:], score[at:]
    assert step.exit is not None
    decision = route.gate.decide(step.exit, label, score, {"logits": logits[at:]} if step.logits is not None else None)
    assert decision.anyone, "the graph and the gate disagree on who leaves"
    value = score.item()
    return Predictions(
        label=label if value == value else np.array([-1]),
        _confidence=lambda: decision.confidence,
        score=score,
        exit=np.array([step.exit], np.int32),
        abstain=decision.abstain,
        flops=costs.exits[step.exit : step.exit + 1].copy(),
        executed=costs.alone[k],
        _again=again,
    )
