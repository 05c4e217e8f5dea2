"""One call of predict through the cascade graph.

The graph asks its gates and gathers the rows that stay by itself. What it gives back is what every row got at
every exit it reached; here the one decision function is asked again, and writes the answers down.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from offramp.runtime.execution.answers import Ids
from offramp.runtime.execution.call import Again, Call
from offramp.runtime.predictions import Predictions

RunCascade = Callable[[Mapping[str, Any]], list[Any]]
"""Runs the graph on checked inputs; gives its CASCADE_OUTPUTS."""


def answer_cascade_graph(call: Call, run: RunCascade, again: Again) -> Predictions:
    """Answer all rows, at most the call's limit at once; rows of one piece never wait for those of another.

    Queues would fill the deeper blocks up again. That is worth less than the way through Python and another
    session: 512 rows of MiniLM took 0.95 of the time in four pieces.
    """
    if call.rows == 1 and not call.fetch:
        return _lone(call, run(call.arrays), again)
    for start in range(0, call.rows, call.limit):
        call.go_on()
        ids = np.arange(start, min(start + call.limit, call.rows))
        _piece(call, run(call.take(ids)), ids)
    return call.predictions(again)


def _piece(call: Call, made: list[Any], ids: Ids) -> None:
    """Find out who left where, from what one run of the graph gave for the rows `ids`."""
    label, score, logits = made
    gate, answers = call.gate, call.answers
    at = 0
    for k, step in enumerate(call.steps()):
        call.ran[k] += len(ids)
        j = step.exit
        if j is None:
            continue
        here = slice(at, at + len(ids))
        at += len(ids)
        aux = {"logits": logits[here]} if step.logits is not None else {}
        decision = gate.decide(j, label[here], score[here], aux)
        if not decision.anyone:
            continue
        rows = answers.keep(j, decision, decision.leave, ids, label[here], score[here])
        if answers.probabilities is not None:
            answers.keep_probabilities(rows, decision.leave, gate.calibrators[j], aux)
        ids = ids[~decision.leave]
        if not len(ids):
            break
    assert (at, len(ids)) == (len(label), 0), "the graph and the gate disagree on who leaves"


def _lone(call: Call, made: list[Any], again: Again) -> Predictions:
    """A row by itself left at the last exit that answered. Right after a run of ONNX Runtime every call into
    numpy costs ten times what it does in a hot loop, so there are few here."""
    label, score, logits = made
    at = len(label) - 1
    k = call.route.asked[at]
    step = call.steps()[k]
    label, score = label[at:], score[at:]
    assert step.exit is not None
    decision = call.gate.decide(step.exit, label, score, {"logits": logits[at:]} if step.logits is not None else None)
    assert decision.anyone, "the graph and the gate disagree on who leaves"
    value, costs = score.item(), call.costs
    return Predictions(
        label=label if value == value else np.array([-1]),
        _confidence=lambda: decision.confidence,
        _log_odds=lambda: decision.log_odds,
        score=score,
        exit=np.array([step.exit], np.int32),
        abstain=decision.abstain,
        flops=costs.exits[step.exit : step.exit + 1].copy(),
        executed=costs.alone[k],
        involuntary=np.array([False]),
        _again=again,
        _classes=call.route.manifest.classes,
    )
