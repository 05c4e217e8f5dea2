"""What one client process does: send requests in a closed or an open loop, and count what came of them."""

import select
import selectors
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle

from offramp.server.load.connection import TIMED_OUT, UNANSWERED, Address, Connection

_PAUSE = 0.05  # seconds before a connection that failed is tried again: a dead server isn't hammered
_SWEEP = 0.1  # seconds between looks for requests that take too long
now = time.monotonic  # one clock for all processes of a machine


@dataclass
class Tally:
    """What came of the requests that count.

    seconds: of the time that counts. carried: requests answered with 2xx within it. latencies: seconds; of those that
    got no answer in time it is how long they were waited for. due, numbers: of the same requests: when each was due,
    by time.monotonic, and which one it was. outcomes: how many by status, or by what went wrong. busy:
    the share of a core that the client took.
    """

    seconds: float
    carried: int = 0
    latencies: "array[float]" = field(default_factory=lambda: array("d"))
    due: "array[float]" = field(default_factory=lambda: array("d"))
    numbers: "array[int]" = field(default_factory=lambda: array("q"))
    outcomes: Counter[str] = field(default_factory=Counter)
    busy: float = 0.0

    def add(self, outcome: str, due: float, number: int) -> None:
        self.outcomes[outcome] += 1
        if outcome[0] == "2" or outcome in (TIMED_OUT, UNANSWERED):
            self.latencies.append(now() - due)
            self.due.append(due)
            self.numbers.append(number)


def closed_loop(
    address: Address,
    requests: Sequence[bytes],
    connections: int,
    *,
    begin: float,
    warm: float,
    seconds: float,
    first: int = 0,
    timeout: float = 30.0,
) -> Tally:
    """Each connection sends its next request when the last one was answered; what comes after `warm` seconds counts.

    begin: when to start, by time.monotonic. first: the request to start with. Requests that are under way at the end
    don't count, unless they have been since before the counting began: those are unanswered.
    """
    tally = Tally(seconds)
    order = cycle([*range(first % len(requests), len(requests)), *range(first % len(requests))])
    begin = max(begin, now())  # a process that comes late has as much time as the others
    counted = begin + warm
    end = counted + seconds
    with _selector() as selector:
        clients = [Connection(selector, address) for _ in range(connections)]
        _sleep_until(begin)
        paused = deque((begin, client) for client in clients)
        swept, spent = begin, _Spent(counted, end)
        while (time_ := now()) < end:
            spent.look(time_)
            while paused and paused[0][0] <= time_:
                client = paused.popleft()[1]
                if (failed := _send(client, requests, next(order))) is not None:
                    _count(tally, failed, client, counted)
                    paused.append((time_ + _PAUSE, client))
            until = min(end, swept + _SWEEP, paused[0][0] if paused else end)
            for key, mask in selector.select(max(0.0, until - time_)):
                client = key.data
                if (outcome := client.handle(mask)) is None:
                    continue
                _count(tally, outcome, client, counted)
                if outcome[0].isdigit():
                    failed = _send(client, requests, next(order))
                    if failed is None:
                        continue
                    _count(tally, failed, client, counted)
                paused.append((now() + _PAUSE, client))
            if time_ - swept >= _SWEEP:
                swept = time_
                for client in clients:
                    if client.busy and time_ - client.begun > timeout:
                        _count(tally, TIMED_OUT, client, counted)
                        client.close()
                        paused.append((time_ + _PAUSE, client))
        tally.busy = spent.share()
        for client in clients:
            if client.busy and client.begun < counted:
                tally.add(UNANSWERED, client.begun, client.number)
    return tally


def _send(client: Connection, requests: Sequence[bytes], number: int) -> str | None:
    client.number = number
    return client.send(requests[number], now())


def _count(tally: Tally, outcome: str, client: Connection, counted: float) -> None:
    if now() < counted:
        return
    tally.add(outcome, client.begun, client.number)
    if outcome[0] == "2":
        tally.carried += 1


def open_loop(
    address: Address,
    requests: Sequence[bytes],
    arrivals: Sequence[float],
    *,
    begin: float,
    warm: float,
    seconds: float,
    first: int = 0,
    most: int = 1024,
    timeout: float = 10.0,
) -> Tally:
    """Send each request when it is due, whatever became of those before it.

    arrivals: seconds after `begin`, rising; those of the first `warm` seconds don't count. Latency counts from when a
    request was due, not from when a connection was free for it: a server that stalls makes all wait who come meanwhile.
    most: connections; further requests wait for one. timeout: seconds after the last arrival in which answers count.
    """
    tally = Tally(seconds)
    count = len(requests)
    begin = max(begin, now())
    counted, end = begin + warm, begin + warm + seconds
    given_up = end + timeout
    idle: list[Connection] = []
    clients: list[Connection] = []
    waiting: deque[tuple[float, int]] = deque()
    sent = busy = 0

    def finish(outcome: str, due: float, number: int) -> None:
        if due >= counted:
            tally.add(outcome, due, number)
            if outcome[0] == "2" and now() < end:
                tally.carried += 1

    with _selector() as selector:
        _sleep_until(begin)
        spent = _Spent(counted, end)
        while sent < len(arrivals) or busy or waiting:
            time_ = now()
            if time_ >= given_up:
                break
            spent.look(time_)
            while sent < len(arrivals) and begin + arrivals[sent] <= time_:
                waiting.append((begin + arrivals[sent], first + sent))
                sent += 1
            while waiting and (idle or len(clients) < most):
                due, number = waiting.popleft()
                if idle:
                    client = idle.pop()
                else:
                    client = Connection(selector, address)
                    clients.append(client)
                client.number = number
                if (failed := client.send(requests[number % count], due)) is None:
                    busy += 1
                else:
                    finish(failed, due, number)
                    idle.append(client)
            until = begin + arrivals[sent] if sent < len(arrivals) else given_up
            for key, mask in _select(selector, until - now()):
                client = key.data
                if (outcome := client.handle(mask)) is not None:
                    finish(outcome, client.begun, client.number)
                    busy -= 1
                    idle.append(client)
        tally.busy = spent.share()
        for client in clients:
            if client.busy:
                finish(TIMED_OUT, client.begun, client.number)
        for due, number in waiting:
            finish(TIMED_OUT, due, number)
    return tally


class _Spent:
    """The share of a core that this process takes between two moments, waiting for the last answers apart."""

    def __init__(self, since: float, until: float) -> None:
        self._moments = [since, until]
        self._seen: list[tuple[float, float]] = []  # the time, and what was spent until then

    def look(self, time_: float) -> None:
        if len(self._seen) < 2 and time_ >= self._moments[len(self._seen)]:
            self._seen.append((time_, time.process_time()))

    def share(self) -> float:
        if not self._seen:
            return 0.0
        (begun, before), *ended = self._seen
        end, after = ended[0] if ended else (now(), time.process_time())
        return (after - before) / (end - begun) if end > begun else 0.0


@contextmanager
def _selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        try:
            yield selector
        finally:
            for key in list(selector.get_map().values()):
                key.data.close()


def _select(selector: selectors.BaseSelector, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
    """What has happened, or what happens within so many seconds, to the microsecond.

    epoll counts in milliseconds and rounds up: half of the requests would be sent that late. select doesn't, and waits
    for the selector itself.
    """
    if seconds <= 0:
        return selector.select(0)
    if (number := getattr(selector, "fileno", None)) is None:
        return selector.select(seconds)
    select.select([number()], [], [], min(seconds, _SWEEP))
    return selector.select(0)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - now()))
