"""Answered rows on their way to the store, and those that are run to the end after they were answered."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import Manifest
from offramp.runtime.errors import OfframpError
from offramp.runtime.execution.answers import Ids
from offramp.runtime.online.learning import Learning
from offramp.runtime.online.shadow import rows_of
from offramp.runtime.predictions import Said, Seen
from offramp.server.patience import Patience
from offramp.server.query import Answer, Group, Query
from offramp.server.scheduling.job import Job
from offramp.server.scheduling.outcome import Left

KEPT_WITHIN = 1.0
"""Seconds in which an answered row is on the disk, where labels that come to any engine find it."""
_LAST = 25  # levels of priority are half seconds: everybody who comes in the next ten goes first
_PATIENCE = 60.0  # seconds in which a row is run to the end, or isn't
_AT_ONCE = 256  # rows on their way to the store
_MOST, _MOST_BYTES = 256, 64 * 2**20  # requests, and bytes of their inputs, that may wait for that

Infer = Callable[[Query, Patience], Awaitable[Answer]]
_log = logging.getLogger("offramp.online")


class Keeping:
    """What is done with rows once they have left.

    A shadow run begins anew at the first block. To go on from where a row left would save the first blocks, a small
    part of the whole, and hold the row's state in memory for all that time.
    """

    def __init__(self, learning: Learning, manifest: Manifest) -> None:
        self._learning, self._shadow = learning, learning.shadow
        self._last = len(manifest.exits) - 1
        self._axes = {given.name: given.batch_axis for given in manifest.inputs}
        self._running: set[asyncio.Task[None]] = set()
        self._bytes = 0
        self.durable = learning.durable
        """Whether `keep` waits for the disk."""
        self.completed = 0
        """Rows that have been run to the end."""

    @property
    def running(self) -> int:
        """Requests of whose rows some wait to be run to the end, or are."""
        return len(self._running)

    def keep(self, left: Left) -> list[tuple[Job, Ids]]:
        """Keep rows that have left; those drawn to be run to the end, by job. Any thread may call it.

        What has no label isn't kept, nor are rows of a request that was cut short, by `max_exit` or a deadline, or went
        by another rule than it asked for: those of them that would have left there anyway say nothing of the others.
        """
        job = left.of[0][0]
        alike = all(
            one.own is None and one.query.deadline is None and one.query.seen is None
            and one.version == job.version and one.point == job.point
            for one, _ in left.of
        )  # fmt: skip
        if alike and left.label.min() >= 0:
            return self._keep(left.of, left.exit, left.abstain, left.seen)
        drawn: list[tuple[Job, Ids]] = []
        seen = left.seen.apart()
        start = 0
        for job, ids in left.of:
            rows = np.arange(start, start + len(ids))
            start += len(ids)
            if job.query.seen is not None:
                job.query.seen.place(ids, seen.part(rows))
            elif not (job.expired or job.own is not None or job.answers.involuntary[ids].any()):
                chosen = left.label[rows] >= 0
                rows, ids = rows[chosen], ids[chosen]
                if len(rows):
                    drawn += self._keep([(job, ids)], left.exit[rows], left.abstain[rows], seen.part(rows))
        return drawn

    def _keep(
        self, of: Sequence[tuple[Job, Ids]], exit: NDArray[np.int32], abstain: NDArray[np.bool_], seen: Said
    ) -> list[tuple[Job, Ids]]:
        """Keep rows of one version and point."""
        # Without room nobody is drawn: to leave out some who were would be to choose.
        share = self._shadow.share if len(self._running) < _MOST and self._bytes < _MOST_BYTES else 0.0
        first, rows = of[0][0], len(exit)
        requests = [(job.query.request_id, ids) for job, ids in of]
        self._learning.keep_as(requests, first.version, first.point, exit, abstain, seen, share)
        drawn = self._shadow.hits(rows, share)
        if drawn is None:
            return []
        drawn &= seen.unfinished
        chosen, start = [], 0
        for job, ids in of:
            here = drawn[start : start + len(ids)]
            start += len(ids)
            if here.any():
                chosen.append((job, ids[here]))
        return chosen

    def run_to_the_end(self, query: Query, ids: Ids, infer: Infer) -> None:
        """In the event loop: run rows of an answered query to the end. infer: answers a query."""
        task = asyncio.get_running_loop().create_task(self._run(query, ids, infer))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, query: Query, ids: Ids, infer: Infer) -> None:
        drawn = np.zeros(query.rows, bool)
        drawn[ids] = True
        groups, rows = self._groups(query, drawn)
        seen = Seen(self._last + 1, len(rows))
        shadow = replace(
            query,
            groups=groups,
            rows=len(rows),
            max_exit=self._last,
            probabilities=False,
            priority=_LAST,
            named=True,
            deadline=None,
            seen=seen,
        )
        self._bytes += shadow.bytes
        try:
            await infer(shadow, Patience(_PATIENCE))
        except OfframpError as error:
            _log.info("%d rows weren't run to the end: %s", len(rows), error)
            return
        finally:
            self._bytes -= shadow.bytes
        for start in range(0, len(rows), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            # Rows that don't come to the store because it is busy would be missing where there is much to do.
            while self._learning.room < _AT_ONCE and self._learning.alarm is None:
                await asyncio.sleep(0.1)
            await self._complete([query.request_id] * len(rows[some]), rows[some], seen.part(some))
        self.completed += len(rows)

    async def _complete(self, names: list[str], rows: list[int], seen: Seen) -> None:
        if self.durable:
            await asyncio.to_thread(self._learning.complete, names, rows, seen)
        else:
            self._learning.complete(names, rows, seen)

    def _groups(self, query: Query, drawn: NDArray[np.bool_]) -> tuple[tuple[Group, ...], list[int]]:
        """The drawn rows by shape, numbered anew, and their old numbers."""
        groups, old = [], list[int]()
        for group in query.groups:
            at = np.flatnonzero(drawn[group.positions])
            if len(at):
                arrays = rows_of(group.arrays, self._axes, at)
                numbers = np.arange(len(old), len(old) + len(at))
                groups.append(Group(arrays, {**group.sizes, "batch": len(at)}, numbers))
                old += group.positions[at].tolist()
        return tuple(groups), old

    async def close(self) -> None:
        """Give up what still waits for its turn."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
