"""The way of every inference request, whatever its protocol: read, decode, infer, encode, count."""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

from offramp.runtime.bundle import Manifest
from offramp.runtime.execution.answers import Ids
from offramp.server.body import off_loop, read_body
from offramp.server.decoding.decoders import Decoders
from offramp.server.engine import Engine
from offramp.server.errors import TooLarge, outcome
from offramp.server.memory import Hold, Memory
from offramp.server.metrics import Metrics
from offramp.server.operating_points import OperatingPoints
from offramp.server.patience import Attended, Patience
from offramp.server.protocols.hot import Answered
from offramp.server.protocols.json_body import Body, decode
from offramp.server.protocols.packing import ENCODINGS, unpacked
from offramp.server.protocols.raw import RawRows
from offramp.server.protocols.reading import READERS, Asked, Limits
from offramp.server.protocols.streaming import Stream, Streamed
from offramp.server.query import Answer, Query
from offramp.server.settings import Settings
from starlette.requests import Request
from starlette.responses import Response

_ROW_BYTES, _NUMBER_BYTES = 128, 20  # about what a row of an answer, and a probability in it, are when encoded
_NUMBER_MEMORY = 40  # and what that probability takes on its way there
# Bodies from this size on are decoded in a process of their own: half as many bytes of numbers hold Python's lock for
# two milliseconds, and a piece of work that size costs a tenth more by the way there and back.
DECODED_APART = 256 * 2**10
UNPACKED_APART = 2**10
"""The same of a packed body, which may become a thousand times as large."""
Encode = Callable[[Answer], bytes]
Lines = Callable[[Ids, Answer], bytes]
T = TypeVar("T")
Finish = Callable[[Asked, Patience], tuple[Query, Encode]]


@dataclass(frozen=True)
class DataPlane:
    """What the protocols share: the model, its operating points, the engine, the counters."""

    manifest: Manifest
    points: OperatingPoints
    engine: Engine
    metrics: Metrics
    settings: Settings
    memory: Memory
    raw: RawRows
    limits: Limits
    decoders: Decoders

    async def answer(self, request: Request, kind: str, finish: Finish) -> Response:
        """Answer a request.

        kind: of body, one of READERS. finish: from what it asks to a query, and the encoder for its answer. Counts the
        request whichever way it ends. Raises InputError and ServerError, which the app turns into responses.
        """
        started = time.perf_counter()
        try:
            with Hold(self.memory) as held, self._attended(request) as attended:
                body = await self._body(request, held, attended)
                query, encode = await self._asked(body, attended, kind, finish)
                answer = await self.engine.infer(query, body.patience)
                payload = await off_loop(self._answer_bytes(query), lambda: encode(answer))
        except BaseException as error:
            # A cancelled handler is a server that is being stopped by force, or a client that left.
            self.metrics.ended("cancelled" if isinstance(error, asyncio.CancelledError) else outcome(error))
            raise
        self.metrics.answered(answer, query.operating_point, time.perf_counter() - started)
        return Answered(payload)

    async def stream(self, request: Request, kind: str, finish: Finish, lines: Lines) -> Response:
        """Answer a request row by row, as rows leave; otherwise as `answer`.

        lines: rows that have just left, encoded. What goes wrong before the first of them has its own status; what
        goes wrong later is the last line.
        """
        started = time.perf_counter()
        stack = AsyncExitStack()
        try:
            held = stack.enter_context(Hold(self.memory))
            attended = stack.enter_context(self._attended(request))
            body = await self._body(request, held, attended)
            query, _ = await self._asked(body, attended, kind, finish)
            stream = Stream(self.engine, query, body.patience)
            parts = aiter(stream)
            stack.push_async_callback(parts.aclose)
            first = await anext(parts, None)
        except BaseException as error:
            gone = await _left(stack, error)
            self.metrics.ended("cancelled" if isinstance(gone, asyncio.CancelledError) else outcome(gone))
            raise gone from None

        def over(error: BaseException | None) -> None:
            if error is None and stream.whole is not None:
                self.metrics.answered(stream.whole, query.operating_point, time.perf_counter() - started)
            else:
                self.metrics.ended("cancelled" if error is None else outcome(error))

        return Streamed(stack, first, parts, lines, over)

    async def read(self, request: Request, kind: type[T]) -> T:
        """The JSON body of a request that asks no prediction. Raises InputError naming the field, TooLarge."""
        with Hold(self.memory) as held, self._attended(request) as attended:
            body = await self._body(request, held, attended)
            plain = unpacked(body, self.limits.body_bytes)
            return await off_loop(body.size, lambda: decode(plain, kind, self.limits.decoded_bytes))

    def _attended(self, request: Request) -> Attended:
        return Attended(request, Patience(self.settings.timeout, "the request body didn't arrive within {:g} seconds."))

    async def _body(self, request: Request, held: Hold, attended: Attended) -> Body:
        return await read_body(request, self.settings.max_body_bytes, self.settings.timeout, held, attended)

    async def _asked(self, body: Body, attended: Attended, kind: str, finish: Finish) -> tuple[Query, Encode]:
        """From a body to its query, wherever that is decoded."""
        if body.size >= (UNPACKED_APART if body.encoding in ENCODINGS else DECODED_APART):
            asked = await self.decoders.read(kind, body)
            query, encode = await off_loop(math.inf if asked.raw else 0, lambda: finish(asked, body.patience))
        else:
            # A small body may hold a picture that takes a second to unpack.
            size = math.inf if self.raw.kind == "image" or body.encoding in ENCODINGS else body.size
            query, encode = await off_loop(size, lambda: self._read(body, kind, finish))
        body.drop()
        body.held.set(query.bytes + self._answer_bytes(query))
        attended.allow(self.settings.timeout if query.timeout is None else query.timeout)
        return query, encode

    def _answer_bytes(self, query: Query) -> int:
        """About what an answer is when encoded. Raises TooLarge for one that takes more memory than a request may."""
        numbers = len(self.manifest.classes) if query.probabilities else 0
        most = self.settings.max_decoded_bytes
        if query.rows * numbers * _NUMBER_MEMORY > most:
            raise TooLarge(
                f"{query.rows} rows with {numbers} probabilities each are more than this server's {most} bytes for the "
                "numbers of one request. Ask for fewer rows at a time, or without probabilities."
            )
        return query.rows * (_ROW_BYTES + numbers * _NUMBER_BYTES)

    def _read(self, body: Body, kind: str, finish: Finish) -> tuple[Query, Encode]:
        return finish(READERS[kind](body, self.manifest, self.limits), body.patience)

    def query(self, asked: Asked, patience: Patience, request_id: str) -> Query:
        """The query that a request asks for.

        Raises InputError for fields that don't fit this model; what `Engine.check_room` raises before any work on it.
        """
        fields, groups = asked.fields, asked.groups
        name, max_exit = self.points.choose(fields.operating_point, fields.max_exit)
        self.engine.check_room(asked.rows)
        if asked.raw is not None:
            groups = self.raw.groups(asked.raw.values, asked.raw.where, patience)
        return Query(
            groups=groups,
            rows=asked.rows,
            operating_point=name,
            max_exit=max_exit,
            probabilities=fields.probabilities,
            timeout=fields.timeout,
            priority=fields.priority,
            named=fields.operating_point is not None,
            deadline=fields.deadline,
            request_id=request_id,
        )


async def _left(stack: AsyncExitStack, error: BaseException) -> BaseException:
    """Leave what a stack has entered, because of an error. Returns the error that it is in the end."""
    try:
        await stack.__aexit__(type(error), error, error.__traceback__)
    except BaseException as other:
        return other
    return error
