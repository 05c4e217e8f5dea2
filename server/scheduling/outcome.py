"""What has become of a batch, and how its answers are written down: the decision is the gate's, as everywhere."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.execution.answers import Answers, Ids
from offramp.runtime.execution.route import Route
from offramp.runtime.predictions import Said, Seen
from offramp.server.scheduling.job import Job, Rows
from offramp.server.scheduling.scheduler import Place, Waiting


@dataclass(frozen=True)
class Left:
    """Rows that left in one run: whose they are, in their order, their answers, and what every exit said of them."""

    of: list[tuple[Job, Ids]]
    label: NDArray[np.int64]
    exit: NDArray[np.int32]
    abstain: NDArray[np.bool_]
    seen: Said


@dataclass
class Outcome:
    """settled: rows that have their last answer, by job. left: the same where it is kept what exits say. onward: rows
    that go on, and where to. executed: FLOPs run, by block. first: rows that had none before, by job, of jobs that take
    an answer at any time."""

    settled: list[tuple[Job, Ids]] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    onward: list[tuple[Place, Waiting]] = field(default_factory=list)
    executed: tuple[int, ...] = ()
    first: list[tuple[Job, int]] = field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        """Another batch's, of the same way."""
        self.settled += other.settled
        self.left += other.left
        self.onward += other.onward
        self.first += other.first
        if not (self.executed and other.executed):  # a run that failed has none
            self.executed = self.executed or other.executed
        else:
            self.executed = tuple(map(sum, zip(self.executed, other.executed, strict=True)))


class Answering:
    """Rows of several jobs that come from one run, and what the run says of them, one entry a row."""

    def __init__(
        self,
        parts: Sequence[tuple[Job, Rows]],
        label: NDArray[Any],
        score: NDArray[Any],
        logits: NDArray[Any] | None,
    ) -> None:
        self._parts, self._label, self._score, self._logits = parts, label, score, logits
        rows = len(label)
        self._anytime = any(job.anytime for job, _ in parts)
        probable = any(job.query.probabilities for job, _ in parts)
        self._answers = Answers(rows, logits.shape[-1] if probable and logits is not None else None)
        self._numbers = np.arange(rows)
        self._routes = self._by_route()

    def _by_route(self) -> list[tuple[Route, NDArray[np.bool_] | None]]:
        """The routes that rows follow, and which rows; None for all."""
        first = self._parts[0][0].route
        if all(job.route is first for job, _ in self._parts):
            return [(first, None)]
        found: dict[int, tuple[Route, NDArray[np.bool_]]] = {}
        start = 0
        for job, rows in self._parts:
            _, mask = found.setdefault(id(job.route), (job.route, np.zeros(len(self._label), bool)))
            mask[start : start + len(rows)] = True
            start += len(rows)
        return list(found.values())

    def leave_at(self, left: NDArray[Any]) -> None:
        """Every row leaves, at the exits (n,) that the graph says."""
        exits = sorted(set(left.tolist()))  # np.unique lets go of Python's lock, and waits for it again
        for j in exits:
            here = None if len(exits) == 1 else left == j
            for route, mask in self._routes:
                chosen = here if mask is None else mask if here is None else here & mask
                if chosen is None or chosen.any():
                    leave = self._decide(route, j, chosen)
                    assert leave.all(), "the graph and the gate disagree on who leaves"

    def ask(self, j: int) -> NDArray[np.bool_]:
        """Ask every row's gate at exit j. Returns which rows leave."""
        leaves = np.zeros(len(self._label), bool)
        for route, mask in self._routes:
            chosen = self._decide(route, j, mask)
            if mask is None:
                return chosen
            leaves[mask] = chosen
        return leaves

    def _decide(self, route: Route, j: int, chosen: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
        """Decide at exit j for the chosen rows. Returns who of them leaves.

        Written down are the answers of those, and of all rows where any job takes an answer at any time.
        """
        every = chosen is None
        label, score = (self._label, self._score) if every else (self._label[chosen], self._score[chosen])
        aux: dict[str, Any] | None = None
        if self._logits is not None:
            aux = {"logits": self._logits if every else self._logits[chosen]}
        decision = route.gate.decide(j, label, score, aux)
        if not (self._anytime or decision.anyone):
            return decision.leave
        answered = np.ones(len(label), bool) if self._anytime else decision.leave
        ids = self._numbers if every else self._numbers[chosen]
        rows = self._answers.keep(j, decision, answered, ids, label, score)
        if self._answers.probabilities is not None and aux is not None:
            self._answers.keep_probabilities(rows, answered, route.gate.calibrators[j], aux)
        return decision.leave

    def hand_out(self, leaves: NDArray[np.bool_] | None = None) -> list[tuple[Job, Ids]]:
        """Write the answers into those jobs whose rows leave. leaves: which, None for all.

        Rows of jobs that take an answer at any time get theirs in any case. Returns who has left, by job.
        """
        settled: list[tuple[Job, Ids]] = []
        start = 0
        for job, rows in self._parts:
            stop = start + len(rows)
            if leaves is None:
                self._copy(job, rows.ids, slice(start, stop), rows.flops)
                settled.append((job, rows.ids))
            else:
                here = leaves[start:stop]
                if job.anytime:
                    with job.lock:
                        self._copy(job, rows.ids, slice(start, stop), rows.flops)
                        job.answers.involuntary[rows.ids] |= ~here
                gone = np.flatnonzero(here)
                if len(gone):
                    ids = rows.ids[gone]
                    if not job.anytime:
                        self._copy(job, ids, gone + start, rows.flops)
                    settled.append((job, ids))
            start = stop
        return settled

    def all_left(self, settled: list[tuple[Job, Ids]], seen: Said) -> Left:
        """All rows have left, with what exits said. settled: as `hand_out` gave it."""
        made = self._answers
        return Left(settled, made.label, made.exit, made.abstain, seen)

    def left(self, settled: list[tuple[Job, Ids]], leaves: NDArray[np.bool_], seen: Seen) -> Left:
        """Those who have left, with what exits said. settled: as `hand_out` gave it. seen: of all rows of this run."""
        if leaves.all():
            return self.all_left(settled, seen)
        made = self._answers
        return Left(settled, made.label[leaves], made.exit[leaves], made.abstain[leaves], seen.part(leaves))

    def _copy(self, job: Job, ids: Ids, at: Any, flops: NDArray[np.int64]) -> None:
        made, answers = job.answers, self._answers
        exits = answers.exit[at]
        made.label[ids] = answers.label[at]
        made.log_odds[ids] = answers.log_odds[at]
        made.score[ids] = answers.score[at]
        made.exit[ids] = exits
        made.abstain[ids] = answers.abstain[at]
        made.flops[ids] = flops[exits]
        if made.probabilities is not None and answers.probabilities is not None:
            made.probabilities[ids] = answers.probabilities[at]
        made.involuntary[ids] = False
        if job.own is not None:
            made.involuntary[ids] = ~_would_leave(job.own, exits, answers.score[at])


def _would_leave(route: Route, exits: NDArray[Any], score: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether rows with these scores would have left at these exits by a route's own thresholds."""
    bars = np.asarray(route.gate.point.thresholds)[exits]
    return np.asarray((score.astype(np.float64) >= bars) | (bars == -np.inf))
