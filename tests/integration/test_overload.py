"""A server asked for twice what it carries, by clients of whom many hang up or send garbage.

Whoever stays is answered, with his own rows' answers, or told why not; memory doesn't grow, and what is accepted
waits no longer than the queue's limit makes it. `pytest -m slow -s tests/integration/test_overload.py` prints what was
measured, for a minute and for ten.
"""

import http.client
import io
import json
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from offramp.runtime import Cascade, sample
from offramp.server.scheduling.scheduler import HEAD_START

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")

QUEUED = 128
CLIENTS = 192
POINTS = ("full", "fast")
LEAVE, GARBAGE = 0.3, 0.2  # of all requests
NEAR = 0.02  # of a threshold: rows filled up beside longer ones have other last digits, and may leave elsewhere


class Known:
    """Sentences, and the label and exit of each at both points."""

    def __init__(self, bundle: Path) -> None:
        texts = [text for text, _ in sample.sentences()[0]][:600]
        self.texts, self.answers = [], {name: [] for name in POINTS}
        with Cascade.load(bundle, threads=2) as cascade:
            thresholds = np.array([cascade.operating_points[name].thresholds for name in POINTS])
            for positions, inputs in cascade.preprocess_by_length(texts):
                scores = cascade.record(inputs).score
                far = (np.abs(scores[None] - thresholds[:, :, None]) > NEAR).all(axis=(0, 1))
                found = {name: cascade.at(name).predict(inputs) for name in POINTS}
                for k in np.flatnonzero(far).tolist():
                    self.texts.append(texts[positions[k]])
                    for name, out in found.items():
                        self.answers[name].append((int(out.label[k]), int(out.exit[k])))


class Server:
    """`offramp serve` with a small queue, in a process of its own."""

    def __init__(self, bundle: Path) -> None:
        command = [sys.executable, "-m", "offramp.runtime.cli", "serve", str(bundle), "--port", "0"]
        command += ["--max-queued-rows", str(QUEUED)]
        # A pipe that nobody reads would stop it.
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        self.port = int(re.search(r":(\d+) ", self.process.stdout.readline())[1])

    def mebibytes(self) -> float:
        """What it takes and shares with no other process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024

    def send(self, data: bytes) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        client.sendall(data)
        return client

    def mean_ms(self, name: str) -> float:
        """Of all observations of a histogram of its own."""
        text = self.get("/metrics")
        total, count = (
            sum(
                float(found)
                for found in re.findall(rf"^offramp_{name}_seconds_{what}\{{.*\}} (\S+)$", text, re.MULTILINE)
            )
            for what in ("sum", "count")
        )
        return total / count * 1e3

    def get(self, path: str) -> str:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        client.request("GET", path)
        text = client.getresponse().read().decode()
        client.close()
        return text


def post(body: bytes, name: str) -> bytes:
    head = f"POST /v1/predict HTTP/1.1\r\nHost: x\r\nX-Request-ID: {name}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


class _Whole:
    """What http.client reads an answer from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._data)


def read(client: socket.socket) -> tuple[int, http.client.HTTPMessage, bytes] | None:
    """Status, headers and body; None if the server hung up without a word."""
    parts = []
    while part := client.recv(1 << 16):
        parts.append(part)
    if not parts:
        return None
    answer = http.client.HTTPResponse(_Whole(b"".join(parts)))
    answer.begin()
    return answer.status, answer.headers, answer.read()


class Crowd:
    """Clients that ask when it is their time, whatever became of those before them."""

    def __init__(self, server: Server, known: Known) -> None:
        self._server, self._known = server, known
        self._lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self.latencies: list[float] = []
        self.rows = 0
        self.wrong: list[str] = []
        self.late = 0.0

    def ask(self, seconds: float, rate: float | None, *, rude: bool, seed: int = 0) -> None:
        """rate: requests a second; None for as many as are answered. rude: whether some leave or send garbage."""
        began, self._due = time.monotonic(), 0.0
        rng = random.Random(seed)

        def work(number: int) -> None:
            own = random.Random(f"{seed} {number}")
            count = 0
            while True:
                with self._lock:
                    if rate is not None:
                        self._due += rng.expovariate(rate)
                    due = self._due
                if due >= seconds or time.monotonic() >= began + seconds + 30:
                    return
                if rate is None and time.monotonic() >= began + seconds:
                    return
                behind = time.monotonic() - began - due
                if rate is not None and behind < 0:
                    time.sleep(-behind)
                elif rate is not None:
                    self.late = max(self.late, behind)
                count += 1
                try:
                    self._one(own, f"{number}-{count}", rude)
                except Exception as error:
                    self.wrong.append(f"{number}-{count}: {error!r}")

        threads = [threading.Thread(target=work, args=(k,)) for k in range(CLIENTS if rate else 16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.seconds = time.monotonic() - began

    def _one(self, rng: random.Random, name: str, rude: bool) -> None:
        kind = rng.random() if rude else 1.0
        if kind < GARBAGE:
            self._garbage(rng, name)
            return
        rows = [rng.randrange(len(self._known.texts)) for _ in range(rng.choice((1, 1, 2, 4, 8)))]
        point = rng.choice(POINTS)
        asked = {"instances": [self._known.texts[k] for k in rows], "operating_point": point}
        asked["priority"] = rng.choice((4, 5, 5, 6))
        data = post(json.dumps(asked).encode(), name)
        began = time.monotonic()
        if kind < GARBAGE + LEAVE:
            with (
                suppress(ConnectionError),
                self._server.send(data[: rng.choice((len(data), len(data), len(data) // 2))]),
            ):
                time.sleep(rng.random() * 0.1)
            with self._lock:
                self.outcomes["left"] += 1
            return
        with self._server.send(data) as client:
            answer = read(client)
        assert answer is not None, "hung up without a word"
        status, headers, body = answer
        assert headers["X-Request-ID"] == name, headers
        found = json.loads(body)
        with self._lock:
            self.outcomes[str(status)] += 1
            if status == 200:
                self.latencies.append(time.monotonic() - began)
                self.rows += len(rows)
        if status == 200:
            got = [(one["label"], one["exit"]) for one in found["predictions"]]
            expected = [self._known.answers[point][k] for k in rows]
            assert got == expected, f"at {point} {got}, expected {expected}"
        else:
            assert status == 429, found
            assert found["error"]
            assert int(headers["Retry-After"]) >= 0

    def _garbage(self, rng: random.Random, name: str) -> None:
        noise = rng.randbytes(rng.randrange(1, 2000))
        bodies = (
            noise,
            b'{"instances": [' + b"[" * rng.randrange(1, 3000),
            b'{"instances": [{"text": 5}]}',
            b'{"instances": ["one"], "operating_point": "other"}',
        )
        posted = rng.random() < 0.7
        data = post(rng.choice(bodies), name) if posted else noise + b"\r\n\r\n"
        answer = None
        with suppress(ConnectionError), self._server.send(data) as client:
            answer = read(client)
        with self._lock:
            self.outcomes["garbage" if answer is None else f"garbage {answer[0]}"] += 1
        if posted:
            assert answer is not None, "hung up without a word"
            assert answer[0] in (400, 429), answer
            assert json.loads(answer[2])["error"]
        else:
            assert answer is None or answer[0] == 400, answer


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return sample.intents(tmp_path_factory.mktemp("overload") / "intents")


@pytest.mark.parametrize(
    "seconds",
    [20, pytest.param(60, marks=pytest.mark.slow), pytest.param(600, marks=pytest.mark.slow)],
)
def test_twice_what_it_carries_is_answered_or_refused_and_nothing_grows(bundle, seconds):
    known = Known(bundle)
    server = Server(bundle)
    try:
        calm = Crowd(server, known)
        calm.ask(4, None, rude=False)
        assert not calm.wrong, calm.wrong[:5]
        carried = calm.outcomes["200"] / calm.seconds
        memory: list[tuple[float, float]] = []
        over = threading.Event()

        def look() -> None:
            while not over.wait(0.1):
                memory.append((time.monotonic(), server.mebibytes()))

        watch = threading.Thread(target=look)
        watch.start()
        # Garbage costs next to nothing, so it comes on top.
        rate = 2 * carried / (1 - GARBAGE)
        warming = Crowd(server, known)  # a full queue's memory is allocated once, and late on a machine that is shared
        warming.ask(8, rate, rude=True)
        assert not warming.wrong, warming.wrong[:5]
        memory.clear()
        began = time.monotonic()
        crowd = Crowd(server, known)
        crowd.ask(seconds, rate, rude=True)
        over.set()
        watch.join()
        times, taken = np.array(memory).T
        third, times = crowd.seconds / 3, times - began
        warm, last = (float(taken[(times >= k * third) & (times < (k + 1) * third)].max()) for k in (1, 2))
        p99 = float(np.quantile(crowd.latencies, 0.99))
        drained = QUEUED / (crowd.rows / crowd.seconds)  # seconds for a full queue, of rows that were waited for
        print(
            f"\n{seconds} s at twice {carried:.0f} requests/s: {dict(sorted(crowd.outcomes.items()))}, "
            f"{crowd.rows / crowd.seconds:.0f} rows/s answered\n"
            f"accepted p50 {np.median(crowd.latencies) * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms; in the server "
            f"{server.mean_ms('request_duration'):.0f} ms in the mean, {server.mean_ms('queue_duration'):.0f} ms of it "
            f"before the first batch; a full queue is {drained * 1e3:.0f} ms\n"
            f"memory {warm:.0f} MiB, later {last:.0f} ({last / warm - 1:+.1%}); clients {crowd.late:.1f} s late at most"
        )
        assert not crowd.wrong, crowd.wrong[:5]
        assert crowd.outcomes["200"] > 0
        assert crowd.outcomes["429"] > 0
        assert last <= 1.05 * warm
        # The queue's time, the levels of priority that go before, and as much again for what isn't the queue: batches
        # that are under way, the event loop, a client that shares the cores.
        assert p99 < 2 * (drained + 2 * HEAD_START) + 1
        assert re.search(r"offramp_queue_rows\{.*\} 0\.0", server.get("/metrics"))
        calm = Crowd(server, known)
        calm.ask(1, None, rude=False)
        assert not calm.wrong, calm.wrong[:5]
        assert set(calm.outcomes) == {"200"}
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
        server.errors.seek(0)
        assert set(server.errors) <= {"WARNING:  Invalid HTTP request received.\n"}
    finally:
        server.process.kill()
        server.process.communicate()
        server.errors.close()
