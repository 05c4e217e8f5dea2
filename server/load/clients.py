"""Client processes: one can't ask as fast as a server on many cores answers."""

import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
from offramp.runtime.arrays import Floats, Ints
from offramp.runtime.arrays.cores import usable_cores
from offramp.runtime.errors import OfframpError
from offramp.server.load.client import Tally, closed_loop, open_loop
from offramp.server.load.connection import Address

OWN = "offramp's own"
_LEAD = 0.1  # seconds from the order to the start, so that all processes start together


def processes(cores: int | None = None) -> int:
    """How many client processes a machine should have: a quarter of its cores, which leaves the server the rest."""
    return max(1, min(8, (usable_cores() if cores is None else cores) // 4))


@dataclass(frozen=True)
class Measured:
    """One measurement. seconds: that count. latencies_ms: (n,) of requests answered with 2xx or not in time.

    carried: requests answered with 2xx in those seconds. outcomes: how many by status, or by what went wrong. busy: the
    share of a core that the busiest client process took. client: which one it was. quantiles_ms: of another program's
    latencies, which are its own to count. due, numbers: (n,) as `Tally` has them, by our own client.
    """

    seconds: float
    carried: int
    latencies_ms: Floats
    outcomes: dict[str, int]
    busy: float
    client: str = OWN
    quantiles_ms: dict[float, float] | None = None
    due: Floats = field(default_factory=lambda: np.zeros(0))
    numbers: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def ms(self, quantile: float) -> float:
        """NaN where nothing was answered."""
        if self.quantiles_ms is not None:
            return self.quantiles_ms.get(quantile, float("nan"))
        return float(np.quantile(self.latencies_ms, quantile)) if len(self.latencies_ms) else float("nan")


class Clients:
    """Processes that wait for orders; see `clients`."""

    def __init__(self, pipes: Sequence[Pipe]) -> None:
        self._pipes = pipes

    def ask_with(self, requests: dict[str, list[bytes]], address: Address) -> None:
        """What to send, by name, and where to: handed over before any clock starts."""
        for pipe in self._pipes:
            _order(pipe, ("requests", requests, address))

    def closed(self, name: str, connections: int, *, seconds: float, warm: float) -> Measured:
        """A closed loop of so many connections, over all processes. name: of the requests."""
        count = min(len(self._pipes), connections)
        shares = [connections // count + (k < connections % count) for k in range(count)]
        begin = time.monotonic() + _LEAD
        return self._measure(
            [
                ("closed", name, share, {"begin": begin, "warm": warm, "seconds": seconds, "first": 7919 * k})
                for k, share in enumerate(shares)
            ],
            seconds,
        )

    def open(
        self, name: str, arrivals: Floats, *, seconds: float, warm: float, most: int = 1024, timeout: float = 10.0
    ) -> Measured:
        """An open loop: arrivals are dealt out to the processes in turn. most: connections in all."""
        count = len(self._pipes)
        begin = time.monotonic() + _LEAD
        common = {"begin": begin, "warm": warm, "seconds": seconds, "most": max(1, most // count), "timeout": timeout}
        return self._measure(
            [("open", name, arrivals[k::count].tolist(), {**common, "first": 7919 * k}) for k in range(count)], seconds
        )

    def _measure(self, orders: Sequence[tuple[Any, ...]], seconds: float) -> Measured:
        used = self._pipes[: len(orders)]
        for pipe, order in zip(used, orders, strict=True):
            _order(pipe, order)
        tallies: list[Tally] = [_answer(pipe) for pipe in used]
        outcomes: Counter[str] = Counter()
        for tally in tallies:
            outcomes.update(tally.outcomes)
        return Measured(
            seconds,
            sum(tally.carried for tally in tallies),
            np.concatenate([np.asarray(tally.latencies, np.float64) for tally in tallies]) * 1e3,
            dict(outcomes),
            max(tally.busy for tally in tallies),
            due=np.concatenate([np.asarray(tally.due, np.float64) for tally in tallies]),
            numbers=np.concatenate([np.asarray(tally.numbers, np.int64) for tally in tallies]),
        )


def _order(pipe: Pipe, order: tuple[Any, ...]) -> None:
    try:
        pipe.send(order)
    except OSError as error:
        raise OfframpError("a client process ended before it had measured anything.") from error


def _answer(pipe: Pipe) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError) as error:
        raise OfframpError("a client process ended before it had measured anything.") from error


@contextmanager
def clients(count: int | None = None) -> Iterator[Clients]:
    """So many client processes, by default what the machine suits; they are ended in any case."""
    context = multiprocessing.get_context("spawn")  # a fork would share what the parent's threads hold
    started: list[Any] = []
    pipes: list[Pipe] = []
    try:
        for _ in range(count or processes()):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there,), daemon=True)
            process.start()
            there.close()
            started.append(process)
            pipes.append(here)
        for pipe in pipes:  # one that is still importing would begin late
            _answer(pipe)
        yield Clients(pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in started:
            process.terminate()
            process.join()


def _work(pipe: Pipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal's processes: the parent ends us
    requests: dict[str, list[bytes]] = {}
    address: Address | None = None
    with suppress(EOFError, OSError):
        pipe.send("ready")
        while True:
            kind, *order = pipe.recv()
            if kind == "requests":
                requests, address = order
                continue
            name, load, options = order
            assert address is not None
            loop = closed_loop if kind == "closed" else open_loop
            pipe.send(loop(address, requests[name], load, **options))
