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

    def __init__(self, bundle: Path, *options: object) -> None:
        command = [sys.executable, "-m", "offramp.runtime.cli", "serve", str(bundle), "--port", "0"]
        command += ["--drain-timeout", str(DRAIN), *map(str, options)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        said = self.process.stdout.readline()
        self.port = int(re.search(r":(\d+) ", said)[1])

    def mebibytes(self) -> float:
        """What it and its decoders take now."""
        return sum(memory_of(process) for process in (self.process.pid, *decoders_of(self.process.pid)))

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


def decoders_of(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has just ended
            if f"PPid:\t{pid}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found


def memory_of(pid: int) -> float:
    """MiB that a process takes and shares with no other."""
    with suppress(OSError, TypeError):
        status = Path(f"/proc/{pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024
    return 0.0


@pytest.fixture
def server(digits):
    made = Server(digits)
    yield made
    made.process.kill()
    made.process.communicate()


@pytest.fixture
def roomy(digits):
    """It takes bodies of 50 MB."""
    limits = {"max-body-bytes": 2**26, "max-decoded-bytes": 2**29, "max-bytes-in-flight": 2**31}
    made = Server(digits, *(argument for name, value in limits.items() for argument in (f"--{name}", value)))
    yield made
    made.process.kill()
    made.process.communicate()


class Watch:
    """Asks whether a server lives, again and again, and looks at its memory."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._ask, self._look)]
        self.times: list[float] = []
        self.idle = server.mebibytes()
        self.peak = self.idle

    def _ask(self) -> None:
        client = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        while not self._over.is_set():
            started = time.perf_counter()
            client.request("GET", "/v2/health/live")
            assert client.getresponse().read() == b'{"live":true}'
            self.times.append((time.perf_counter() - started) * 1e3)
            time.sleep(0.005)

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self.peak = max(self.peak, self._server.mebibytes())

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def __str__(self) -> str:
        middle, late, most = np.quantile(self.times, [0.5, 0.99, 1.0])
        return (
            f"live: median {middle:.1f} ms, p99 {late:.0f} ms, longest {most:.0f} ms of {len(self.times)}; "
            f"{self.peak - self.idle:.0f} MiB above idle"
        )


def at_once(*works) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_it_says_that_it_lives_within_250_ms_and_1_gib_while_hostile_bodies_are_in_work(server):
    assert server.post(json.dumps({"instances": ROWS[:1]}).encode()) == 200
    statuses = []

    def sender(body: bytes):
        packed = "gzip" if body.startswith(b"\x1f\x8b") else None
        return lambda: statuses.extend(server.post(body, packed) for _ in range(3))

    with Watch(server) as watch:
        at_once(*map(sender, BODIES.values()))
    print(f"\n{watch}; {statuses}")
    assert max(watch.times) < 250
    assert watch.peak - watch.idle < 1024
    assert set(statuses) <= {200, 400, 413, 429}
    assert 200 in statuses


@pytest.mark.parametrize(
    ("body", "many", "status"),
    [
        (b'{"instances":[[' + b"0.12345," * 6_250_000 + b"1]]}", 3, 400),
        (json.dumps({"instances": [[list(range(8))] * 8] * 10_000}).encode(), 1, 200),
    ],
    ids=["50 MB", "10,000 rows"],
)
def test_it_says_that_it_lives_within_100_ms_at_p99_while_large_bodies_are_in_work(roomy, body, many, status):
    """As many as there are decoders, and one."""
    assert roomy.post(json.dumps({"instances": ROWS[:1]}).encode()) == 200
    statuses = []
    with Watch(roomy) as watch:
        at_once(*many * [lambda: statuses.extend(roomy.post(body) for _ in range(3))])
    print(f"\n{watch}; {len(body) / 1e6:.0f} MB; {statuses}")
    assert np.quantile(watch.times, 0.99) < 100
    assert set(statuses) == {status}


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
