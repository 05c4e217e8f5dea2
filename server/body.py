"""Request bodies, read up to a limit; and threads for what is done with them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from offramp.runtime.errors import InputError
from offramp.server.errors import ClientGone
from offramp.server.memory import Hold
from offramp.server.patience import Attended, Patience
from offramp.server.protocols.json_body import INLINE_BYTES, Body
from offramp.server.protocols.packing import ENCODINGS, too_large
from starlette.requests import Request

T = TypeVar("T")
# Of a body that is too large this many limits' worth is still read and dropped: a client that is cut off
# while it sends never sees the answer that says why.
_DRAIN = 4
# A body is kept in pieces of this size: one that grows as a whole is copied again and again, on the event loop.
_PIECE = 2**20
# Decoding takes memory of its own: more at a time would only do it more often.
_few = ThreadPoolExecutor(2, thread_name_prefix="offramp-body")


async def read_body(request: Request, limit: int, timeout: float, held: Hold, attended: Attended) -> Body:
    """The body of a request as it comes.

    timeout: seconds for the work on it, from the moment that all of it is here; `attended` has until then a patience of
    its own. Raises TooLarge past `limit` bytes, QueueFull where memory has no room for it, InputError for an unknown
    encoding, ClientGone if the client hangs up meanwhile.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > _DRAIN * limit:
        raise too_large(limit)  # too much to read and drop: it is refused unread
    pieces = await _receive(request, limit, held)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", *ENCODINGS):
        raise InputError(f"Content-Encoding is {encoding!r}, expected gzip, deflate or identity.")
    body = Body(pieces, encoding, held, Patience(timeout))
    attended.work(body.patience)
    return body


async def _receive(request: Request, limit: int, held: Hold) -> list[bytearray]:
    pieces = [bytearray()]
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client hung up while sending.")
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size <= limit:
            held.set(size)
            if len(pieces[-1]) >= _PIECE:
                pieces.append(bytearray())
            pieces[-1] += chunk
        else:
            pieces = [bytearray()]
            held.set(0)
            if size > _DRAIN * limit:
                break
    if size > limit:
        raise too_large(limit)
    return pieces


async def off_loop(size: float, work: Callable[[], T]) -> T:
    """Do it here if it is small, in a thread if it would hold up the event loop."""
    return work() if size <= INLINE_BYTES else await asyncio.get_running_loop().run_in_executor(_few, work)
