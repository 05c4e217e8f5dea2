"""One call of predict that can be looked at after each exit: every row has the answer of the last exit it reached."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.execution.call import Call
from offramp.runtime.execution.executor import Executor, State
from offramp.runtime.execution.route import Step

Waiting = list[tuple[State, NDArray[np.int64]]]


def exit_by_exit(call: Call, executor: Executor, stop: Callable[[], bool] = lambda: False) -> Iterator[int]:
    """Run a call stage by stage, and give the number of each open exit once all rows that came there are answered.

    Answers of rows that went on are those of that exit, and count as involuntary until the row leaves. stop: asked
    before each batch behind the first exit; once it says so nothing more is run, and rows keep what they have.
    """
    ids = np.arange(call.rows)
    pieces = [ids[start : start + call.limit] for start in range(0, call.rows, call.limit)]
    waiting: Waiting = [(executor.put(call.take(piece)), piece) for piece in pieces]
    answered = False
    for k, (stage, step) in enumerate(zip(call.route.stages, call.steps(), strict=True)):
        onward: Waiting = []
        for state, rows in waiting:
            if answered and stop():
                return
            call.go_on()
            made = executor.run(step.graph, state, step.outputs)
            call.ran[k] += len(rows)
            stays = _answer(call, step, executor.fetch({name: made[name] for name in _looked_at(step)}), rows)
            positions = np.flatnonzero(stays)
            if len(positions):
                alive = {name: made[name] if name in made else state[name] for name in step.following}
                if len(positions) < len(rows):
                    alive = dict(executor.gather([(alive, positions)], step.following))
                onward.append((alive, rows[positions]))
        waiting = onward
        if stage.exit is not None:
            answered = True
            yield stage.exit
        if not waiting:
            return


def _looked_at(step: Step) -> list[str]:
    """What has to be fetched of a stage: the gate's inputs and the routing, not the state."""
    gate = [] if step.exit is None else [step.label, step.score, *([] if step.logits is None else [step.logits])]
    return [*gate, *(name for name, _ in step.layers)]


def _answer(call: Call, step: Step, made: dict[str, Any], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Write down the exit's answer for all rows here. Returns which of them would go on."""
    for name, layer in step.layers:
        assert call.routing is not None
        call.routing[layer, ids] = made[name]
    if step.exit is None:
        return np.ones(len(ids), bool)
    if call.seen is not None and step.logits is not None:
        call.seen.keep(step.exit, ids, made[step.score], made[step.logits])
    aux = None
    if step.logits is not None or call.routed:
        aux = call.aux(step.exit, step.seen, None if step.logits is None else made[step.logits], ids)
    decision = call.gate.decide(step.exit, made[step.label], made[step.score], aux)
    everybody = np.ones(len(ids), bool)
    call.answers.keep(step.exit, decision, everybody, ids, made[step.label], made[step.score])
    if call.answers.probabilities is not None and aux is not None:
        call.answers.keep_probabilities(ids, everybody, call.gate.calibrators[step.exit], aux)
    call.answers.involuntary[ids] = ~decision.leave
    return ~decision.leave
