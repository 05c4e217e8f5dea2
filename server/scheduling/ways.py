"""How a batch runs: through the cascade graph, stage by stage, or a request by itself."""

from collections.abc import Sequence

import numpy as np
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import Stopped
from offramp.runtime.execution.executor import Executor, State
from offramp.runtime.execution.route import Route, gates_that_ran, threshold_rows
from offramp.runtime.inputs import rows_of
from offramp.runtime.predictions import Reached, Seen
from offramp.server.scheduling.job import Job, Rows
from offramp.server.scheduling.outcome import Answering, Left, Outcome
from offramp.server.scheduling.padding import Padding
from offramp.server.scheduling.scheduler import Batch, Place, Waiting


def parts_of(batch: Batch) -> list[tuple[Job, Rows]]:
    """The rows of a batch, by job."""
    return [(part.waiting.owner, part.source.part(part.start, part.stop)) for part in batch.parts]


class GraphWay:
    """Through the cascade graph in one run, each row by its own thresholds."""

    mixes = True

    def __init__(self, executor: Executor, route: Route, padding: Padding, *, keeps: bool = False) -> None:
        """route: with every exit open. keeps: whether it is kept what every exit says."""
        self._executor, self._route, self._padding, self._keeps = executor, route, padding, keeps

    def __repr__(self) -> str:
        return "graph"

    def waits_at(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Where rows of these sizes wait: among their equals."""
        return sizes

    def joins(self, stage: int) -> bool:
        return self._padding.allowed

    def flops(self, sizes: tuple[int, ...], stage: int) -> int:
        return sum(self._route.costs(self._padding.named(sizes)).stages)

    def run(self, batch: Batch) -> Outcome:
        parts = parts_of(batch)
        sizes = batch.place.sizes
        arrays = self._padding.gather([rows for _, rows in parts], sizes)
        first = parts[0][0].route
        alike = all(job.route is first for job, _ in parts)
        if alike:
            thresholds = first.threshold_inputs
            assert thresholds is not None
        else:
            routes = list({id(job.route): job.route for job, _ in parts}.values())
            numbers = {id(route): k for k, route in enumerate(routes)}
            of_row = np.repeat([numbers[id(job.route)] for job, _ in parts], [len(rows) for _, rows in parts])
            thresholds = threshold_rows(routes, of_row)
        with self._executor.held():
            made = self._executor.run_cascade_graph(arrays, thresholds, every_exit=self._keeps)
        label, score, gate, logits, *said = made
        left = self._route.exit_of_gate(gate)
        answering = Answering(parts, label, score, logits if any(job.needs_logits for job, _ in parts) else None)
        answering.leave_at(left)
        before, ran = -1, []
        for step in self._route.steps():
            ran.append(int(np.count_nonzero(left > before)))
            before = before if step.exit is None else step.exit
        executed = self._route.costs(self._padding.named(sizes)).executed(ran)
        outcome = Outcome(answering.hand_out(), executed=executed)
        if self._keeps:
            manifest = self._route.manifest
            assert manifest.cascade is not None
            gates = first.gates if alike else gates_that_ran(manifest.cascade, thresholds, gate)
            seen = Reached(len(manifest.exits), gates, gate, *said)
            outcome.left = [answering.all_left(outcome.settled, seen)]
        return outcome


class StageWay:
    """Stage by stage: survivors of several requests meet in front of the next stage and run together again."""

    mixes = True

    def __init__(self, executor: Executor, route: Route, padding: Padding, *, keeps: bool = False) -> None:
        """route: whose stages are run; rows may follow other routes, with the same open exits or fewer of them.

        keeps: whether what every exit says goes along with a row until it has left.
        """
        self._executor, self._route, self._padding, self._keeps = executor, route, padding, keeps
        self._said: list[dict[str, int]] = []  # of the exits up to each stage, {tensor: batch axis}
        self._steps = {logits: route.steps(logits=logits) for logits in (False, True)}
        self._first_exit = next(stage.exit for stage in route.stages if stage.exit is not None)
        said: dict[str, int] = {}
        for step in self._steps[True]:
            if step.exit is not None and step.logits is not None:
                said = {**said, step.score: 0, step.logits: 0}
            self._said.append(said)

    def __repr__(self) -> str:
        return f"stages {[stage.blocks for stage in self._route.stages]}"

    def joins(self, stage: int) -> bool:
        return self._padding.allowed and len(self._route.stages) == 1

    def flops(self, sizes: tuple[int, ...], stage: int) -> int:
        return self._route.costs(self._padding.named(sizes)).stages[stage]

    @property
    def route(self) -> Route:
        return self._route

    def waits_at(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Where rows of these sizes wait: filled up to a few sizes, so that survivors of many batches can meet."""
        return sizes if len(self._route.stages) == 1 else self._padding.padded(sizes)

    def run(self, batch: Batch) -> Outcome:
        parts, k = parts_of(batch), batch.place.stage
        sizes = batch.place.sizes
        if k:
            before = self._said[k - 1] if self._keeps else {}
            state = self._executor.gather(_together(parts), {**self._route.stages[k].waits, **before})
        else:
            state = self._executor.put(self._padding.gather([rows for _, rows in parts], sizes))
        step = self._steps[self._keeps or any(job.needs_logits for job, _ in parts)][k]
        with self._executor.held():
            made = self._executor.run(step.graph, state, step.outputs)
            looked = [name for name in (step.label, step.score, step.logits) if name]
            found = self._executor.fetch({name: made[name] for name in looked}) if step.exit is not None else {}
        ran = [0] * len(self._route.stages)
        ran[k] = batch.rows
        outcome = Outcome(executed=self._route.costs(self._padding.named(sizes)).executed(ran))
        stays = np.ones(batch.rows, bool)
        if step.exit is not None:
            logits = None if step.logits is None else found[step.logits]
            answering = Answering(parts, found[step.label], found[step.score], logits)
            leaves = answering.ask(step.exit)
            outcome.settled = answering.hand_out(leaves)
            if self._keeps and outcome.settled:
                outcome.left = [answering.left(outcome.settled, leaves, self._seen(k, batch.rows, {**state, **found}))]
            if step.exit == self._first_exit:
                outcome.first = [(job, len(rows)) for job, rows in parts if job.anytime]
            stays = ~leaves
        if stays.any():
            following = (*step.following, *(self._said[k] if self._keeps else ()))
            alive = {name: made[name] if name in made else state[name] for name in following}
            outcome.onward = self._onward(batch, parts, alive, stays, Place(self, k + 1, sizes))
        return outcome

    def _seen(self, k: int, rows: int, state: State) -> Seen:
        """What exits up to a stage say of a batch's rows. state: where their tensors are."""
        said = self._executor.fetch({name: state[name] for name in self._said[k]})
        seen, everybody = Seen(len(self._route.manifest.exits), rows), np.arange(rows)
        for step in self._steps[True][: k + 1]:
            if step.exit is not None and step.logits is not None:
                seen.keep(step.exit, everybody, said[step.score], said[step.logits])
        return seen

    def _onward(
        self, batch: Batch, parts: Sequence[tuple[Job, Rows]], alive: State, stays: np.ndarray, place: Place
    ) -> list[tuple[Place, Waiting]]:
        onward, start = [], 0
        for (job, rows), part in zip(parts, batch.parts, strict=True):
            at = np.flatnonzero(stays[start : start + len(rows)])
            if len(at):
                source = Rows(alive, at + start, rows.ids[at], rows.sizes, rows.flops)
                before = part.waiting.before + part.start
                onward.append((place, Waiting(job, len(at), source, due=part.waiting.due, before=before, since=0.0)))
            start += len(rows)
        return onward


def _together(parts: Sequence[tuple[Job, Rows]]) -> list[tuple[State, np.ndarray]]:
    """States, and the rows to take of each: neighbours that come from one batch are taken at once."""
    made: list[tuple[State, list[np.ndarray]]] = []
    for _, rows in parts:
        assert rows.at is not None
        if made and made[-1][0] is rows.state:
            made[-1][1].append(rows.at)
        else:
            made.append((rows.state, [rows.at]))
    return [(state, np.concatenate(at) if len(at) > 1 else at[0]) for state, at in made]


class AloneWay:
    """A request by itself, for bundles whose rows influence each other and for gates that need routing."""

    mixes = False

    def __init__(self, cascade: Cascade, padding: Padding, *, keeps: bool = False) -> None:
        """keeps: whether it is kept what every exit says."""
        self._cascade, self._padding, self._keeps = cascade, padding, keeps

    def __repr__(self) -> str:
        return "alone"

    def waits_at(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Where rows of these sizes wait: among their equals."""
        return sizes

    def joins(self, stage: int) -> bool:
        return False

    def flops(self, sizes: tuple[int, ...], stage: int) -> int:
        return int(self._cascade.row_flops(self._padding.named(sizes))[-1])

    def run(self, batch: Batch) -> Outcome:
        outcome = Outcome()
        for job, rows in parts_of(batch):
            if rows.at is None:
                arrays = dict(rows.state)
            else:  # of one request, so consecutive
                arrays = rows_of(rows.state, self._cascade.manifest, int(rows.at[0]), int(rows.at[-1]) + 1)
            fetch = ("probabilities",) if job.query.probabilities else ()
            try:
                seen = Seen(len(self._cascade.exits), len(rows)) if self._keeps else None
                out = self._cascade.predict(arrays, fetch=fetch, stop=job.over, deadline=job.seconds_left, seen=seen)
            except Stopped:
                continue
            job.answers.place(rows.ids, out)
            outcome.executed = tuple(map(sum, zip(outcome.executed, out.executed, strict=True))) or out.executed
            outcome.settled.append((job, rows.ids))
            if seen is not None:
                outcome.left.append(Left([(job, rows.ids)], out.label, out.exit, out.abstain, seen))
        return outcome
