"""One request in the engine: its rows, what has become of them, and who waits for it."""

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.execution.answers import Answers, Ids
from offramp.runtime.execution.executor import State
from offramp.runtime.execution.route import Route
from offramp.server.patience import Patience
from offramp.server.query import Answer, Query
from offramp.server.scheduling.scheduler import Place, Waiting

_NOBODY: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True, slots=True)
class Rows:
    """Where rows of one job are that wait somewhere.

    state: tensors by name, the model's inputs in front of the first stage. at: the rows' positions in them, None for
    all in order. ids: their positions in the job. sizes: of the symbolic axes, the batch apart, as the request brought
    them. flops: int64 (J,), what leaving at each exit costs at these sizes.
    """

    state: State
    at: Ids | None
    ids: Ids
    sizes: tuple[int, ...]
    flops: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, stop: int) -> "Rows":
        """Some of them."""
        if not start and stop == len(self.ids):
            return self
        at = np.arange(start, stop) if self.at is None else self.at[start:stop]
        return Rows(self.state, at, self.ids[start:stop], self.sizes, self.flops)


class Job:
    """A query on its way. Its answers are written down by whoever runs its rows."""

    def __init__(self, query: Query, route: Route, patience: Patience, arrived: float) -> None:
        """route: the rule that its rows follow."""
        self.query, self.route, self.patience, self.arrived = query, route, patience, arrived
        self.point = query.operating_point  # whose rule that is
        self.own: Route | None = None  # the rule that it asked for, if the server took another or cut it short
        self.version = 0  # of the calibration
        self.rows, self.priority = query.rows, query.priority
        self.flops_full = 0  # what the whole network would cost for all its rows
        self.answers = Answers(query.rows, len(route.manifest.classes) if query.probabilities else None)
        self.left = query.rows  # without their last answer
        self.queued = query.rows  # that have never run
        self.unanswered = query.rows  # that no exit has answered yet
        self.waits: list[tuple[Place, Waiting]] = []  # so that they can be forgotten
        self.admitted = self.abandoned = False
        self.expired = False  # its deadline has passed: what it has will do
        self.lock = threading.Lock() if self.anytime else _NOBODY  # its answers may be looked at while it runs

    @property
    def needs_logits(self) -> bool:
        return self.query.probabilities or self.route.needs_logits

    @property
    def anytime(self) -> bool:
        """Whether an answer of an earlier exit will do when its time has come."""
        return self.query.deadline is not None

    @property
    def seconds_left(self) -> float | None:
        """Until its deadline, None without one; never quite 0."""
        if self.query.deadline is None:
            return None
        return max(1e-6, self.arrived + self.query.deadline - time.monotonic())

    def over(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.abandoned or self.patience.over

    def answer_of(self, ids: Ids) -> Answer:
        """What these rows have by now, in this order. flops_full is 0: it is the whole request's."""
        some = Answers(len(ids), None if self.answers.probabilities is None else self.answers.probabilities.shape[1])
        for name in ("label", "log_odds", "score", "exit", "abstain", "flops", "involuntary", "probabilities"):
            values = getattr(self.answers, name)
            if values is not None:
                getattr(some, name)[:] = values[ids]
        return Answer.of(some, flops_full=0, operating_point=self.point, overloaded=self.overloaded)

    @property
    def overloaded(self) -> bool:
        """Whether the server took another rule than was asked for."""
        return self.point != self.query.operating_point

    def answer(self) -> Answer:
        """What it has by now."""
        return Answer.of(
            self.answers,
            flops_full=self.flops_full,
            operating_point=self.point,
            overloaded=self.overloaded,
        )
