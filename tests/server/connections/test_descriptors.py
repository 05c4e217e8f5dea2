"""More clients that don't finish their heads than the process may have descriptors: probes are answered, the log stays
small, and it ends as always."""

import re
import signal
import socket
import sys
from contextlib import suppress

import httpx
import pytest

DESCRIPTORS, CLIENTS = 160, 220
SHORT = 40  # fewer than are accepted in one turn: they run out, whatever the server does
ROW = [0.5] * 8
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2
SENT = {
    "nothing": [],
    "half a request line": [b"GET /v2/hea"],
    "a head without end, byte by byte": [bytes([letter]) for letter in b"POST / HTTP/1.1\r\nX-Long: aaaaa"],
    "lines without end": [b"GET / HTTP/1.1\r\n", *[b"X-More: 1\r\n"] * 10],
    "TLS": [TLS_HELLO],
}

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of descriptors")


@pytest.fixture
def narrow(offramp_serve, rows_bundle, request):
    """A server with few descriptors that waits long for heads, and its address. It ends well, and has said little."""
    descriptors = getattr(request, "param", DESCRIPTORS)
    options = ("--port", 0, "--threads", 1, "--header-timeout", 600, "--drain-timeout", 4)
    process = offramp_serve(rows_bundle, *options, descriptors=descriptors)
    yield process, re.search(r"http://\S+:\d+", process.stdout.readline())[0]
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 0, said
    assert len(said) < 20_000
    assert "Traceback" not in said
    assert re.search(rf"at most \d+ connections .* may open {descriptors} files", said)


@pytest.fixture
def crowd():
    """crowd(address) -> a connection that never waits; all are closed in the end."""
    made = []

    def connect(address):
        host, port = address.removeprefix("http://").split(":")
        made.append(socket.create_connection((host, int(port)), timeout=60))
        made[-1].setblocking(False)
        return made[-1]

    yield connect
    for client in made:
        client.close()


def send(client, data):
    with suppress(OSError):  # it may have had to make way
        client.send(data)


def lives(address):
    """Whether a new connection is answered; it may take some seconds: asyncio rests for one without descriptors."""
    return httpx.get(f"{address}/v2/health/live", timeout=60).json() == {"live": True}


@pytest.mark.parametrize("pieces", SENT.values(), ids=SENT)
def test_health_answers_in_between(narrow, crowd, pieces):
    _, address = narrow
    clients = []
    for k in range(CLIENTS):
        clients.append(crowd(address))
        send(clients[-1], b"".join(pieces[:1]))
        if k % 20 == 0:
            assert lives(address)
    for piece in pieces[1:]:
        for client in clients:
            send(client, piece)
    assert lives(address)
    for client in clients:
        client.close()
    assert all(lives(address) for _ in range(5))
    assert httpx.post(f"{address}/v1/predict", json={"instances": [ROW]}, timeout=60).status_code == 200


@pytest.mark.parametrize("narrow", [DESCRIPTORS, SHORT], indirect=True)
def test_all_that_come_at_once_are_survived(narrow, crowd):
    process, address = narrow
    process.send_signal(signal.SIGSTOP)
    for k in range(CLIENTS):
        send(crowd(address), b"".join(list(SENT.values())[k % len(SENT)]))
    process.send_signal(signal.SIGCONT)
    assert lives(address)
    assert httpx.post(f"{address}/v1/predict", json={"instances": [ROW]}, timeout=60).status_code == 200
