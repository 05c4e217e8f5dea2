"""One client's connection: uvicorn's, with an end to its patience. Whatever parses its requests."""

import asyncio
import os
import socket
import struct
from typing import TYPE_CHECKING, Any

import msgspec
from offramp.runtime.online.names import new_name
from offramp.server.connections.crowd import Crowd
from offramp.server.errors import SHUTTING_DOWN
from offramp.server.request_id import HEADER, id_in
from starlette.types import Message, Receive, Scope, Send

_LINGER = 2.0  # seconds that a client which still sends gets to read its answer before the connection is cut
_LEAST_TAKEN = 64 * 2**10  # bytes of an answer that count as reading it
_TURNED_AWAY = 0.5  # the same for one that there was no place for
_RESET = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
_AHEAD = 64 * 2**10  # bytes behind the request in work that are read, to hear of its client's departure
_CLOSE = (b"connection", b"close")
_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


class Lingering:
    """A transport whose close first lets the client read: one that is cut off while it sends never sees its answer.

    It also sends the head of an answer together with what follows: a small answer is one packet and one system call.
    """

    def __init__(self, transport: asyncio.Transport, connection: "Patient") -> None:
        self._transport = transport
        self._connection = connection
        self.since: float | None = None
        self._holding, self._held = False, b""

    def hold(self) -> None:
        """Keep what is written next until something follows it, or `flush`."""
        self._holding = True

    def write(self, data: bytes) -> None:
        if self._holding:
            self._holding, self._held = False, self._held + data
            return
        held, self._held = self._held, b""
        self._transport.write(held + data if held else data)

    def flush(self) -> None:
        self._holding = False
        if self._held:
            self.write(b"")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.since is not None or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        self.flush()
        try:
            self._transport.write_eof()
        except (OSError, NotImplementedError):  # the client has just reset it
            self._transport.close()
            return
        self.since = self._connection.loop.time()
        self._connection.flow.resume_reading()  # and drop: what is left in the socket would make its end a reset

    def finish(self) -> None:
        """Close without letting the client read for long."""
        self.flush()
        self._transport.close()


class Patient:
    """A connection that waits so long for its client and no longer; in front of one of uvicorn's protocols.

    Who has parsed the head of a request says so by `head_arrived`.
    """

    if TYPE_CHECKING:  # what uvicorn's protocols have alike
        app: Any
        cycle: Any
        flow: Any
        loop: asyncio.AbstractEventLoop
        transport: Any

    def __init__(self, crowd: Crowd, **options: Any) -> None:
        super().__init__(**options)
        self._crowd = crowd
        self._serve = self.app
        self.app = self._answer
        self._heard = self.loop.time()  # when the client last sent anything
        self._head_since: float | None = self._heard  # since when the head of a request is on its way
        self._taken_at, self._left = self._heard, 0  # when the client last took a fair part of its answer, what is left
        self._ahead = 0

    # What the crowd asks.

    @property
    def at_work(self) -> Any:
        """uvicorn's record of the request that is being answered, or was last; None before the first."""
        return self.cycle

    @property
    def head_begun(self) -> bool:
        """Whether something of another request is here."""
        raise NotImplementedError

    def parse(self, data: bytes) -> None:
        """What has come, as requests."""
        super().data_received(data)  # type: ignore[misc]

    def head_arrived(self) -> None:
        """The head of a request is here whole."""
        self._head_since, self._ahead = None, 0

    @property
    def working(self) -> bool:
        cycle = self.at_work
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    @property
    def unsent(self) -> int:
        size: int = self.transport.get_write_buffer_size()
        return size

    @property
    def idle_since(self) -> float | None:
        if self.unsent:
            return self._taken_at
        return None if self.working else self._heard

    def look(self, now: float) -> None:
        limits = self._crowd.settings
        if self._lingered(now) or self._unread(now, limits.write_timeout):
            self.cut_off()
        elif self.transport.is_closing() or self.working:
            return
        elif self._head_since is not None and now - self._head_since > limits.header_timeout:
            self.refuse(408, f"the request's head didn't arrive within {limits.header_timeout:g} seconds.")
        elif self._crowd.draining:
            self.drain()
        elif self._awaits_body and now - self._heard > limits.body_timeout:
            self.refuse(408, f"nothing of the request body came for {limits.body_timeout:g} seconds.")

    def make_way(self) -> None:
        if not self.transport.is_closing() and not self.working and not self.unsent:
            self.refuse(503, SHUTTING_DOWN if self._crowd.draining else "too many connections. Try again later.")
        if self.unsent:
            self.cut_off()
        else:
            self._lingering.finish()

    def cut_off(self) -> None:
        # A reset: what the system has taken for a client that doesn't read would stay with it after the close.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def drain(self) -> None:
        if self._awaits_body and not self.transport.is_closing():
            self.refuse(503, SHUTTING_DOWN)

    def _lingered(self, now: float) -> bool:
        since = self._lingering.since
        return since is not None and now - since > _LINGER and not self.unsent

    def _unread(self, now: float, timeout: float) -> bool:
        """Whether the client takes nothing, or too little, of what waits for it."""
        left = self.unsent
        if left == 0 or self._left == 0 or left <= self._left - _LEAST_TAKEN:
            self._taken_at, self._left = now, left
        self._left = max(self._left, left)  # another answer came
        return now - self._taken_at > timeout

    @property
    def _awaits_body(self) -> bool:
        """Whether a request is here in part, and the app may still wait for the rest."""
        cycle = self.at_work
        return cycle is not None and cycle.more_body and not cycle.response_started and not self.flow.read_paused

    # What uvicorn asks.

    def connection_made(self, transport: Any) -> None:
        self._lingering = Lingering(transport, self)
        super().connection_made(self._lingering)  # type: ignore[misc]
        if not self._crowd.enter(self):
            self.refuse(503, "too many connections, each with a request in work. Try again later.", unasked=True)
            self.loop.call_later(_TURNED_AWAY, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.leave(self)
        super().connection_lost(exc)  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        self._crowd.hear(self, self._heard)
        if self.transport.is_closing():
            return  # it has its answer, and only reads
        between = self.at_work is None or self.at_work.response_complete
        if between and self._head_since is None:
            self._head_since = self._heard
        self.parse(data)
        if not between and self.flow.read_paused and self.working:
            self._ahead += len(data)
            if self._ahead <= _AHEAD:
                self.flow.resume_reading()  # or nobody would hear of a client that asked twice and left

    def eof_received(self) -> None:
        self._crowd.heard = self.loop.time()

    def pause_writing(self) -> None:
        super().pause_writing()  # type: ignore[misc]
        self._crowd.count_unsent()

    def on_response_complete(self) -> None:
        if not self.transport.is_closing() and self.at_work.more_body:
            self.transport.close()  # answered before all of it had come: the rest is nobody's
        super().on_response_complete()  # type: ignore[misc]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app, which says so where an answer is its connection's last."""

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                if self._is_last():
                    others = [header for header in message.get("headers", ()) if header[0].lower() != _CLOSE[0]]
                    message = {**message, "headers": [*others, _CLOSE]}
                self._lingering.hold()
                await send(message)
                return
            await send(message)
            self._lingering.flush()

        await self._serve(scope, receive, closing)

    def _is_last(self) -> bool:
        """Whether no other request is read from this connection: its body isn't, or the server is stopping and no
        other has come behind this one."""
        more: bool = self.at_work.more_body
        return more or (self._crowd.draining and not self.head_begun)

    def refuse(self, status: int, message: str, *, unasked: bool = False) -> None:
        """Answer in the app's stead, in its shape of error, and close.

        Who hasn't begun to ask is told nothing, unless `unasked`: it would take it for the answer to what it asks next.
        """
        cycle = self.at_work
        asked = cycle is not None and not cycle.response_complete
        began = asked or self.head_begun
        if asked:
            cycle.disconnected = True
            cycle.message_event.set()
        if (began or unasked) and not (asked and cycle.response_started):
            name = (id_in(cycle.scope) if asked else "") or new_name()
            body = msgspec.json.encode({"error": message, "request_id": name})
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (HEADER.lower().encode(), name.encode()),
                *([(b"retry-after", b"1")] if status == 503 else []),
                _CLOSE,
            ]
            lines = [b"HTTP/1.1 %d %s" % (status, _REASONS[status]), *(b"%s: %s" % header for header in headers)]
            self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()
