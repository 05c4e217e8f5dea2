"""What a real server takes, by its own record: served here, asked over HTTP, at several loads."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from offramp.runtime.arrays import Floats, Ints
from offramp.runtime.errors import OfframpError
from offramp.server.load.arrivals import poisson
from offramp.server.load.clients import Clients, Measured, clients
from offramp.server.load.connection import resolve
from offramp.server.load.requests import PREDICT, bodies, post, read_rows
from offramp.server.load.serving import served
from offramp.server.load.target import Target, target
from offramp.server.simulating.recorded import NUMBER, Record
from offramp.server.simulating.samples import BatchLine, Level, PointTimes, Series, fit_line

_SHARES = (0.1, 0.25, 0.4, 0.55, 0.65, 0.75, 0.85)  # of what a closed loop carries
_CLOSED, _CLOSED_SHARE = 64, 0.1  # connections of that loop, and its share of the time
_PLAIN_SHARE = 0.5  # of the time, for a server that keeps no record: to keep one costs some of what is to be measured
# Of all loads, so that whatever else the machine does for a while isn't taken for one load's; at most, and of seconds.
_TURNS, _TURN = 3, 5.0
# Times the p90 or p99 that is usual at a load: a turn above that isn't counted. What comes in bursts is in longer runs,
# too: without what was above 1.5 times, the simulated p99 was .79 of the measured in the mean, with this .86.
_DISTURBED = 2.5
_FEW = 16  # batches
_WARM, _LEAST = 0.2, 0.15  # seconds


Timed = tuple[Floats, Floats]
"""When, in seconds since the load began, and what it took."""


@dataclass(frozen=True)
class _Asked:
    """A load, as its client saw it. count: requests that it took turns with."""

    rate: float
    count: int
    since: float
    until: float
    requests: Measured


def measure(
    bundle: str | Path,
    data: str | Path,
    points: Sequence[str],
    options: Sequence[str],
    *,
    lanes: int,
    rows: int,
    seconds: float,
    seed: int = 0,
) -> dict[str, PointTimes]:
    """Serve the bundle, with a record and then without, and ask it at every point.

    options: more of `offramp serve`. rows: a request. seconds: at each point.
    Raises OfframpError if the server doesn't come up, or answers nothing.
    """
    each, plainly = (share * seconds for share in (1 - _PLAIN_SHARE, _PLAIN_SHARE))
    turns = max(1, min(_TURNS, int(seconds / _TURN)))
    asked: dict[str, list[_Asked]] = {}
    plain: dict[str, list[_Asked]] = {}
    carried: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "record.npz"
        command = ("offramp.server.simulating.recorded", str(file))
        with served(bundle, options=[*options, "--lanes", str(lanes)], command=command) as server, clients(1) as own:
            known = target(server.url)
            instances = read_rows(data, known, seed=seed).instances  # the same for the server without a record
            for name in points:
                count = _hand_over(own, known, bodies(instances, rows, name), name, numbered=True)
                closed = own.closed(name, _CLOSED, seconds=max(_LEAST, each * _CLOSED_SHARE), warm=_WARM)
                carried[name] = closed.carried / closed.seconds
                if not closed.carried:
                    raise OfframpError(f"{name} answered nothing: {closed.outcomes}.")
                whole = _asked(closed, carried[name], count)
                left = max(_LEAST, each * (1 - _CLOSED_SHARE) / len(_SHARES) / turns - _WARM)
                asked[name] = [whole, *_opens(own, name, carried[name], left, turns, seed, count)]
        record = Record.read(file)
    with served(bundle, options=[*options, "--lanes", str(lanes)]) as server, clients(1) as own:
        known = target(server.url)
        for name in points:
            count = _hand_over(own, known, bodies(instances, rows, name), name, numbered=False)
            left = max(_LEAST, plainly / len(_SHARES) / turns - _WARM)
            own.open(name, poisson(0.5 * carried[name], 1.0, seed), seconds=1.0, warm=0.0)  # it has just come up
            plain[name] = _opens(own, name, carried[name], left, turns, seed, count)
    return {name: _times(record, asked[name], plain[name], carried[name], lanes) for name in points}


def _hand_over(own: Clients, known: Target, sent: Sequence[bytes], name: str, *, numbered: bool) -> int:
    """Give the clients what to ask at a point; how many requests. numbered: so that a record knows them."""
    host = known.url.removeprefix("http://")
    heads = [f"{NUMBER}: {k}\r\n" if numbered else "" for k in range(len(sent))]
    requests = [post(host, PREDICT, body, headers=head) for body, head in zip(sent, heads, strict=True)]
    own.ask_with({name: requests}, resolve(known.host, known.port))
    return len(requests)


def _opens(own: Clients, name: str, carried: float, seconds: float, turns: int, seed: int, count: int) -> list[_Asked]:
    """Open loops at all shares in turns."""
    return [
        _open(own, name, carried * share, seconds, [seed, turn, k], count)
        for turn in range(turns)
        for k, share in enumerate(_SHARES)
    ]


def _open(own: Clients, name: str, rate: float, seconds: float, seed: Sequence[int], count: int) -> _Asked:
    arrivals = poisson(rate, _WARM + seconds, seed)
    return _asked(own.open(name, arrivals, seconds=seconds, warm=_WARM), rate, count)


def _asked(one: Measured, rate: float, count: int) -> _Asked:
    answered = one.due + one.latencies_ms / 1e3
    since, until = (one.due.min(), answered.max()) if len(one.due) else (0.0, 0.0)
    return _Asked(rate, count, float(since), float(until), one)


def _times(record: Record, asked: Sequence[_Asked], plain: Sequence[_Asked], carried: float, lanes: int) -> PointTimes:
    seen = [[_Seen(record, one, lanes) for one in turns] for turns in _undisturbed(asked)]
    every = [one for turns in seen for one in turns]
    stage, rows, flops, seconds, graph = (
        np.concatenate([getattr(one, name) for one in every]) for name in ("stage", "rows", "flops", "seconds", "graph")
    )
    if not len(stage):
        raise OfframpError("the server that was measured answered too little to learn from.")
    lines = tuple(
        fit_line(rows[stage == k], flops[stage == k], seconds[stage == k]) for k in range(1 + int(stage.max()))
    )
    latencies = {
        turns[0].rate: np.concatenate([one.requests.latencies_ms for one in turns]) / 1e3
        for turns in _undisturbed(plain)
    }
    levels = [
        replace(_level(turns, lines, lanes), latencies=latencies.get(turns[0].rate, np.zeros(0)))
        for turns in seen
        if sum(len(one.seconds) for one in turns)
    ]
    return PointTimes(carried, bool(graph.mean() > 0.5), lines, tuple(levels))


def _undisturbed(asked: Sequence[_Asked]) -> list[list[_Asked]]:
    """The turns that count, by load."""
    found = []
    for rate in sorted({one.rate for one in asked}):
        turns = [one for one in asked if one.rate == rate]
        quantiles = np.array([[one.requests.ms(q) for q in (0.9, 0.99)] for one in turns])
        usual = (quantiles <= _DISTURBED * np.nanmedian(quantiles, axis=0)).all(axis=1)
        # A load that every turn was disturbed at, in one way or the other, is what it is.
        found.append([one for one, counts in zip(turns, usual | ~usual.any(), strict=True) if counts])
    return found


def _level(turns: Sequence["_Seen"], lines: Sequence[BatchLine], lanes: int) -> Level:
    """Turns one after the other."""
    starts = np.concatenate([[0.0], np.cumsum([one.length for one in turns])])

    def all_of(name: str) -> Floats:
        return np.concatenate([getattr(one, name) for one in turns])

    def series(name: str) -> Series:
        timed = [getattr(one, name) for one in turns]
        when = np.concatenate([start + one for start, (one, _) in zip(starts, timed, strict=False)])
        took = np.concatenate([one for _, one in timed])
        return Series(when.tolist(), took.tolist()) if len(when) else Series([0.0], [0.0])

    batches = zip(all_of("stage").tolist(), all_of("rows").tolist(), all_of("flops").tolist(), strict=True)
    expected = np.array([lines[int(stage)].seconds(rows, flops) for stage, rows, flops in batches])
    times = np.concatenate([start + one.start - one.since for start, one in zip(starts, turns, strict=False)])
    ratio, busy = all_of("seconds") / expected, all_of("busy")

    def ratios(lanes: int) -> Series:
        chosen = busy == lanes
        if chosen.sum() < _FEW:  # too few to say anything
            chosen = np.ones(len(ratio), bool)
        return Series(times[chosen].tolist(), ratio[chosen].tolist(), expected[chosen].tolist())

    by_lanes = tuple(ratios(n) for n in range(1, lanes + 1))
    onward, back, woken, turned = (series(name) for name in ("onward", "back", "woken", "turned"))
    return Level(turns[0].rate, float(starts[-1]), onward, back, by_lanes, woken, turned)


class _Seen:
    """A part of a server's record: what it did under one load.

    since, length: seconds. start … graph: (B,) of batches; busy: lanes that were, the batch's own among them. onward,
    back, woken, turned: as `Level` has them.
    """

    def __init__(self, record: Record, asked: _Asked, lanes: int) -> None:
        self.rate, self.since, self.length = asked.rate, asked.since, asked.until - asked.since
        batches = record.batches[np.argsort(record.batches[:, 1], kind="stable")]
        batches = batches[(batches[:, 1] >= asked.since) & (batches[:, 1] <= asked.until)]
        numbers, self.start, self.end, self.thread, self.stage, self.rows, self.flops, self.graph = batches.T
        self.seconds = self.end - self.start
        ended = np.searchsorted(np.sort(self.end), self.start, "right")
        self.busy = np.clip(np.arange(len(batches)) + 1 - ended, 1, lanes)
        parts = record.parts[np.isin(record.parts[:, 0], numbers)]
        of = {number: k for k, number in enumerate(numbers.tolist())}
        at = np.array([of[number] for number in parts[:, 0].tolist()], np.int64)
        due, arrived, ended, done = self._answered(parts, at, asked).T
        self.onward, self.back = (due - self.since, arrived - due), (due - self.since, done - ended)
        self.woken, self.turned = self._begins(parts, at)

    def _answered(self, parts: Floats, at: Ints, asked: _Asked) -> Floats:
        """(n, 4) of requests: when each was due, in the engine, through its last batch, and with its client."""
        ended: dict[tuple[float, float], float] = {}
        for (_, number, arrived, _), k in zip(parts.tolist(), at.tolist(), strict=True):
            ended[number, arrived] = max(ended.get((number, arrived), 0.0), float(self.end[k]))
        by_number: dict[int, list[tuple[float, float]]] = {}
        for (number, arrived), end in ended.items():
            by_number.setdefault(int(number), []).append((arrived, end))
        one = asked.requests
        answered = one.due + one.latencies_ms / 1e3
        found = []
        for number, due, done in zip(one.numbers.tolist(), one.due.tolist(), answered.tolist(), strict=True):
            there = [(a, e) for a, e in by_number.get(number % asked.count, ()) if due <= a and e <= done]
            if there:
                found.append((due, *there[0], done))
        return np.array(sorted(found)).reshape(-1, 4)

    def _begins(self, parts: Floats, at: Ints) -> tuple[Timed, Timed]:
        first = np.full(len(self.start), np.inf)
        np.minimum.at(first, at, parts[:, 3])
        before: dict[float, float] = {}
        woken: list[tuple[float, float]] = []
        turned: list[tuple[float, float]] = []
        lines = (each.tolist() for each in (self.thread, self.start, self.end, first))
        for thread, start, end, since in zip(*lines, strict=True):
            last = before.get(thread, -np.inf)
            (turned if last >= since else woken).append((start - self.since, max(0.0, start - max(last, since))))
            before[thread] = end
        return _timed(woken), _timed(turned)


def _timed(pairs: Sequence[tuple[float, float]]) -> Timed:
    when, took = np.array(pairs).reshape(-1, 2).T
    return when, took
