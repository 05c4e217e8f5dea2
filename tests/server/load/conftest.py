"""Servers that aren't offramp's: each connection has a thread that answers as a test says."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass
class Stub:
    address: tuple[int, tuple[str, int]]
    asked: list[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.address[1][1]}"


def read_request(connection: socket.socket) -> bytes:
    """Empty once the client has hung up."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return b""
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
    )
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def stub(answer: Callable[[bytes], bytes | list[bytes] | None]) -> Iterator[Stub]:
    """answer: of a request: bytes, pieces of them, or None to hang up."""
    asked: list[bytes] = []

    def talk(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while request := read_request(connection):
                asked.append(request)
                said = answer(request)
                if said is None:
                    return
                for piece in [said] if isinstance(said, bytes) else said:
                    connection.sendall(piece)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield Stub((socket.AF_INET, listener.getsockname()), asked)
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.fixture
def answering() -> Callable[..., object]:
    """`with answering(lambda request: OK) as server:`"""
    return stub
