"""Raw sockets: what a well-behaved client library wouldn't do."""

import json
import socket

import pytest
from offramp.server.connections import draining
from offramp.server.connections.h11_connection import H11Connection


class Raw:
    """A client that sends what it likes."""

    def __init__(self, address: str, *, small_buffer: bool = False) -> None:
        host, port = address.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if small_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(60)
        self.socket.connect((host, int(port)))

    def send(self, data: bytes) -> "Raw":
        self.socket.sendall(data)
        return self

    def alive(self) -> bool:
        """Reads the answer of /v2/health/live, whose head and body may come apart."""
        got = b""
        while not got.endswith(b"}") and (received := self.socket.recv(4096)):
            got += received
        return got.startswith(b"HTTP/1.1 200") and got.endswith(b'{"live":true}')

    def rest(self) -> bytes:
        """All that comes until the server closes; raises ConnectionResetError if it cuts the connection off."""
        got = b""
        while received := self.socket.recv(65536):
            got += received
        return got

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def raw():
    made = []

    def connect(address, **options):
        made.append(Raw(address, **options))
        return made[-1]

    yield connect
    for client in made:
        client.close()


def request(rows, path="/v1/predict", headers=""):
    body = json.dumps({"instances": rows}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.fixture(scope="session")
def post():
    return request


# All of it with the parser that is there for those who lack the other takes minutes; what is parsed is tried with both.
@pytest.fixture(params=["httptools", pytest.param("h11", marks=pytest.mark.slow)], autouse=True)
def parser(request, monkeypatch):
    """Servers of this process read requests by each; those of their own by the one that they choose."""
    kind = {"h11": H11Connection}.get(request.param) or pytest.importorskip(
        "offramp.server.connections.httptools_connection"
    ).HttpToolsConnection
    monkeypatch.setattr(draining, "connection", lambda: kind)
    return request.param
