"""What goes over the pipes between a server and its decoder: messages with their length, and arrays as they are."""

from io import RawIOBase
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import Manifest
from offramp.server.protocols.reading import Asked, Fields, Limits, Raw
from offramp.server.query import Group

_LENGTH = 8
YES, NO = b"\1", b"\0"


class Setup(msgspec.Struct, frozen=True):
    """The first message. memory: bytes that the decoder may take beside what it has by itself."""

    manifest: Manifest
    limits: Limits
    memory: int


class Work(msgspec.Struct, frozen=True):
    """A body to read; its bytes follow."""

    kind: str
    encoding: str
    size: int


class Needs(msgspec.Struct, frozen=True, tag=True):
    """May the request hold so many bytes? YES or NO follows; after NO there is nothing more of this request."""

    bytes: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """What is wrong with the body. error: a class's name."""

    error: str
    message: str


class GroupOf(msgspec.Struct, frozen=True):
    """A group's arrays, (name, dtype, shape) each; the last is its positions. Their bytes follow in this order."""

    arrays: list[tuple[str, str, list[int]]]
    sizes: dict[str, int]


class Done(msgspec.Struct, frozen=True, tag=True):
    """What the body asks for; the bytes of its groups follow."""

    fields: Fields
    rows: int
    groups: list[GroupOf]
    raw: Raw | None


Reply = Needs | Refused | Done


def send(pipe: RawIOBase, message: Any) -> None:
    data = msgspec.json.encode(message)  # which has integers of any size, and MessagePack hasn't
    send_bytes(pipe, len(data).to_bytes(_LENGTH, "little") + data)


def send_bytes(pipe: RawIOBase, data: Any) -> None:
    """All of it; raises OSError if nobody reads any more."""
    with memoryview(data) as view:
        sent = 0
        while sent < len(view):
            with view[sent:] as rest:
                sent += pipe.write(rest) or 0


def receive(pipe: RawIOBase, kind: Any) -> Any:
    """A message of a type. Raises EOFError if the other side has ended."""
    length = bytearray(_LENGTH)
    fill(pipe, length)
    data = bytearray(int.from_bytes(length, "little"))
    fill(pipe, data)
    return msgspec.json.Decoder(kind).decode(data)


def fill(pipe: RawIOBase, data: bytearray | memoryview) -> None:
    """Raises EOFError if there is less than that."""
    with memoryview(data) as view:
        there = 0
        while there < len(view):
            with view[there:] as rest:
                more = pipe.readinto(rest)
            if not more:
                raise EOFError
            there += more


def send_asked(pipe: RawIOBase, asked: Asked) -> None:
    groups: list[GroupOf] = []
    arrays: list[NDArray[Any]] = []
    for group in asked.groups:
        named = {**group.arrays, "": group.positions}
        groups.append(GroupOf([(n, a.dtype.str, list(a.shape)) for n, a in named.items()], dict(group.sizes)))
        arrays += named.values()
    send(pipe, Done(asked.fields, asked.rows, groups, asked.raw))
    for array in arrays:
        send_bytes(pipe, _bytes(np.ascontiguousarray(array)))


def receive_asked(pipe: RawIOBase, done: Done) -> Asked:
    """The arrays are read where they stay, without Python's lock."""
    groups = []
    for group in done.groups:
        arrays = {name: np.empty(shape, dtype) for name, dtype, shape in group.arrays}
        for array in arrays.values():
            fill(pipe, _bytes(array))
        positions = arrays.pop("")
        groups.append(Group(arrays, group.sizes, positions))
    return Asked(done.fields, done.rows, tuple(groups), done.raw)


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
