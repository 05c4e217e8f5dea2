"""A connection whose requests are parsed by httptools, in a tenth of h11's time, where that is installed."""

from typing import Any

import httptools
from offramp.server.connections.connection import Patient
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Requests may lie behind each other: of what isn't known to be a body so much is parsed at a time, since a request of
# twenty bytes takes kilobytes once it is parsed, and no more while one waits behind another.
_AT_ONCE = 2**10
_LARGEST_HEAD = 64 * 2**10  # bytes in a row that bring a request no further, as h11 has it
_INVALID = 400, "the request isn't valid HTTP."
_TOO_LARGE = 431, f"the request's head is larger than {_LARGEST_HEAD:,} bytes, the most that is read of one."


class HttpToolsConnection(Patient, HttpToolsProtocol):
    """A request that waits behind another is parsed already; `at_work` is the one in front."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._rest = bytearray()  # not parsed yet
        self._front: Any = None
        self._begun = False  # a head that isn't here whole
        self._expected = 0  # bytes of a body whose length is known
        self._idle_bytes = 0
        self._fault: tuple[int, str] | None = None
        self._feeding = False

    @property
    def at_work(self) -> Any:
        return self._front

    @property
    def head_begun(self) -> bool:
        return self._begun or bool(self.pipeline) or bool(self._rest)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._front = cycle
        super()._start_asgi_task(cycle, app)

    def parse(self, data: bytes) -> None:
        """Requests as they come, one behind the other, until one waits for its turn."""
        self._unset_keepalive_if_required()
        self._rest += data
        if not self._feeding:
            self._feeding = True
            try:
                self._feed()
            finally:
                self._feeding = False

    def _feed(self) -> None:
        while self._rest and not self.pipeline and self._fault is None and not self.transport.is_closing():
            size = self._expected or _AT_ONCE
            piece = bytes(self._rest[:size])
            del self._rest[:size]
            self._idle_bytes += len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade:
                self.cycle.keep_alive = False  # answered as if it hadn't asked for it, and what follows is nobody's
                self._rest.clear()
            except httptools.HttpParserError:
                self._break(_INVALID)
            else:
                if self._idle_bytes > _LARGEST_HEAD:
                    self._break(_TOO_LARGE if self._begun else _INVALID)

    def _break(self, fault: tuple[int, str]) -> None:
        """What came is no request that can be read. One in front of it is answered first."""
        self._fault = fault
        self._rest.clear()
        if not self.working:
            self.refuse(*fault, unasked=True)

    def on_message_begin(self) -> None:
        self._begun = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._begun:  # a trailer comes behind the body and isn't looked at
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._begun, self._idle_bytes = False, 0
        lengths = [value for name, value in self.headers if name == b"content-length"]
        self._expected = int(lengths[0]) if lengths else 0
        super().on_headers_complete()
        self.head_arrived()

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        self._expected = max(0, self._expected - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._expected = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._fault is not None and not self.pipeline:
            if not self.transport.is_closing():
                self.refuse(*self._fault, unasked=True)
        elif self._rest and self.parser is not None:
            self.parse(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._front is not None:
            self._front.disconnected = True
            self._front.message_event.set()
        super().connection_lost(exc)
