"""A server under hostile clients: it says that it lives, its memory is bounded, and SIGTERM ends it in time.

`pytest -m slow -s tests/integration/test_hostile.py` prints what was measured.
"""

import gzip
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

ROWS = [[[0] * 8] * 8] * 16_384
BODIES = {
    "empty members": gzip.compress(b"", mtime=0) * 1_600_000,  # 32 MiB
    "a bomb": gzip.compress(b'{"instances":[' + b" " * (31 * 2**20) + b"]}", mtime=0),
    "lists": b'{"instances":[' + b"[]," * 980_000 + b"[]]}",  # as many as may just be decoded
    "lists beyond": gzip.compress(b'{"instances":[' + b"[]," * 11_000_000 + b"[]]}", mtime=0),
    "numbers": b'{"instances":[[' + b"0.12345," * 3_200_000 + b"1]]}",
    "rows": json.dumps({"instances": ROWS}).encode(),
}
DRAIN = 5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc"),
]


class Server:
    """`offramp serve` over the bundled digits, in a process of its own."""

    def __init__(self, bundle: Path) -> None:
        command = [sys.executable, "-m", "offramp.runtime.cli", "serve", str(bundle), "--port", "0"]
        command += ["--drain-timeout", str(DRAIN)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        said = self.process.stdout.readline()
        self.port = int(re.search(r":(\d+) ", said)[1])

    def mebibytes(self, what: str) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{what}:\s+(\d+)", status)[1]) / 1024

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def post(self, body: bytes, encoding: str | None = None) -> int:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Encoding": encoding} if encoding else {}
        client.request("POST", "/v1/predict", body, headers)
        reply = client.getresponse()
        reply.read()
        client.close()
        return reply.status


@pytest.fixture
def server(digits):
    made = Server(digits)
    yield made
    made.process.kill()
    made.process.communicate()


def probe(server: Server, times: list[float], over: threading.Event) -> None:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    while not over.is_set():
        started = time.perf_counter()
        client.request("GET", "/v2/health/live")
        assert client.getresponse().read() == b'{"live":true}'
        times.append(time.perf_counter() - started)
        time.sleep(0.005)


def test_it_says_that_it_lives_within_250_ms_and_1_gib_while_hostile_bodies_are_in_work(server):
    assert server.post(json.dumps({"instances": ROWS[:1]}).encode()) == 200
    idle, times, over, statuses = server.mebibytes("VmRSS"), [], threading.Event(), []

    def send(body: bytes) -> None:
        packed = "gzip" if body.startswith(b"\x1f\x8b") else None
        statuses.extend(server.post(body, packed) for _ in range(3))

    probing = threading.Thread(target=probe, args=(server, times, over))
    senders = [threading.Thread(target=send, args=(body,)) for body in BODIES.values()]
    probing.start()
    for thread in senders:
        thread.start()
    for thread in senders:
        thread.join()
    over.set()
    probing.join()
    peak = server.mebibytes("VmHWM") - idle
    middle, most = np.quantile(times, [0.5, 1.0]) * 1e3
    print(
        f"\nlive: median {middle:.1f} ms, longest {most:.0f} ms of {len(times)}; {peak:.0f} MiB above idle; {statuses}"
    )
    assert most < 250
    assert peak < 1024
    assert set(statuses) <= {200, 400, 413, 429}
    assert 200 in statuses


def test_sigterm_ends_it_within_its_limit_whatever_its_clients_do(server):
    whole = json.dumps({"instances": ROWS}).encode()
    request = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(whole)
    clients = []
    for sends in (
        b"",
        b"POST /v1/pre",
        request,
        request + whole[: len(whole) // 2],
        request + whole,
        2 * (request + whole),
        b"\0" * 70_000,
        b"POST /v1/predict HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n{",
    ):
        for _ in range(4):
            client = server.connect()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(0.5)
            clients.append(client)
            with suppress(OSError):
                client.sendall(sends)
    server.process.send_signal(signal.SIGTERM)
    started = time.perf_counter()
    code = server.process.wait(timeout=60)
    took = time.perf_counter() - started
    print(f"\nSIGTERM to exit: {took:.1f} s of {DRAIN}; exit code {code}")
    for client in clients:
        client.close()
    assert code == 0
    assert took < DRAIN + 1
