"""Answered rows on their way to the store, and those that are run to the end after they were answered."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import Manifest
from offramp.runtime.errors import OfframpError
from offramp.runtime.online.learning import Learning
from offramp.runtime.predictions import Seen
from offramp.server.patience import Patience
from offramp.server.query import Answer, Group, Query
from offramp.server.scheduling.job import Job

_LAST = 25  # levels of priority are half seconds: everybody who comes in the next ten goes first
_PATIENCE = 60.0  # seconds in which a row is run to the end, or isn't
_AT_ONCE = 256  # rows on their way to the store
_MOST, _MOST_BYTES = 256, 64 * 2**20  # requests, and bytes of their inputs, that may wait for that

Infer = Callable[[Query, Patience], Awaitable[Answer]]
_log = logging.getLogger("offramp.online")


class Keeping:
    """What is done with a job's rows once they have been answered.

    A shadow run begins anew at the first block. To go on from where a row left would save the first blocks, a small
    part of the whole, and hold the row's state in memory for all that time.
    """

    def __init__(self, learning: Learning, manifest: Manifest, share: float) -> None:
        """share: of the rows that leave early, to be run to the end."""
        self._learning, self._share = learning, share
        self._last = len(manifest.exits) - 1
        self._axes = {given.name: given.batch_axis for given in manifest.inputs}
        self._rng = np.random.default_rng()
        self._running: set[asyncio.Task[None]] = set()
        self._bytes = 0
        self.completed = 0
        """Rows that have been run to the end."""

    @property
    def running(self) -> int:
        """Requests of whose rows some wait to be run to the end, or are."""
        return len(self._running)

    async def answered(self, job: Job, answer: Answer, infer: Infer) -> None:
        """Keep a job's rows, and run some of them to the end. infer: answers a query."""
        query = job.query
        if job.seen is None or query.seen is not None:
            return
        # Without room nobody is drawn: to leave out some who were would be to choose.
        share = self._share if len(self._running) < _MOST and self._bytes < _MOST_BYTES else 0.0
        kept = query.request_id, job.version, job.point, answer, job.seen, share
        if self._learning.durable:
            await asyncio.to_thread(self._learning.keep_as, *kept)
        else:
            self._learning.keep_as(*kept)
        if share:
            early = (answer.exit < self._last) & ~answer.involuntary & (answer.label >= 0)
            drawn = early & (self._rng.random(query.rows) < share)
            if drawn.any():
                task = asyncio.get_running_loop().create_task(self._run(query, drawn, infer))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def _run(self, query: Query, drawn: NDArray[np.bool_], infer: Infer) -> None:
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
            self._learning.complete([query.request_id] * len(rows[some]), rows[some], seen.part(some))
        self.completed += len(rows)

    def _groups(self, query: Query, drawn: NDArray[np.bool_]) -> tuple[tuple[Group, ...], list[int]]:
        """The drawn rows by shape, numbered anew, and their old numbers."""
        groups, old = [], list[int]()
        for group in query.groups:
            at = np.flatnonzero(drawn[group.positions])
            if len(at):
                arrays = {name: np.take(array, at, axis=self._axes[name]) for name, array in group.arrays.items()}
                numbers = np.arange(len(old), len(old) + len(at))
                groups.append(Group(arrays, {**group.sizes, "batch": len(at)}, numbers))
                old += group.positions[at].tolist()
        return tuple(groups), old

    async def close(self) -> None:
        """Give up what still waits for its turn."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
