"""One call of predict through one graph: the cascade graph, or the sole one that an operating point runs.

The cascade graph asks its gates and gathers the rows that stay by itself, and answers row by row. Here the one
decision function is asked again, for abstention and confidence, and everything is written down.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.execution.answers import Ids
from offramp.runtime.execution.call import Again, AgainOf, Call
from offramp.runtime.execution.route import Route
from offramp.runtime.gate import Decision
from offramp.runtime.predictions import Predictions, Reached, Said, Seen

RunCascade = Callable[[Mapping[str, Any]], Sequence[Any]]
"""Runs the graph on checked inputs; gives its CASCADE_OUTPUTS, the logits only if the call needs them. Of a call that
keeps what every exit says, also EVERY_EXIT_OUTPUTS."""


def answer_cascade_graph(call: Call, run: RunCascade, again: Again) -> Predictions:
    """Answer all rows, at most the call's limit at once; rows of one piece never wait for those of another.

    Queues would fill the deeper blocks up again. That is worth less than the way through Python and another
    session: 512 rows of MiniLM took 0.95 of the time in four pieces.
    """
    for start in range(0, call.rows, call.limit):
        call.go_on()
        ids = np.arange(start, min(start + call.limit, call.rows))
        made = run(call.take(ids))
        if call.seen is not None:
            made, said = said_of(call.route, made)
            call.seen.place(ids, said.apart())
        _keep(call, made, ids)
    return call.predictions(again)


def said_of(route: Route, made: Sequence[Any]) -> tuple[Sequence[Any], Said]:
    """The answers, and what every exit said.

    made: what the graph gave, ending in EVERY_EXIT_OUTPUTS, or in the logits where it has but one exit.
    """
    exits = len(route.manifest.exits)
    if len(route.stages) == 1:
        seen = Seen(exits, len(made[1]))
        seen.keep(route.only_exit.item(), np.arange(len(made[1])), made[1], made[2])
        return made, seen
    *answers, scores, logits = made
    return answers, Reached(exits, route.gates, answers[2], scores, logits)


class _Made:
    """What one run of the graph gave for all of a call's rows."""

    def __init__(
        self, route: Route, sizes: Mapping[str, int], made: Sequence[Any], inputs: Mapping[str, Any], again: AgainOf
    ) -> None:
        """sizes: of every symbolic axis. made: what the graph gave for the inputs. again: how to get what it didn't."""
        self._route, self._sizes, self._made, self._inputs, self._again = route, sizes, made, inputs, again


class Looked(_Made):
    """The answers from one run of the graph for all of a call's rows, made out when somebody looks at one."""

    def __call__(self, name: str) -> Any:
        """A field of Predictions, by its name there."""
        return getattr(self._whole, name)

    @cached_property
    def _whole(self) -> Predictions:
        rows = self._sizes["batch"]
        call = Call(self._route, {}, self._sizes, limit=rows)
        _keep(call, self._made, np.arange(rows))
        return call.predictions(partial(self._again, self._inputs))


class LookedAlone(_Made):
    """As `Looked` for one row by itself, field by field: in cold caches each call into numpy counts."""

    def __call__(self, name: str) -> Any:
        return getattr(self, name.removeprefix("_"))

    @property
    def label(self) -> NDArray[np.int64]:
        value = self.score.item()
        label: NDArray[np.int64] = self._made[0]
        return label if value == value else np.array([-1])

    @property
    def score(self) -> NDArray[np.float32]:
        score: NDArray[np.float32] = self._made[1]
        return score

    @cached_property
    def exit(self) -> NDArray[np.int32]:
        return _by_kind(self._route, self._made)[2]

    @cached_property
    def _decision(self) -> Decision:
        label, score, left, logits = _by_kind(self._route, self._made)
        aux = None if logits is None else {"logits": logits}
        decision = self._route.gate.decide(left.item(), label, score, aux)
        assert decision.anyone, "the graph and the gate disagree on who leaves"
        return decision

    @property
    def abstain(self) -> NDArray[np.bool_]:
        return self._decision.abstain

    @property
    def confidence(self) -> Callable[[], NDArray[np.float64]]:
        return lambda: self._decision.confidence

    @property
    def log_odds(self) -> Callable[[], NDArray[np.float64]]:
        return lambda: self._decision.log_odds

    @property
    def flops(self) -> NDArray[np.int64]:
        j = self.exit.item()
        return self._route.costs(self._sizes).exits[j : j + 1].copy()

    @property
    def executed(self) -> tuple[int, ...]:
        return self._route.costs(self._sizes).alone[self._route.stage_of_exit[self.exit.item()]]

    @property
    def involuntary(self) -> NDArray[np.bool_]:
        return np.array([False])

    @property
    def fetched(self) -> dict[str, Any]:
        return {}

    @property
    def again(self) -> Again:
        return partial(self._again, self._inputs)

    @property
    def classes(self) -> Sequence[str]:
        return self._route.manifest.classes


def _keep(call: Call, made: Sequence[Any], ids: Ids) -> None:
    """Write down rows by the exit that they left from."""
    label, score, left, logits = _by_kind(call.route, made)
    before = -1
    for k, step in enumerate(call.steps()):
        call.ran[k] += int(np.count_nonzero(left > before))
        j = step.exit
        if j is None:
            continue
        before = j
        here = left == j
        if not here.any():
            continue
        aux = {} if step.logits is None or logits is None else {"logits": logits[here]}
        decision = call.gate.decide(j, label[here], score[here], aux)
        assert decision.leave.all(), "the graph and the gate disagree on who leaves"
        rows = call.answers.keep(j, decision, decision.leave, ids[here], label[here], score[here])
        if call.answers.probabilities is not None:
            call.answers.keep_probabilities(rows, decision.leave, call.gate.calibrators[j], aux)


def _by_kind(
    route: Route, made: Sequence[Any]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int32], NDArray[Any] | None]:
    """Label, score, exit and, if they were fetched, logits."""
    if len(route.stages) == 1:
        label, score, *logits = made
        left = route.only_exit if len(label) == 1 else np.repeat(route.only_exit, len(label))
    else:
        label, score, gate, *logits = made
        left = route.exit_of_gate(gate)
    return label, score, left, logits[0] if logits else None
