"""The load bench: a running server's operating points under load, taking turns."""

import http.client
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.calibrating.about import machine, versions_of
from offramp.runtime.jobs.data.expected import Line
from offramp.runtime.points import FULL
from offramp.server.load import tools
from offramp.server.load.answers import answers
from offramp.server.load.arrivals import Closed, Load, Poisson, Trace, poisson
from offramp.server.load.clients import OWN, Clients, Measured, clients
from offramp.server.load.connection import resolve
from offramp.server.load.requests import PREDICT, bodies, post, read_rows
from offramp.server.load.target import Target, target

SCHEMA = "offramp-load/1"
SECONDS, TURNS, CONNECTIONS = 5.0, 3, (16, 64)
CLIENTS = ("auto", "own", tools.WRK, tools.OHA)
_WARM, _WARM_SHARE = 1.0, 0.25  # seconds before each measurement that aren't counted, and at most that share of it
_BUSY = 0.8  # of a core, from which on a client holds the server up
_BEHIND = 0.95  # of what came in an open loop, below which the server fell behind

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LoadBench:
    """Tables are lists of flat dicts, one a line: `pandas.DataFrame(found.times)`.

    about: model, address, machine, versions, what was sent. baseline: the point that ratios are to. points: a line a
    point: accuracy if there are labels, coverage, exits. times: a line a load and point: requests and rows a second,
    milliseconds at three quantiles, each the median over turns with the least and the most (…_low, …_high), ratios to
    the baseline in the same turn, errors by status, how busy the client was.
    """

    about: Mapping[str, Any]
    baseline: str
    points: list[Line]
    times: list[Line]
    notes: list[str]

    @property
    def answered(self) -> bool:
        """Whether anything was, at any load."""
        return any(line["requests_per_second"] for line in self.times)


def load_bench(
    url: str,
    data: str | Path,
    *,
    points: Sequence[str] = (),
    loads: Sequence[Load] = tuple(map(Closed, CONNECTIONS)),
    rows: int = 1,
    seconds: float = SECONDS,
    turns: int = TURNS,
    client: str = "auto",
    processes: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> LoadBench:
    """Measure a running offramp server under load, its points taking turns.

    data: what `record` takes; labels are welcome. points: names, all of the server's by default; `full` is measured in
    any case. loads: closed loops come first; shares are of what the best of them carried at `full`. rows: a request.
    seconds: of each measurement, before which a moment isn't counted; a trace takes as long as it is. client: of closed
    loops: "wrk", "oha", "own", or "auto" for the first of these that is here. processes: of our own client. Raises
    InputError for a server, data or a point that isn't there.
    """
    _check(rows, seconds, turns, client, processes)
    server = target(url)
    names, baseline = _points(points, server)
    picked = read_rows(data, server, seed=seed)
    sent = {name: bodies(picked.instances, rows, name) for name in names}
    host = server.url.removeprefix("http://")
    told = _Told(progress, len(loads) * turns * len(names))
    notes: list[str] = []
    lines: list[Line] = []
    with clients(processes) as own:
        address = resolve(server.host, server.port)
        own.ask_with({name: [post(host, PREDICT, body) for body in sent[name]] for name in names}, address)
        answered = [answers(server, name, picked) for name in names]
        notes += [f"{one.trouble}: its accuracy isn't known." for one in answered if one.trouble]
        notes += [said for name in names if (said := _refused(server, name, sent[name][0], rows))]
        tool = _tool(client)
        carried = 0.0
        for k, load in enumerate(sorted(loads, key=lambda load: not isinstance(load, Closed))):
            if isinstance(load, Poisson) and load.share is not None:
                if not carried:
                    notes.append(f"{load.name}: left out, for {baseline} carried nothing in a closed loop.")
                    continue
                load = replace(load, rate=load.share * carried)
            measure = _Measure(server, own, tool, sent, seconds, [seed, k])
            taken = _turns(measure, load, names, turns, told)
            made = [_line(load, name, taken[name], taken[baseline], rows) for name in names]
            if isinstance(load, Closed):
                carried = max(carried, made[names.index(baseline)]["requests_per_second"])
            lines += made
            notes += _about(made, seconds)
    about = {
        "model": {"name": server.manifest.name, "version": server.manifest.version},
        "address": server.url,
        "machine": machine(),
        "versions": versions_of(),
        "data": str(data),
        "rows": len(picked),
        "of": picked.of,
        "rows_per_request": rows,
        "seconds": seconds,
        "turns": turns,
        "seed": seed,
    }
    return LoadBench(about, baseline, [one.line for one in answered], lines, notes)


def _check(rows: int, seconds: float, turns: int, client: str, processes: int | None) -> None:
    for name, value in (("rows", rows), ("turns", turns), ("processes", 1 if processes is None else processes)):
        if value < 1:
            raise InputError(f"{name} is {value}, expected at least 1.")
    if not 0 < seconds < math.inf:
        raise InputError(f"seconds is {seconds!r}, expected more than 0.")
    if client not in CLIENTS:
        raise InputError(f"client is {client!r}, expected one of {', '.join(CLIENTS)}.")
    if client not in ("auto", "own") and client not in tools.found():
        raise InputError(f"client is {client!r}, which isn't on the PATH.")


def _points(asked: Sequence[str], server: Target) -> tuple[list[str], str]:
    """What is measured, and which of it is the baseline: it comes first."""
    unknown = [name for name in asked if name not in server.points]
    if unknown:
        raise InputError(f"operating_point is {unknown[0]!r}, expected one of {server.points}.")
    baseline = FULL if FULL in server.points else server.default
    return list(dict.fromkeys([baseline, *(asked or server.points)])), baseline


def _refused(server: Target, point: str, body: bytes, rows: int) -> str | None:
    """What the server says to one of the requests, if it doesn't take them."""
    try:
        status, data = server.answer("POST", PREDICT, body)
    except (OSError, http.client.HTTPException):
        return None  # under load it will be seen how often
    if status == 200:
        return None
    return f"a request of {rows} rows at {point} got {status}: {data[:300].decode(errors='replace')}"


def _tool(client: str) -> tools.Tool | None:
    """The program that closed loops are left to; None for our own client."""
    there = {} if client == "own" else tools.found()
    return next(iter(there.values()), None) if client == "auto" else there.get(client)


@dataclass
class _Measure:
    """One point under one load, once."""

    server: Target
    own: Clients
    tool: tools.Tool | None
    bodies: Mapping[str, list[bytes]]
    seconds: float
    seed: list[int]

    def __call__(self, load: Load, point: str, turn: int) -> Measured:
        warm = min(_WARM, _WARM_SHARE * self.seconds)
        if isinstance(load, Closed):
            if self.tool is not None:
                return self.tool(self.server.url, self.bodies[point], load.connections, seconds=self.seconds, warm=warm)
            return self.own.closed(point, load.connections, seconds=self.seconds, warm=warm)
        if isinstance(load, Trace):
            self.own.closed(point, 4, seconds=0.0, warm=warm)
            return self.own.open(point, np.array(load.offsets), seconds=load.seconds, warm=0.0)
        assert load.rate is not None
        # The same arrivals for every point, others in every turn.
        arrivals = poisson(load.rate, warm + self.seconds, [*self.seed, turn])
        return self.own.open(point, arrivals, seconds=self.seconds, warm=warm)


def _turns(measure: _Measure, load: Load, names: Sequence[str], turns: int, told: "_Told") -> dict[str, list[Measured]]:
    """All points once a turn, in an order that rotates."""
    taken: dict[str, list[Measured]] = {name: [] for name in names}
    for turn in range(turns):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            taken[name].append(measure(load, name, turn))
            told()
    return taken


class _Told:
    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)


def _line(load: Load, point: str, taken: Sequence[Measured], baseline: Sequence[Measured], rows: int) -> Line:
    def each(of: Sequence[Measured]) -> Iterator[tuple[str, list[float]]]:
        yield "requests_per_second", [one.carried / one.seconds for one in of]
        for quantile in (0.5, 0.9, 0.99):
            yield f"p{quantile * 100:.0f}_ms", [one.ms(quantile) for one in of]

    line: Line = {
        "load": load.name,
        "kind": type(load).__name__.lower(),
        "connections": load.connections if isinstance(load, Closed) else None,
        "rate": load.rate if isinstance(load, Poisson) else None,
        "share_of_baseline": load.share if isinstance(load, Poisson) else None,
        "point": point,
        "client": taken[0].client,
        "turns": len(taken),
    }
    theirs = dict(each(baseline))
    for name, values in each(taken):
        line |= _middle(name, values)
        if name == "requests_per_second":
            line |= _middle("rows_per_second", [rows * value for value in values])
        line |= _middle(
            f"{name.removesuffix('_ms')}_ratio",
            [a / b if b > 0 else math.nan for a, b in zip(values, theirs[name], strict=True)],
        )
    outcomes: dict[str, int] = {}
    for one in taken:
        for outcome, count in one.outcomes.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    line["requests"] = sum(outcomes.values())
    line["errors"] = {outcome: count for outcome, count in sorted(outcomes.items()) if not outcome.startswith("2")}
    line["client_busy"] = max(one.busy for one in taken)
    return line


def _middle(name: str, values: Sequence[float]) -> Line:
    """The median over turns, with the least and the most; None where a turn has nothing."""
    if not all(map(math.isfinite, values)):
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: float(np.median(values)), f"{name}_low": min(values), f"{name}_high": max(values)}


def _about(lines: Sequence[Line], seconds: float) -> list[str]:
    """What has to be known of some lines. seconds: of each turn."""
    notes = []
    busiest = max(lines, key=lambda line: float(line["client_busy"]))
    if busiest["client_busy"] > _BUSY:
        more = "" if busiest["client"] != OWN else "; wrk on the PATH, or more --processes, takes less"
        notes.append(
            f"{busiest['load']}: the client was the bottleneck ({busiest['client_busy']:.0%} of a core at "
            f"{busiest['point']}), so the server can do more than this{more}."
        )
    # By what has come, which in a few seconds may be fewer than at that rate.
    behind = [
        line
        for line in lines
        if line["kind"] == "poisson"
        and line["requests_per_second"] < _BEHIND * min(line["rate"], line["requests"] / (line["turns"] * seconds))
    ]
    return notes + [
        f"{line['load']}: {line['point']} fell behind, with {line['requests_per_second']:.4g} answered a second, so "
        "its latencies grow with the time that is measured."
        for line in behind
    ]


def document(found: LoadBench) -> dict[str, Any]:
    """JSON-able; docs/guide/http.md says what is where."""
    return {
        "schema": SCHEMA,
        **found.about,
        "baseline": found.baseline,
        "operating_points": found.points,
        "times": found.times,
        "notes": found.notes,
    }
