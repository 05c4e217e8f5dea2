"""The simulation bench: what a server on this machine would do under loads that nobody sends."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from offramp.runtime.arrays.cores import usable_cores
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError
from offramp.runtime.execution.cpu.session import AWAKE
from offramp.runtime.jobs.calibrating.about import machine, versions_of
from offramp.runtime.jobs.data.expected import Line
from offramp.server.load.arrivals import Closed, Load, Poisson, Trace, poisson
from offramp.server.scheduling.choice import BATCHING
from offramp.server.simulating.bank import Bank
from offramp.server.simulating.front import COMPANY, RequestCost, lone_requests, request_cost
from offramp.server.simulating.laboratory import Laboratory, Measured
from offramp.server.simulating.play import Machine, Played, Player

SCHEMA = "offramp-simulation/1"
SECONDS = 20.0
LOADS: tuple[Load, ...] = (Poisson(share=0.3), Poisson(share=0.6), Poisson(share=0.9))
_WARM = 1.0
_CARRIES = 64  # connections of the closed loop whose throughput shares are of
_BEHIND = 0.95

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SimulationBench:
    """Tables are lists of flat dicts, one a line: `pandas.DataFrame(found.times)`.

    about: model, machine, versions, what was simulated and what it was measured to take. times: a line a load and
    point: requests and rows a second, milliseconds at three quantiles, how busy lanes and event loop were, rows of a
    batch, requests refused.
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
    request_ms: float | None = None,
    client: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> SimulationBench:
    """Simulate the server's scheduler on loads, by times that are measured here first; that takes seconds.

    What is measured: batches, by their rows, FLOPs and stage, run by the engine's own ways on the data's rows; how
    much slower they are when all lanes run at once; what a request costs beside them, by asking a real server one
    after the other, unless request_ms says it.

    What is simulated: `Dispatch`, the scheduler's own code, decides who runs when. The machine is a number of cores
    that lanes and the server's event loop share: what asks for more than there are goes on slower in proportion. A
    batch asks for as many cores as lanes were measured to take from each other, the event loop for one, and it does
    one thing after the other. Not simulated are Python's lock beyond what batches were measured with, and the network.

    points: names, all of the bundle's by default. loads: as `load_bench` takes them; shares are of what 64 connections
    carry at the same point. lanes, threads, batching, max_queued_rows: the server's settings. rows: a request.
    seconds: that are simulated. client: whether the client shares the machine with the server, as that of
    `load_bench` does. Raises InputError.
    """
    if lanes is None:
        lanes = 2 if usable_cores() > 1 else 1
    _check(lanes, threads, batching, rows, seconds, max_queued_rows, request_ms)
    with Cascade.load(bundle, threads=threads, spin_us=AWAKE) as cascade:
        unknown = [name for name in points if name not in cascade.operating_points]
        if unknown:
            raise InputError(f"operating_point is {unknown[0]!r}, expected one of {list(cascade.operating_points)}.")
        names = list(dict.fromkeys(points or cascade.operating_points))
        bank = Bank(cascade, data, names, seed=seed)
        began = time.perf_counter()
        laboratory = Laboratory(cascade, bank, batching, seed=seed)
        cores = float(usable_cores())
        measured = laboratory.measure(names, lanes, cores, rows=rows)
        options = ["--batching", batching, "--lanes", str(lanes)]
        options += [] if threads is None else ["--threads", str(threads)]
        cost = RequestCost.of((request_ms or 0.0) / 1e3)
        if request_ms is None or client:
            alone = Player(laboratory, measured, Machine(1, math.inf, 1 << 30, RequestCost()), names[-1], rows)
            batches = alone.closed(1, warm=0.0, seconds=2.0, seed=seed).latencies
            lone, carried = lone_requests(bundle, data, names[-1], options, rows=rows, seed=seed)
            found = request_cost(lone, batches, measured.busy)
            there = Machine(lanes, cores, max_queued_rows, found)
            found = replace(
                found, disturbance=_disturbance(laboratory, measured, there, names[-1], rows, carried, seed)
            )
            cost = found if request_ms is None else replace(cost, client=found.client, disturbance=found.disturbance)
        cost = cost if client else replace(cost, client=0.0)
        measuring = time.perf_counter() - began
        here = Machine(lanes, cores, max_queued_rows, cost)
        lines: list[Line] = []
        notes: list[str] = []
        began, simulated = time.perf_counter(), 0.0
        for done, (load, name) in enumerate([(load, name) for load in loads for name in names]):
            player = Player(laboratory, measured, here, name, rows)
            played, load = _play(player, load, seconds, [seed, done // len(names)])
            simulated += _WARM + played.seconds
            lines.append(_line(load, name, played, rows))
            if isinstance(load, Poisson) and played.carried < _BEHIND * (load.rate or 0.0) * played.seconds:
                notes.append(f"{load.name}: {name} falls behind, so latencies grow with the time that is simulated.")
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
        "cores": cores,
        "seconds": seconds,
        "seed": seed,
        "measured": {
            "seconds": measuring,
            "request_ms": cost.typical * 1e3,
            "request_ms_after_pauses": [float(np.median(one)) * 1e3 for one in cost.beside],
            "work_share": cost.work,
            "disturbance": cost.disturbance,
            "client_ms": cost.client * 1e3,
            "lane_cores": measured.demand,
            "slower_together": measured.slower,
        },
        "faster_than_real_time": simulated / took,
    }
    return SimulationBench(about, lines, notes)


def _disturbance(
    laboratory: Laboratory, measured: Measured, machine: Machine, point: str, rows: int, carried: float, seed: int
) -> float:
    """With which the simulation carries as many requests a second on a few connections as the server did."""
    low, high = 0.0, 2.0
    for _ in range(7):
        middle = (low + high) / 2
        here = replace(machine, cost=replace(machine.cost, disturbance=middle))
        played = Player(laboratory, measured, here, point, rows).closed(COMPANY, warm=0.2, seconds=1.5, seed=seed)
        low, high = (middle, high) if played.carried / played.seconds > carried else (low, middle)
    return (low + high) / 2


def _check(
    lanes: int,
    threads: int | None,
    batching: str,
    rows: int,
    seconds: float,
    max_queued_rows: int,
    request_ms: float | None,
) -> None:
    used = 1 if threads is None else threads
    whole = {"lanes": lanes, "threads": used, "rows": rows, "max_queued_rows": max_queued_rows}
    for name, value in whole.items():
        if value < 1:
            raise InputError(f"{name} is {value}, expected at least 1.")
    if batching not in BATCHING:
        raise InputError(f"batching is {batching!r}, expected one of {', '.join(BATCHING)}.")
    if not 0 < seconds < math.inf:
        raise InputError(f"seconds is {seconds!r}, expected more than 0.")
    if request_ms is not None and not 0 <= request_ms < math.inf:
        raise InputError(f"request_ms is {request_ms!r}, expected milliseconds from 0 on.")


def _play(player: Player, load: Load, seconds: float, seed: list[int]) -> tuple[Played, Load]:
    if isinstance(load, Closed):
        return player.closed(load.connections, warm=_WARM, seconds=seconds, seed=seed), load
    if isinstance(load, Trace):
        return player.open(np.array(load.offsets), warm=0.0, seconds=load.seconds, seed=seed), load
    if load.rate is None:
        assert load.share is not None
        carried = player.closed(_CARRIES, warm=_WARM, seconds=min(seconds, 5.0), seed=seed)
        load = replace(load, rate=load.share * carried.carried / carried.seconds)
    assert load.rate is not None
    arrivals = poisson(load.rate, _WARM + seconds, seed)
    return player.open(arrivals, warm=_WARM, seconds=seconds, seed=seed), load


def _line(load: Load, point: str, played: Played, rows: int) -> Line:
    there = len(played.latencies) > 0
    return {
        "load": load.name,
        "kind": type(load).__name__.lower(),
        "connections": load.connections if isinstance(load, Closed) else None,
        "rate": load.rate if isinstance(load, Poisson) else None,
        "point": point,
        "requests_per_second": played.carried / played.seconds,
        "rows_per_second": rows * played.carried / played.seconds,
        **{
            f"p{q * 100:.0f}_ms": float(np.quantile(played.latencies, q)) * 1e3 if there else None
            for q in (0.5, 0.9, 0.99)
        },
        "lanes_busy": played.busy,
        "event_loop_busy": played.event_loop,
        "batch_rows": played.batch_rows,
        "refused": played.refused,
    }


def document(found: SimulationBench) -> dict[str, Any]:
    """JSON-able; docs/guide/http.md says what is where."""
    return {"schema": SCHEMA, **found.about, "times": found.times, "notes": found.notes}
