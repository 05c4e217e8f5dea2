"""Rows of one request as they leave, for whoever doesn't want to wait for its last."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
from offramp.runtime.execution.answers import Ids
from offramp.server.engine import Engine
from offramp.server.patience import Patience
from offramp.server.query import Answer, Query
from offramp.server.scheduling.job import Job


class Stream:
    """One query's rows, some at a time. whole: its answer, once all have been given."""

    def __init__(self, engine: Engine, query: Query, patience: Patience) -> None:
        self._engine, self._query, self._patience = engine, query, patience
        self.whole: Answer | None = None

    async def __aiter__(self) -> AsyncIterator[tuple[Ids, Answer]]:
        """The numbers of rows that have just left, and their answers.

        Raises what `Engine.infer` raises. Who stops looking cancels what hasn't run.
        """
        left: asyncio.Queue[tuple[Job, Ids] | None] = asyncio.Queue()
        given = np.zeros(self._query.rows, bool)
        job: Job | None = None

        def told(job: Job, ids: Ids) -> None:
            left.put_nowait((job, ids))

        asking = asyncio.ensure_future(self._engine.infer(self._query, self._patience, told))
        asking.add_done_callback(lambda _: left.put_nowait(None))
        try:
            while (some := await left.get()) is not None:
                job, ids = some
                given[ids] = True
                yield ids, job.answer_of(ids)
            self.whole = await asking
            rest = np.flatnonzero(~given)
            if len(rest):  # its deadline has passed: they have what they have
                yield rest, self.whole.part(rest)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
