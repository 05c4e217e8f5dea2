"""Bodies that come packed, unpacked up to a limit."""

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from offramp.runtime.errors import InputError
from offramp.server.errors import TooLarge
from offramp.server.patience import Patience
from offramp.server.protocols.json_body import Body, Holds

ENCODINGS = {"gzip": (31,), "x-gzip": (31,), "deflate": (15, -15)}
"""What zlib calls them. "deflate" is zlib, but some send it raw."""

# Packed bodies are unpacked in pieces of this many bytes, and may have so many members: block gzip makes one of each
# 64 KiB, and an empty one takes 20 bytes.
_PIECE, _MEMBERS = 16 * 2**10, 4096
_MADE_AT_ONCE = 4 * 2**20  # a thousandfold packed piece makes 16 MiB


def unpacked(body: Body, limit: int) -> Body:
    """The body without its encoding. Raises TooLarge past `limit` bytes, InputError if it is broken."""
    if body.encoding not in ENCODINGS or not body.size:
        return body
    made = unpack(body.whole(), body.encoding, limit, body.held, body.patience)
    return replace(body, pieces=[made], encoding="identity")


def too_large(limit: int) -> TooLarge:
    """What a body of more than `limit` bytes is told."""
    return TooLarge(f"the request body is larger than {limit} bytes. Send fewer rows at a time.")


def unpack(
    packed: bytes | bytearray, encoding: str, limit: int, held: Holds | None = None, patience: Patience | None = None
) -> bytearray:
    """A gzip or deflate body, unpacked; never more than a little over `limit` bytes are made.

    patience: looked at after each piece. held: counts what is made, beside what is packed.
    """
    error: zlib.error | None = None
    for bits in ENCODINGS[encoding]:
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
                raise too_large(limit)
            yield part
            rest = member.unconsumed_tail
            if member.eof:
                rest, member = member.unused_data, None
    if member is not None:
        raise zlib.error("it ends too early")
