"""What a request costs beyond the engine: HTTP, decoding, encoding, and the ways between threads."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from offramp.runtime.arrays import Floats
from offramp.server.load.clients import clients
from offramp.server.load.connection import resolve
from offramp.server.load.requests import PREDICT, bodies, post, read_rows
from offramp.server.load.serving import served
from offramp.server.load.target import target

_SECONDS = 1.2
COMPANY = 4  # connections from whose throughput it is seen how much tasks disturb each other
_PAUSES = (0.003, 0.01, 0.04)  # seconds


@dataclass(frozen=True)
class RequestCost:
    """Seconds a request beside its batch.

    pauses: that nobody worked before it came, rising from 0. beside: for each of them, quantiles of what a lone request
    took beside its batch; after a pause caches and cores are cold, which costs a small model as much again. work: the
    share of it in which the server's event loop works; nobody works in the rest. client: work of a client on the same
    machine, which competes with the server there. disturbance: as `Processors` has it.
    """

    pauses: tuple[float, ...] = (0.0,)
    beside: tuple[Floats, ...] = field(default_factory=lambda: (np.zeros(1),))
    work: float = 1.0
    client: float = 0.0
    disturbance: float = 0.0

    @classmethod
    def of(cls, seconds: float, client: float = 0.0) -> "RequestCost":
        """Always the same, all of it work."""
        return cls(beside=(np.array([seconds]),), client=client)

    @property
    def typical(self) -> float:
        """The median where there is no pause."""
        return float(np.median(self.beside[0]))

    def drawn(self, pause: float, number: float) -> float:
        """What one request takes. number: from 0 to 1, by chance."""
        quantile = int(number * len(self.beside[0]))
        k = len(self.pauses) - 1
        while k and self.pauses[k] > pause:
            k -= 1
        taken = float(self.beside[k][quantile])
        if pause and k + 1 < len(self.pauses):
            share = (pause - self.pauses[k]) / (self.pauses[k + 1] - self.pauses[k])
            taken += share * (float(self.beside[k + 1][quantile]) - taken)
        return taken


@dataclass(frozen=True)
class Lone:
    """Requests that came one after the other, each so many seconds after the last answer: latencies, of their clients'
    view. cpu: seconds a request that the server's process took, NaN where the system doesn't tell; client: its
    client's."""

    pause: float
    latencies: Floats
    cpu: float
    client: float


def lone_requests(
    bundle: str | Path, data: str | Path, point: str, options: Sequence[str], *, rows: int, seed: int
) -> tuple[list[Lone], float]:
    """Serve the bundle and ask it one request at a time, without pauses and with several, for some seconds.

    Returns also the requests a second that it answers on COMPANY connections.
    """
    found: list[Lone] = []
    with served(bundle, options=options) as server, clients(1) as own:
        known = target(server.url)
        sent = bodies(read_rows(data, known, seed=seed).instances, rows, point)
        host = known.url.removeprefix("http://")
        own.ask_with({point: [post(host, PREDICT, body) for body in sent]}, resolve(known.host, known.port))
        own.closed(point, 1, seconds=0.5, warm=0.0)
        for pause in (0.0, *_PAUSES):
            before = cpu_of(server.pid)
            if not pause:
                one = own.closed(point, 1, seconds=_SECONDS, warm=0.0)
            else:
                every = found[0].latencies.mean() + pause
                one = own.open(point, np.arange(0.0, _SECONDS, every), seconds=_SECONDS, warm=0.0)
            count = max(1, one.carried)
            cpu = (cpu_of(server.pid) - before) / count
            found.append(Lone(pause, np.sort(one.latencies_ms) / 1e3, cpu, one.busy * _SECONDS / count))
        together = own.closed(point, COMPANY, seconds=_SECONDS, warm=0.3)
    return found, together.carried / together.seconds


def request_cost(lone: Sequence[Lone], batches: Floats, busy: float) -> RequestCost:
    """From what lone requests took, to what they took beside their batches.

    batches: seconds of such requests' batches. busy: cores that one keeps busy.
    """
    client = lone[0].client
    shares = np.linspace(0, 1, 101)
    # Quantile by quantile: which request had which batch isn't known.
    beside = [np.maximum(np.quantile(one.latencies, shares) - np.quantile(batches, shares), 0.0) for one in lone]
    beside[0] = np.maximum(beside[0] - client, 0.0)
    work = 1.0
    if not math.isnan(lone[0].cpu) and beside[0].mean() > 0:
        work = float(np.clip((lone[0].cpu - batches.mean() * busy) / beside[0].mean(), 0.2, 1.0))
    return RequestCost(tuple(one.pause for one in lone), tuple(beside), work, client)


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has taken; NaN where the system doesn't tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError, IndexError):
        return math.nan
