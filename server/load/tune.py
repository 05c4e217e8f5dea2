"""Which settings of the server suit this machine: a few sensible ones, measured in turns against real servers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from offramp.runtime.arrays.cores import usable_cores
from offramp.runtime.bundle import read_bundle
from offramp.runtime.errors import InputError, OfframpError
from offramp.runtime.jobs.calibrating.about import machine, versions_of
from offramp.runtime.jobs.data.expected import Line
from offramp.runtime.jobs.plain_text import aligned
from offramp.server.load.clients import Clients, Measured, clients
from offramp.server.load.connection import resolve
from offramp.server.load.requests import PREDICT, bodies, post, read_rows
from offramp.server.load.serving import serving
from offramp.server.load.target import target

SCHEMA = "offramp-tune/1"
SECONDS, TURNS = 1.0, 3
LONE, LOADS = 1, (16, 64)
"""Connections: of the loop whose latency is reported, and of those whose rows a second count."""

_WARM = 0.25
_TIMES_THE_LEAST = 2.0
_SHOWN = ("rows/s", "p99 ms")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Setting:
    """Settings of `offramp serve`."""

    lanes: int
    threads: int
    batching: str = "auto"

    @property
    def options(self) -> list[str]:
        return ["--lanes", str(self.lanes), "--threads", str(self.threads), "--batching", self.batching]

    @property
    def environment(self) -> str:
        return f"OFFRAMP_LANES={self.lanes} OFFRAMP_THREADS={self.threads} OFFRAMP_BATCHING={self.batching}"


@dataclass(frozen=True)
class Tuning:
    """times: a line a setting: lone-row milliseconds, rows a second and p99 at each load, medians over turns, and
    `rows_ratio`, the geometric mean over loads of its rows a second by the best's. best: None if no setting is within
    the limit."""

    about: Mapping[str, Any]
    times: list[Line]
    best: Setting | None


def settings_for(cores: int, *, graph: bool) -> list[Setting]:
    """What is worth trying. graph: whether the bundle has a cascade graph, so that there are several ways to batch.

    One lane on all cores; two that share them, so that one answers while the other runs; and lanes that have cores of
    their own.
    """
    counts = {2, cores // 4, cores // 2, cores}
    own = {(lanes, cores // lanes) for lanes in counts if 1 < lanes <= min(cores, 64)}
    pairs = sorted({(1, cores), (2, cores)} | own)
    found = [Setting(lanes, threads) for lanes, threads in pairs]
    if graph:
        found += [Setting(2 if cores > 1 else 1, cores, batching) for batching in ("graph", "stages")]
    return found


def tune(
    bundle: str | Path,
    data: str | Path,
    *,
    point: str | None = None,
    p99_ms: float | None = None,
    rows: int = 1,
    seconds: float = SECONDS,
    turns: int = TURNS,
    settings: Sequence[Setting] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Tuning:
    """Measure settings of the server by closed loops of 1, 16 and 64 connections, all in turn.

    The best has most rows a second at 16 and 64 connections (the geometric mean of both) among those whose p99 is
    within the limit at both. point: an operating point; `full` by default. p99_ms: that limit; by default twice
    the least p99 that any setting has at that load. seconds, turns: of each measurement. Every setting's server is up
    all the time; those that aren't asked idle. Raises InputError, and OfframpError if none of them answers anything.
    """
    for name, value in (("rows", rows), ("turns", turns)):
        if value < 1:
            raise InputError(f"{name} is {value}, expected at least 1.")
    for name, number in (("seconds", seconds), ("p99_ms", 1.0 if p99_ms is None else p99_ms)):
        if not 0 < number < math.inf:
            raise InputError(f"{name} is {number!r}, expected more than 0.")
    manifest = read_bundle(bundle).manifest
    cores = usable_cores()
    tried = list(settings or settings_for(cores, graph=manifest.cascade is not None))
    taken: dict[tuple[Setting, int], list[Measured]] = {}
    with ExitStack() as stack:
        asked = [_Asked(stack, bundle, data, setting, point, rows, seed) for setting in tried]
        total, done = turns * len(tried) * (1 + len(LOADS)), 0
        for turn in range(turns):
            for load in (LONE, *LOADS):
                for k in range(len(asked)):
                    one = asked[(turn + k) % len(asked)]
                    taken.setdefault((one.setting, load), []).append(one(load, seconds))
                    done += 1
                    if progress is not None:
                        progress(done, total)
        name = asked[0].point
    lines = [dict(_line(setting, taken, rows)) for setting in tried]
    if not any(line[f"rows_per_second_{load}"] for line in lines for load in LOADS):
        refused = sum(line["errors"] for line in lines)
        raise OfframpError(f"no setting's server answered anything: {refused:,} requests were refused or lost.")
    best = _best(lines, tried, p99_ms)
    about = {
        "model": {"name": manifest.name, "version": manifest.version},
        "machine": machine(),
        "versions": versions_of(),
        "data": str(data),
        "operating_point": name,
        "rows_per_request": rows,
        "p99_limit_ms": p99_ms,
        "seconds": seconds,
        "turns": turns,
        "seed": seed,
    }
    return Tuning(about, lines, best)


class _Asked:
    """A server with one setting, and its client."""

    def __init__(
        self,
        stack: ExitStack,
        bundle: str | Path,
        data: str | Path,
        setting: Setting,
        point: str | None,
        rows: int,
        seed: int,
    ) -> None:
        self.setting = setting
        known = target(stack.enter_context(serving(bundle, options=setting.options)))
        self.point = known.default if point is None else point
        if self.point not in known.points:
            raise InputError(f"operating_point is {point!r}, expected one of {known.points}.")
        sent = bodies(read_rows(data, known, seed=seed).instances, rows, self.point)
        host = known.url.removeprefix("http://")
        self._clients: Clients = stack.enter_context(clients(1))
        requests = {self.point: [post(host, PREDICT, body) for body in sent]}
        self._clients.ask_with(requests, resolve(known.host, known.port))

    def __call__(self, connections: int, seconds: float) -> Measured:
        return self._clients.closed(self.point, connections, seconds=seconds, warm=min(_WARM, seconds))


Taken = Mapping[tuple[Setting, int], list[Measured]]


def _line(setting: Setting, taken: Taken, rows: int) -> Iterator[tuple[str, Any]]:
    yield from (("lanes", setting.lanes), ("threads", setting.threads), ("batching", setting.batching))
    yield "lone_p50_ms", float(np.median([one.ms(0.5) for one in taken[setting, LONE]]))
    for load in LOADS:
        found = taken[setting, load]
        yield f"rows_per_second_{load}", rows * float(np.median([one.carried / one.seconds for one in found]))
        yield f"p99_ms_{load}", float(np.median([one.ms(0.99) for one in found]))
    outcomes = [item for load in LOADS for one in taken[setting, load] for item in one.outcomes.items()]
    yield "errors", sum(count for outcome, count in outcomes if not outcome.startswith("2"))


def _best(lines: list[Line], tried: Sequence[Setting], p99_ms: float | None) -> Setting | None:
    """Adds `within_p99` and `rows_ratio` to the lines."""
    for line in lines:
        limits = [
            _TIMES_THE_LEAST * min(other[f"p99_ms_{load}"] for other in lines) if p99_ms is None else p99_ms
            for load in LOADS
        ]
        line["within_p99"] = all(line[f"p99_ms_{load}"] <= limit for load, limit in zip(LOADS, limits, strict=True))
        line["rows_ratio"] = math.prod(line[f"rows_per_second_{load}"] for load in LOADS) ** (1 / len(LOADS))
    most = max(line["rows_ratio"] for line in lines) or 1.0
    for line in lines:
        line["rows_ratio"] /= most
    within = [k for k, line in enumerate(lines) if line["within_p99"]]
    return tried[max(within, key=lambda k: float(lines[k]["rows_ratio"]))] if within else None


def document(found: Tuning) -> dict[str, Any]:
    """JSON-able; docs/guide/http.md says what is where."""
    best = None if found.best is None else {"options": found.best.options, "environment": found.best.environment}
    return {"schema": SCHEMA, **found.about, "times": found.times, "best": best}


def describe(found: Tuning, bundle: str) -> str:
    """All of it for a terminal."""
    about = found.about
    columns = (f"{what} at {n}" for n in LOADS for what in _SHOWN)
    table: list[tuple[str, ...]] = [("lanes", "threads", "batching", "alone p50 ms", *columns, "of the most rows")]
    for line in found.times:
        loads = [f"{line[f'{name}_{n}']:.4g}" for n in LOADS for name in ("rows_per_second", "p99_ms")]
        note = f"{line['rows_ratio']:.0%}{'' if line['within_p99'] else ', p99 above the limit'}"
        first = (str(line["lanes"]), str(line["threads"]), line["batching"], f"{line['lone_p50_ms']:.3g}")
        table.append((*first, *loads, note))
    limit = "twice the least" if about["p99_limit_ms"] is None else f"{about['p99_limit_ms']:g} ms"
    said = [
        f"{about['operating_point']} on {about['machine']['cpu']} with {about['machine']['cores']} cores; medians of "
        f"{about['turns']} turns of {about['seconds']:g} s",
        f"best: most rows a second at {' and '.join(map(str, LOADS))} connections with a p99 of at most {limit}; "
        "a row alone isn't part of it",
    ]
    if found.best is None:
        tail = ["no setting is within that p99."]
    else:
        command = ["offramp", "serve", bundle, *found.best.options, "--operating-point", str(about["operating_point"])]
        tail = [" ".join(command), found.best.environment]
    return "\n\n".join("\n".join(part) for part in (said, aligned(table), tail))
