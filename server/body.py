"""Request bodies: read up to a limit, unpacked up to the same limit, decoded as JSON whatever their type says.

The Content-Type isn't looked at: common inference clients send JSON without one.
"""

import asyncio
import functools
import gc
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from offramp.runtime.errors import InputError
from offramp.server.errors import ClientGone, DeadlinePassed, TooLarge
from offramp.server.memory import Hold
from offramp.server.patience import Patience
from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")
# Decoding this many bytes takes about half a millisecond; more than that isn't done on the event loop.
INLINE_BYTES = 32 * 2**10
# Of a body that is too large this many limits' worth is still read and dropped: a client that is cut off
# while it sends never sees the answer that says why.
_DRAIN = 4
# Packed bodies are unpacked in pieces of this many bytes, and may have so many members: block gzip makes one of each
# 64 KiB, and an empty one takes 20 bytes.
_PIECE, _MEMBERS = 16 * 2**10, 4096
_MADE_AT_ONCE = 4 * 2**20  # a thousandfold packed piece makes 16 MiB
# Bytes of a float in a list, of a list, of an object with a key, of a string beside a number by its two quotes.
_NUMBER, _LIST, _OBJECT, _QUOTE = 40, 96, 256, 24
_BEYOND_UCS2 = [bytes([first]) for first in range(0xF0, 0xF5)] + [b"\\ud", b"\\uD"]
# Decoding takes memory of its own: more at a time would only do it more often.
_few = ThreadPoolExecutor(2, thread_name_prefix="offramp-body")
_holding_up = threading.Lock()
_TURN = 0.001  # seconds: any wait at all lets another thread have Python's lock
_WINDOW_BITS = {"gzip": (31,), "x-gzip": (31,), "deflate": (15, -15)}  # "deflate" is zlib, but some send it raw


@dataclass(frozen=True)
class Body:
    """A whole body. held: what its request holds of the server's memory. patience: how long it is worked on."""

    data: bytearray
    encoding: str
    held: Hold
    patience: Patience


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
    packed: bytes | bytearray, encoding: str, limit: int, held: Hold | None = None, patience: Patience | None = None
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


def decode(body: Body, kind: type[T], limit: int) -> T:
    """A JSON body as a struct. Raises InputError naming the field, or the place in the body.

    limit: bytes that its values may take; TooLarge is raised for more before any is made.
    """
    body.patience.check()  # it may have waited for its thread
    data = body.data
    size = decoded_bytes(data)
    if size > limit:
        raise TooLarge(
            f"the request body would take about {size} bytes once decoded, this server allows {limit}. "
            "Send fewer rows at a time."
        )
    body.held.set(len(data) + size)
    try:
        with one_at_a_time() if len(data) > INLINE_BYTES else nullcontext():
            made = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise InputError(f"request body: {error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"request body: {error}{_hint(data, str(error))}.") from error
    except RecursionError as error:
        raise InputError("request body: nested too deeply.") from error
    body.patience.check()
    return made


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """For what holds Python's lock all along: the event loop gets its turn before the next one begins.

    The garbage collector waits, too: it would go through a million lists again and again while they are made, which
    took three quarters of the time.
    """
    with _holding_up:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
            time.sleep(_TURN)


def decoded_bytes(body: bytes | bytearray) -> int:
    """About what a JSON body's values take as Python objects, from above: "[{},{}]" takes twenty times its bytes.

    What stands inside strings counts as if it were structure; inputs are numbers.
    """
    commas = body.count(b",")
    values = _NUMBER * commas + _LIST * body.count(b"[") + _OBJECT * body.count(b"{") + _QUOTE * body.count(b'"')
    width, short = _characters(body)
    return values + width * max(0, len(body) - short * commas)


def _characters(body: bytes | bytearray) -> tuple[int, int]:
    """Bytes that a character of a string takes at most, and so many before each comma are reckoned already.

    A string's widest character decides: one emoji makes a long text four times as long.
    """
    if body.isascii() and b"\\u" not in body:
        return 1, 24
    return (4 if any(wide in body for wide in _BEYOND_UCS2) else 2), 4


def _hint(body: bytes | bytearray, message: str) -> str:
    """For a NaN or Infinity: many JSON writers let them out, and "invalid character" doesn't say it."""
    place = re.search(r"\(byte (\d+)\)", message)
    if place is None:
        return ""
    byte = int(place[1])
    found: Any = re.search(rb"-?(NaN|Infinity|Inf)", body[max(0, byte - 1) : byte + 9], re.IGNORECASE)
    return f": JSON has no {found[1].decode()}, expected finite numbers" if found else ""
