"""Rows of one request as they leave, for whoever doesn't want to wait for its last."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack

import msgspec
import numpy as np
from offramp.runtime.errors import OfframpError
from offramp.runtime.execution.answers import Ids
from offramp.server.engine import Engine
from offramp.server.patience import Patience
from offramp.server.query import Answer, Query
from offramp.server.request_id import id_in
from offramp.server.scheduling.job import Job
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

NDJSON = "application/x-ndjson"
_JSON = ("application/json", "application/*", "*/*")  # that an answer as a whole is accepted by: the nearest counts
_QUALITY = re.compile(r"[01](\.\d*)?")


def wants_lines(accept: str) -> bool:
    """Whether an Accept header would rather have lines than JSON, or either."""
    if NDJSON not in accept.lower():
        return False
    qualities = {}
    for one in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in one.split(";"))
        said = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        qualities[kind] = float(said) if _QUALITY.fullmatch(said) else 1.0
    whole = next((qualities[kind] for kind in _JSON if kind in qualities), 0.0)
    return 0 < qualities.get(NDJSON, 0.0) >= whole


class Stream:
    """One query's rows, some at a time. whole: its answer, once all have been given."""

    def __init__(self, engine: Engine, query: Query, patience: Patience) -> None:
        self._engine, self._query, self._patience = engine, query, patience
        self.whole: Answer | None = None

    async def __aiter__(self) -> AsyncGenerator[tuple[Ids, Answer], None]:
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


class Streamed(Response):
    """An answer whose rows are sent as they leave, a line each. An error behind the first is a line, too."""

    media_type = NDJSON

    def __init__(
        self,
        stack: AsyncExitStack,
        first: tuple[Ids, Answer] | None,
        parts: AsyncGenerator[tuple[Ids, Answer], None],
        lines: Callable[[Ids, Answer], bytes],
        over: Callable[[BaseException | None], None],
    ) -> None:
        """stack: what the request holds until its end, entered in the task that sends this. over: told at the end."""
        super().__init__()
        del self.headers["content-length"]  # nobody knows it yet
        self._stack, self._first, self._parts, self._lines, self._over = stack, first, parts, lines, over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held: list[bytes] = []
        whole = scope.get("http_version") == "1.0"  # which knows no pieces

        async def line(body: bytes, more: bool = True) -> None:
            held.append(body)
            if whole and more:
                return
            await send({"type": "http.response.body", "body": b"".join(held), "more_body": more})
            held.clear()

        failed: BaseException | None = None
        try:
            async with self._stack:
                if not whole:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                if self._first is not None:
                    await line(self._lines(*self._first))
                    async for ids, answer in self._parts:
                        await line(self._lines(ids, answer))
        except (OfframpError, OSError) as error:
            failed = error
            await line(msgspec.json.encode({"error": str(error), "request_id": id_in(scope)}) + b"\n")
        except BaseException as error:
            self._over(error)
            raise
        self._over(failed)
        if whole:
            length = (b"content-length", b"%d" % sum(map(len, held)))
            await send({"type": "http.response.start", "status": 200, "headers": [*self.raw_headers, length]})
        await line(b"", more=False)
