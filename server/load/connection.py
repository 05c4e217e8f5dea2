"""One connection of a client: non-blocking, kept, with as little done for each answer as HTTP allows.

Python's own HTTP client takes as long for a request as a server does, and a client that is busy measures itself.
"""

import errno
import selectors
import socket
from typing import Any

HUNG_UP, REFUSED, MALFORMED = "hung up", "refused", "not HTTP"
TIMED_OUT, UNANSWERED = "timed out", "unanswered"
_PIECE = 1 << 18
_UNDER_WAY = {errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN, errno.EALREADY, 0}
_NO_WAY = {errno.ECONNREFUSED, errno.EMFILE, errno.ENETUNREACH, errno.EHOSTUNREACH}
Address = tuple[int, Any]
"""A socket's family and where it connects to."""


def resolve(host: str, port: int) -> Address:
    """Where to connect, looked up once. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, address


def _failed(error: OSError) -> str:
    return REFUSED if error.errno in _NO_WAY else HUNG_UP


class Connection:
    """Sends one request at a time. `handle` is called with what the selector saw, until it tells an outcome.

    begun: when its request was due, in the caller's clock. number: which one it is, the caller's to say. busy: whether
    an answer is outstanding.
    """

    __slots__ = (
        *("_address", "_answer", "_close", "_mask", "_need", "_rest", "_selector", "_sock"),
        *("begun", "busy", "number"),
    )

    def __init__(self, selector: selectors.BaseSelector, address: Address) -> None:
        self._selector, self._address = selector, address
        self._sock: socket.socket | None = None
        self._rest: bytes | memoryview = b""
        self._answer = b""
        self._need = self._mask = 0
        self._close = self.busy = False
        self.begun, self.number = 0.0, 0

    def send(self, request: bytes, begun: float) -> str | None:
        """Send it, or as much as goes at once. Returns an outcome only if it has failed already."""
        self.begun, self.busy = begun, True
        self._answer, self._need = b"", 0
        try:
            if self._sock is None:
                self._connect()
                self._rest = request
                self._watch(selectors.EVENT_READ | selectors.EVENT_WRITE)
                return None
            sent = self._sock.send(request)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.close()
            return _failed(error)
        if sent < len(request):
            self._rest = memoryview(request)[sent:]
            self._watch(selectors.EVENT_READ | selectors.EVENT_WRITE)
        return None

    def handle(self, mask: int) -> str | None:
        """Go on with what can be done now. Returns the status once the answer is here whole, or what went wrong."""
        sock = self._sock
        if sock is None:
            return None
        try:
            if mask & selectors.EVENT_WRITE:
                if self._rest:
                    self._rest = memoryview(self._rest)[sock.send(self._rest) :]
                if not self._rest:
                    self._watch(selectors.EVENT_READ)
            if not mask & selectors.EVENT_READ:
                return None
            piece = sock.recv(_PIECE)
        except BlockingIOError:
            return None
        except OSError as error:
            asked = self.busy
            self.close()
            return _failed(error) if asked else None
        if not self.busy:  # the server has no more use for it
            self.close()
            return None
        if not piece:
            return self._ended()
        answer = self._answer = self._answer + piece if self._answer else piece
        if not self._need and not self._head(answer):
            return MALFORMED if self._sock is None else None
        if self._need < 0:  # chunked: its end is looked for
            if not answer.endswith(b"0\r\n\r\n"):
                return None
        elif len(answer) < self._need:
            return None
        return self._done()

    def _head(self, answer: bytes) -> bool:
        """Whether the head is here: then how many bytes there will be in all is known."""
        end = answer.find(b"\r\n\r\n")
        if end < 0:
            if not answer.startswith(b"HTTP/1."[: len(answer)]) or len(answer) > _PIECE:
                self.close()
            return False
        head = answer[:end].lower()
        length = head.find(b"\r\ncontent-length:")
        if length >= 0:
            stop = head.find(b"\r\n", length + 2)
            value = head[length + 17 : stop if stop >= 0 else None].strip()
            if not value.isdigit():
                self.close()
                return False
            self._need = end + 4 + int(value)
        else:
            self._need = -1 if b"\r\ntransfer-encoding: chunked" in head else 1 << 62
        self._close = b"\r\nconnection: close" in head or head.startswith(b"http/1.0")
        return True

    def _done(self) -> str:
        status = self._answer[9:12].decode("latin-1")
        self.busy = False
        if self._close:
            self.close()
        return status

    def _ended(self) -> str:
        """The server has closed it: the end of an answer without a length, else a failure."""
        whole = self._need == 1 << 62
        outcome = self._done() if whole else HUNG_UP
        self.close()
        return outcome

    def _connect(self) -> None:
        family, address = self._address
        self._sock = sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(address)
        if code not in _UNDER_WAY:
            raise OSError(code, "can't connect")

    def _watch(self, mask: int) -> None:
        if mask == self._mask or self._sock is None:
            return
        if self._mask:
            self._selector.modify(self._sock, mask, self)
        else:
            self._selector.register(self._sock, mask, self)
        self._mask = mask

    def close(self) -> None:
        """Hang up; the next request connects anew."""
        if self._sock is not None:
            if self._mask:
                self._selector.unregister(self._sock)
            self._sock.close()
        self._sock, self._mask, self._rest = None, 0, b""
        self._answer, self._need, self._close, self.busy = b"", 0, False, False
