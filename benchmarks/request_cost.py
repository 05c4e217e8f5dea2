"""CPU of a small /v1/predict request, against a bare FastAPI route over the same model and the same parts of uvicorn.

    python benchmarks/request_cost.py
    python benchmarks/request_cost.py --rounds 15 --requests 4000

Two servers over the bundled digits, one thread a block, take turns: `offramp serve` at the point `full`, and a route
that awaits the request's JSON, makes an array of it, runs a plain session of the whole network and answers in JSON.
Eight clients keep a connection each and ask for one row at a time. CPU is the server process's own, user and system.
"""

import argparse
import itertools
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from harness import save, table
from offramp.runtime import Cascade, sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.jobs.benching.plain import plain_sessions

CONNECTIONS = 8
_NAME = re.compile(rb"x-request-id: (\S+)", re.IGNORECASE)
ROW = [[0] * 8] * 8
BODY = b'{"instances":[' + str(ROW).encode() + b"]}"


def bare(port: int) -> None:
    """The route that one would write without offramp."""
    import uvicorn
    from fastapi import FastAPI, Request

    session = plain_session()
    app = FastAPI()

    @app.post("/v1/predict")
    async def predict(request: Request) -> Any:
        rows = np.asarray((await request.json())["instances"], np.uint8)
        label, score = session(rows)
        return {"predictions": [{"label": k, "score": s} for k, s in zip(label.tolist(), score.tolist(), strict=True)]}

    uvicorn.run(app, port=port, log_level="error", access_log=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(command: list[str], port: int) -> Iterator[int]:
    """A server's process id, once it answers."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield process.pid
    finally:
        process.kill()
        process.wait()


class Clients:
    """Connections that each ask again as soon as they are answered. bodies: of requests, one after the other."""

    def __init__(self, port: int, bodies: Sequence[bytes] = (BODY,), connections: int = CONNECTIONS) -> None:
        head = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        self._requests = itertools.cycle(enumerate(head % len(body) + body for body in bodies))
        self._asked: dict[int, tuple[float, int]] = {}
        self.took: list[float] = []
        """Seconds of each answer of the last `ask`."""
        self.names: list[tuple[str, int]] = []
        """The requests' names there, and the numbers of their bodies."""
        self._selector = selectors.DefaultSelector()
        for _ in range(connections):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ, bytearray())

    def ask(self, requests: int) -> float:
        """Seconds for so many answers."""
        begun, self.took, self.names = time.perf_counter(), [], []
        for key in self._selector.get_map().values():
            self._send(key)
        sent, answered = len(self._selector.get_map()), 0
        while answered < requests:
            for key, _ in self._selector.select():
                got = key.data
                got += key.fileobj.recv(65536)  # type: ignore[union-attr]
                if not whole(got):
                    continue
                asked, number = self._asked[key.fd]
                self.took.append(time.perf_counter() - asked)
                found = _NAME.search(got)
                self.names.append((found[1].decode() if found else "", number))
                got.clear()
                answered += 1
                if sent < requests:
                    self._send(key)
                    sent += 1
        return time.perf_counter() - begun

    def _send(self, key: selectors.SelectorKey) -> None:
        number, request = next(self._requests)
        self._asked[key.fd] = time.perf_counter(), number
        key.fileobj.sendall(request)  # type: ignore[union-attr]


def whole(got: bytearray) -> bool:
    head, blank, body = got.partition(b"\r\n\r\n")
    if not blank:
        return False
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(bytes(got).decode())
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return length is not None and len(body) >= int(length[1])


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def plain_session() -> Callable[[np.ndarray], Any]:
    """The whole network in one session, on one thread: label and score."""
    runs, _ = plain_sessions(read_bundle(sample.BUNDLE), 1)
    run = runs["no spinning"]
    return lambda rows: run({"x": rows})


def inference() -> dict[str, float]:
    """Microseconds of CPU that the model alone takes for a row: a plain session, and a cascade at `full`."""
    row, plain = np.zeros((1, 8, 8), np.uint8), plain_session()
    with Cascade.load(sample.BUNDLE, threads=1) as cascade:
        return {"bare route": timed(lambda: plain(row)), "offramp": timed(lambda: cascade.predict({"x": row}).label)}


def timed(work: Callable[[], object], calls: int = 3000) -> float:
    for _ in range(100):
        work()
    begun = time.process_time()
    for _ in range(calls):
        work()
    return (time.process_time() - begun) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=3000, help="a round and server")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>/request_cost.json")
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        bare(options.bare)
        return
    alone = inference()
    with ExitStack() as stack:
        servers = {}
        for name in ("bare route", "offramp"):
            port = free_port()
            own = [sys.executable, __file__, "--bare", str(port)]
            ours = [sys.executable, "-m", "offramp.runtime.cli", "serve", str(sample.BUNDLE), "--port", str(port)]
            pid = stack.enter_context(started(own if name == "bare route" else [*ours, "--threads", "1"], port))
            servers[name] = pid, Clients(port)
        for _, clients in servers.values():
            clients.ask(500)
        cpu: dict[str, list[float]] = {name: [] for name in servers}
        rate: dict[str, list[float]] = {name: [] for name in servers}
        for k in range(options.rounds):
            for name in sorted(servers, reverse=bool(k % 2)):
                pid, clients = servers[name]
                before = cpu_seconds(pid)
                seconds = clients.ask(options.requests)
                cpu[name].append((cpu_seconds(pid) - before) / options.requests * 1e6)
                rate[name].append(options.requests / seconds)
    base, here = np.array(cpu["bare route"]), np.array(cpu["offramp"])
    beyond = (here - alone["offramp"]) / (base - alone["bare route"])
    lines = [("", "CPU a request, us", "of it the model", "beyond it", "requests a second")]
    for name in servers:
        middle = float(np.median(cpu[name]))
        lines.append(
            (
                name,
                f"{middle:.0f}",
                f"{alone[name]:.0f}",
                f"{middle - alone[name]:.0f}",
                f"{np.median(rate[name]):.0f}",
            )
        )
    print(table(lines))
    ratios = {"all": float(np.median(here / base)), "beyond the model": float(np.median(beyond))}
    print("offramp / bare route, median of rounds: " + ", ".join(f"{k} {v:.2f}" for k, v in ratios.items()))
    if options.save:
        print(save("request_cost", {"cpu_us": cpu, "model_us": alone, "per_second": rate, "ratios": ratios}))


if __name__ == "__main__":
    main()
