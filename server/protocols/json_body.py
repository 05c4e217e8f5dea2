"""A JSON body, decoded whatever its type says, within the memory that there is for it.

The Content-Type isn't looked at: common inference clients send JSON without one.
"""

import gc
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from offramp.runtime.errors import InputError
from offramp.server.errors import TooLarge
from offramp.server.patience import Patience

T = TypeVar("T")
# Decoding this many bytes takes about half a millisecond; more than that isn't done on the event loop.
INLINE_BYTES = 32 * 2**10
# Bytes of a float in a list, of a list, of an object with a key, of a string beside a number by its two quotes.
_NUMBER, _LIST, _OBJECT, _QUOTE = 40, 96, 256, 24
_BEYOND_UCS2 = [bytes([first]) for first in range(0xF0, 0xF5)] + [b"\\ud", b"\\uD"]
_holding_up = threading.Lock()
_TURN = 0.001  # seconds: any wait at all lets another thread have Python's lock


class Holds(Protocol):
    """Who counts the memory of a request: its Hold, or who asks that of another process."""

    def set(self, size: int) -> None:
        """The request is to hold so many bytes in all; raises where there is no room."""


@dataclass(frozen=True)
class Body:
    """All of a body. held: what its request holds of the server's memory. patience: how long it is worked on."""

    pieces: list[bytearray]
    encoding: str
    held: Holds
    patience: Patience

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))

    def whole(self) -> bytearray:
        """In one piece."""
        if len(self.pieces) != 1:
            self.pieces[:] = [bytearray().join(self.pieces)]
        return self.pieces[0]

    def drop(self) -> None:
        """Its bytes aren't needed any more, whoever still has it."""
        self.pieces.clear()


def decode(body: Body, kind: type[T], limit: int) -> T:
    """A JSON body as a struct. Raises InputError naming the field, or the place in the body.

    limit: bytes that its values may take; TooLarge is raised for more before any is made.
    """
    body.patience.check()  # it may have waited for its thread
    data = body.whole()
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
        raise InputError(f"request body: {_reason(data, str(error))}.") from error
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


def _reason(body: bytes | bytearray, message: str) -> str:
    """Why a body isn't JSON. msgspec says that it is truncated for an empty one, and for half a surrogate pair."""
    if not body.strip():
        return "it is empty, expected a JSON object"
    if message == "Input data was truncated" and re.search(rb'\\u[dD][89abAB][0-9a-fA-F]{2}"', body):
        return "half a surrogate pair at the end of a string, which is no character"
    return message + _hint(body, message)


def _hint(body: bytes | bytearray, message: str) -> str:
    """For a NaN or Infinity: many JSON writers let them out, and "invalid character" doesn't say it."""
    place = re.search(r"\(byte (\d+)\)", message)
    if place is None:
        return ""
    byte = int(place[1])
    found: Any = re.search(rb"-?(NaN|Infinity|Inf)", body[max(0, byte - 1) : byte + 9], re.IGNORECASE)
    return f": JSON has no {found[1].decode()}, expected finite numbers" if found else ""
