"""The simulation bench: what a server on this machine would do under loads that nobody sends."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from offramp.runtime.arrays import Floats
from offramp.runtime.arrays.cores import usable_cores
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.calibrating.about import machine, versions_of
from offramp.runtime.jobs.data.expected import Line
from offramp.server.load.arrivals import Closed, Load, Poisson, Trace, poisson
from offramp.server.scheduling.choice import BATCHING
from offramp.server.simulating.bank import Bank
from offramp.server.simulating.measure import measure
from offramp.server.simulating.play import Played, Player
from offramp.server.simulating.played import played_way
from offramp.server.simulating.residual import Residual, residual
from offramp.server.simulating.samples import Level

SCHEMA = "offramp-simulation/2"
SECONDS, MEASURED_SECONDS = 20.0, 60.0
LOADS: tuple[Load, ...] = (Poisson(share=0.3), Poisson(share=0.6), Poisson(share=0.9))
_WARM = 1.0
_AGAIN = 5000  # requests of a measured load that are simulated to see what that is off
_BEHIND = 0.95

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SimulationBench:
    """Tables are lists of flat dicts, one a line: `pandas.DataFrame(found.times)`.

    about: model, machine, versions, what was simulated and how long it was measured. times: a line a load and point:
    requests and rows a second, milliseconds at three quantiles, how busy lanes were, rows of a batch, requests refused.
    """

    about: Mapping[str, Any]
    times: list[Line]
    notes: list[str]


def simulate_bench(
    bundle: str | Path,
    data: str | Path,
    *,
    points: Sequence[str] = (),
    loads: Sequence[Load] = LOADS,
    lanes: int | None = None,
    threads: int | None = None,
    batching: str = "auto",
    rows: int = 1,
    seconds: float = SECONDS,
    max_queued_rows: int = 65_536,
    measured_seconds: float = MEASURED_SECONDS,
    seed: int = 0,
    progress: Progress | None = None,
) -> SimulationBench:
    """Simulate the server's scheduler on loads, by times that are measured here first.

    What is measured: a real server, that keeps a record of every batch, is asked at several loads by a client on this
    machine, as `load_bench` does. What is simulated: `Dispatch`, the scheduler's own code, decides who runs when.
    Everything else is drawn from the record, from the two loads nearest: what a request's way to the engine takes and
    that of its answer, its client's part included; what a lane takes to begin; and how much longer or shorter than
    batches of so many rows and FLOPs take in the mean one takes beside as many busy lanes.

    points: names, all of the bundle's by default. loads: as `load_bench` takes them; shares are of what 64 connections
    carried at the same point when that was measured. lanes, threads, batching, max_queued_rows: the server's settings.
    rows: a request. seconds: that are simulated. measured_seconds: about how long is measured, at each point.
    Raises InputError, and OfframpError if the server doesn't come up.
    """
    if lanes is None:
        lanes = 2 if usable_cores() > 1 else 1
    _check(lanes, threads, batching, rows, seconds, max_queued_rows, measured_seconds)
    with Cascade.load(bundle, threads=threads) as cascade:
        unknown = [name for name in points if name not in cascade.operating_points]
        if unknown:
            raise InputError(f"operating_point is {unknown[0]!r}, expected one of {list(cascade.operating_points)}.")
        names = list(dict.fromkeys(points or cascade.operating_points))
        bank = Bank(cascade, data, names, seed=seed)
        options = ["--batching", batching] + ([] if threads is None else ["--threads", str(threads)])
        began = time.perf_counter()
        measured = measure(bundle, data, names, options, lanes=lanes, rows=rows, seconds=measured_seconds, seed=seed)
        measuring = time.perf_counter() - began
        players = {
            name: Player(
                played_way(cascade, name, graph=measured[name].graph),
                measured[name],
                bank.exits[name].tolist(),
                bank.sizes,
                lanes=lanes,
                max_queued_rows=max_queued_rows,
                rows=rows,
            )
            for name in names
        }
        off = {name: residual(measured[name].levels, partial(_again, players[name], seed)) for name in names}
        lines: list[Line] = []
        notes: list[str] = []
        began, simulated = time.perf_counter(), 0.0
        for done, (load, name) in enumerate([(load, name) for load in loads for name in names]):
            played, load = _play(players[name], load, measured[name].carried, seconds, [seed, done // len(names)])
            simulated += _WARM + played.seconds
            lines.append(_line(load, name, played, rows, off[name]))
            if isinstance(load, Poisson) and (
                played.carried < _BEHIND * (load.rate or 0.0) * played.seconds
                or (load.rate or 0.0) > measured[name].carried
            ):
                notes.append(
                    f"{load.name}: {name} falls behind, so latencies grow with the time that is simulated, and are at "
                    "least these."
                )
            if progress is not None:
                progress(done + 1, len(loads) * len(names))
        took = time.perf_counter() - began
    about = {
        "model": {"name": cascade.manifest.name, "version": cascade.manifest.version},
        "machine": machine(),
        "versions": versions_of(),
        "data": str(data),
        "rows": len(bank),
        "of": bank.of,
        "rows_per_request": rows,
        "lanes": lanes,
        "threads": threads,
        "batching": batching,
        "max_queued_rows": max_queued_rows,
        "seconds": seconds,
        "seed": seed,
        "measured": {
            "seconds": measuring,
            "points": [
                {
                    "point": name,
                    "requests_per_second": times.carried,
                    "rates": [level.rate for level in times.levels],
                    "through_graph": times.graph,
                }
                for name, times in measured.items()
            ],
        },
        "faster_than_real_time": simulated / took,
    }
    return SimulationBench(about, lines, notes)


def _check(
    lanes: int,
    threads: int | None,
    batching: str,
    rows: int,
    seconds: float,
    max_queued_rows: int,
    measured_seconds: float,
) -> None:
    used = 1 if threads is None else threads
    whole = {"lanes": lanes, "threads": used, "rows": rows, "max_queued_rows": max_queued_rows}
    for name, value in whole.items():
        if value < 1:
            raise InputError(f"{name} is {value}, expected at least 1.")
    if batching not in BATCHING:
        raise InputError(f"batching is {batching!r}, expected one of {', '.join(BATCHING)}.")
    for name, number in (("seconds", seconds), ("measured_seconds", measured_seconds)):
        if not 0 < number < math.inf:
            raise InputError(f"{name} is {number!r}, expected more than 0.")


def _play(player: Player, load: Load, carried: float, seconds: float, seed: list[int]) -> tuple[Played, Load]:
    """carried: requests a second that shares are of."""
    if isinstance(load, Closed):
        return player.closed(load.connections, warm=_WARM, seconds=seconds, seed=seed), load
    if isinstance(load, Trace):
        return player.open(np.array(load.offsets), warm=0.0, seconds=load.seconds, seed=seed), load
    if load.rate is None:
        assert load.share is not None
        load = replace(load, rate=load.share * carried)
    assert load.rate is not None
    arrivals = poisson(load.rate, _WARM + seconds, seed)
    return player.open(arrivals, warm=_WARM, seconds=seconds, seed=seed), load


def _again(player: Player, seed: int, level: Level) -> Floats:
    """A load that was measured, simulated: seconds."""
    seconds = _AGAIN / level.rate
    arrivals = poisson(level.rate, _WARM + seconds, [seed, round(level.rate)])
    return player.open(arrivals, warm=_WARM, seconds=seconds, seed=seed).latencies


def _line(load: Load, point: str, played: Played, rows: int, off: Residual) -> Line:
    latencies = played.latencies
    if not isinstance(load, Closed):
        latencies = off.corrected(latencies, len(latencies) / played.seconds)
    there = len(latencies) > 0
    return {
        "load": load.name,
        "kind": type(load).__name__.lower(),
        "connections": load.connections if isinstance(load, Closed) else None,
        "rate": load.rate if isinstance(load, Poisson) else None,
        "point": point,
        "requests_per_second": played.carried / played.seconds,
        "rows_per_second": rows * played.carried / played.seconds,
        **{f"p{q * 100:.0f}_ms": float(np.quantile(latencies, q)) * 1e3 if there else None for q in (0.5, 0.9, 0.99)},
        "lanes_busy": played.busy,
        "batch_rows": played.batch_rows,
        "refused": played.refused,
    }


def document(found: SimulationBench) -> dict[str, Any]:
    """JSON-able; docs/guide/http.md says what is where."""
    return {"schema": SCHEMA, **found.about, "times": found.times, "notes": found.notes}
