"""Request bodies: read up to a limit, unpacked up to the same limit."""

import asyncio
import functools
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from offramp.runtime.errors import InputError
from offramp.server.errors import ClientGone, DeadlinePassed, TooLarge
from offramp.server.memory import Hold
from offramp.server.patience import Patience
from offramp.server.protocols.json_body import INLINE_BYTES, Body, Holds
from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")
# Of a body that is too large this many limits' worth is still read and dropped: a client that is cut off
# while it sends never sees the answer that says why.
_DRAIN = 4
# Packed bodies are unpacked in pieces of this many bytes, and may have so many members: block gzip makes one of each
# 64 KiB, and an empty one takes 20 bytes.
_PIECE, _MEMBERS = 16 * 2**10, 4096
_MADE_AT_ONCE = 4 * 2**20  # a thousandfold packed piece makes 16 MiB
# Decoding takes memory of its own: more at a time would only do it more often.
_few = ThreadPoolExecutor(2, thread_name_prefix="offramp-body")
_WINDOW_BITS = {"gzip": (31,), "x-gzip": (31,), "deflate": (15, -15)}  # "deflate" is zlib, but some send it raw


async def read_body(request: Request, limit: int, timeout: float, held: Hold) -> Body:
    """The body of a request as it comes. timeout: seconds for all of it to arrive, and then again for the work on it.

    Raises TooLarge past `limit` bytes, QueueFull where memory has no room for it, InputError for an unknown encoding,
    ClientGone if the client hangs up meanwhile, DeadlinePassed if the body isn't there in time.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > _DRAIN * limit:
        raise _too_large(limit)  # too much to read and drop: it is refused unread
    try:
        data = await asyncio.wait_for(_receive(request, limit, held), timeout)
    except TimeoutError as error:
        raise DeadlinePassed(f"the request body didn't arrive within {timeout:g} seconds.") from error
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", *_WINDOW_BITS):
        raise InputError(f"Content-Encoding is {encoding!r}, expected gzip, deflate or identity.")
    return Body(data, encoding, held, Patience(timeout))


async def _receive(request: Request, limit: int, held: Hold) -> bytearray:
    data = bytearray()  # grows in place: pieces and their sum would be twice the body
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                held.set(size)
                data += chunk
            else:
                data.clear()
                held.set(0)
                if size > _DRAIN * limit:
                    break
    except ClientDisconnect as error:
        raise ClientGone("the client hung up while sending.") from error
    if size > limit:
        raise _too_large(limit)
    return data


async def unpacked(body: Body, limit: int) -> Body:
    """The body without its encoding. Raises TooLarge past `limit` bytes, InputError if it is broken."""
    if body.encoding not in _WINDOW_BITS or not body.data:
        return body
    work = functools.partial(unpack, body.data, body.encoding, limit, body.held, body.patience)
    return replace(body, data=await asyncio.get_running_loop().run_in_executor(_few, work), encoding="identity")


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body is larger than {limit} bytes. Send fewer rows at a time.")


def unpack(
    packed: bytes | bytearray, encoding: str, limit: int, held: Holds | None = None, patience: Patience | None = None
) -> bytearray:
    """A gzip or deflate body, unpacked; never more than a little over `limit` bytes are made.

    patience: looked at after each piece. held: counts what is made, beside what is packed.
    """
    error: zlib.error | None = None
    for bits in _WINDOW_BITS[encoding]:
        made = bytearray()
        try:
            for part in _unpack(packed, bits, limit):
                if patience is not None:
                    patience.check()
                if held is not None:
                    held.set(len(packed) + len(made) + len(part))
                made += part
            return made
        except zlib.error as reason:
            error = error or reason
    raise InputError(f"the body isn't valid {encoding}, which its Content-Encoding says: {error}.")


def _unpack(packed: bytes | bytearray, bits: int, limit: int) -> Iterator[bytes]:
    """Piece by piece: what a member leaves over is copied, and of the whole body that would be quadratic."""
    size = members = 0
    member: Any = None
    for start in range(0, len(packed), _PIECE):
        rest = bytes(packed[start : start + _PIECE])
        while rest:
            if member is None:  # a gzip body may have several
                members += 1
                if members > _MEMBERS:
                    raise TooLarge(f"the request body has more than {_MEMBERS} compressed members. Pack it in one.")
                member = zlib.decompressobj(bits)
            part = member.decompress(rest, min(_MADE_AT_ONCE, limit + 1 - size))
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            yield part
            rest = member.unconsumed_tail
            if member.eof:
                rest, member = member.unused_data, None
    if member is not None:
        raise zlib.error("it ends too early")


async def off_loop(size: float, work: Callable[[], T]) -> T:
    """Do it here if it is small, in a thread if it would hold up the event loop."""
    return work() if size <= INLINE_BYTES else await asyncio.get_running_loop().run_in_executor(_few, work)
