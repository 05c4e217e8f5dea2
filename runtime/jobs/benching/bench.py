"""The bench job: a bundle's operating points against one plain session, on this data and this machine."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from offramp.runtime.arrays import Floats
from offramp.runtime.arrays.cores import usable_cores
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError
from offramp.runtime.execution.cpu.session import AWAKE, available_threads, check_threads
from offramp.runtime.jobs.benching.answers import answers
from offramp.runtime.jobs.benching.plain import Run, plain_sessions
from offramp.runtime.jobs.benching.rows import Picked, pick, units
from offramp.runtime.jobs.benching.turns import Middle, middle, take_turns
from offramp.runtime.jobs.benching.verdict import Measured, Mode, Verdict, judge, ranked
from offramp.runtime.jobs.calibrating.about import machine, versions_of
from offramp.runtime.jobs.data.expected import Line
from offramp.runtime.points import OperatingPoint

SCHEMA = "offramp-bench/1"
SECONDS, PACE = 45.0, 20.0
BATCHES = (8, 32, 128)
Taker = tuple[str, str]
"""Who takes turns: ("plain", setting), ("point", name), ("nobody leaves", exits)."""
# How the time is shared out: a mode that sleeps gets fewer rounds out of it, and so does a large batch.
_SHARES = {(1, False): 3, (1, True): 6, (8, False): 2, (32, False): 3, (128, False): 5}
_BUSY = 0.5  # a load, in cores, from which on others are in the way
_LEAST = 0.3  # of the time asked for is left for the turns, however long loading took

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Bench:
    """Tables are lists of flat dicts, one a line: `pandas.DataFrame(found.times)`.

    about: model, machine, versions, threads, load before it began, the rival in words. rows, of: rows taken, of so
    many. points: a line a point: accuracy if there are labels, FLOPs, coverage, exits. times: a line a mode for the
    plain session (point None) and for each point: milliseconds a batch, rows a second, the speed-up over the plain
    session, each with a 95% interval; costs_ms: what the point's heads and gates cost; saves_ms: what leaving early
    saves. verdicts: the one to speak of first first.
    """

    about: Mapping[str, Any]
    rows: int
    of: int
    points: list[Line]
    times: list[Line]
    verdicts: list[Verdict]
    notes: list[str]

    @property
    def verdict(self) -> Verdict:
        return self.verdicts[0]


def bench(
    bundle: str | Path,
    data: str | Path,
    *,
    points: Sequence[str] = (),
    threads: int | None = None,
    seconds: float = SECONDS,
    pace: float = PACE,
    batches: Sequence[int] = BATCHES,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> Bench:
    """Time every operating point and the whole network as one plain session, on the CPU, taking turns.

    Single rows one right after another and one every `pace` milliseconds, then batches. What is timed is an answer
    from the model's input arrays to labels: preparing raw rows is left out on both sides.

    data: what `record` takes; labels are welcome. points: names, all of the bundle's by default. threads: of every
    session, by default what the machine allows. seconds: about how long all of it may take; a large model takes longer.
    progress: called with seconds spent and in all. Raises InputError for data or a point that isn't there.
    """
    _check(seconds, pace, threads)
    told = _Told(progress, seconds)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    threads = threads or available_threads()
    with (
        Cascade.load(bundle, threads=threads, spin_us=AWAKE) as cascade,
        Cascade.load(bundle, threads=threads) as asleep,
    ):
        names = dict.fromkeys(points) or cascade.calibration.points
        chosen = {name: cascade.calibration.point(name) for name in names}
        picked = pick(cascade.bundle, data, allow_nonfinite=allow_nonfinite)
        rivals, rival = plain_sessions(cascade.bundle, threads)
        lines = answers(cascade, chosen, picked, allow_nonfinite=allow_nonfinite, progress=told)
        whole = {name: point.out_of_reach() for name, point in chosen.items()}
        runs: dict[Taker, Run] = {("plain", setting): run for setting, run in rivals.items()}
        modes = [Mode(1), Mode(1, pace), *map(Mode, batches)]
        told.begin()

        def runs_of(mode: Mode) -> dict[Taker, Run]:
            one = cascade if mode.pace is None else asleep  # as README has each loaded
            made = {("point", name): _run(one.at(point), allow_nonfinite) for name, point in chosen.items()}
            # Points with the same exits share what they cost if nobody leaves.
            made |= {
                _nobody(point): _run(one.at(point), allow_nonfinite) for point in whole.values() if len(point.exits) > 1
            }
            return runs | made

        times, measured, notes = _turns(cascade, runs_of, picked, modes, whole, told)
    # Of a point that leaves nowhere early nothing is to be said, unless there is no other.
    early = [name for name, point in chosen.items() if len(point.exits) > 1] or list(chosen)[:1]
    judged = [judge(name, len(chosen[name].exits) - 1, measured[name], threads) for name in early]
    means = [float(np.mean([one.speedup.value for one in measured[name]])) for name in early]
    manifest = cascade.manifest
    return Bench(
        about={
            "model": {"name": manifest.name, "version": manifest.version},
            "machine": machine(),
            "versions": versions_of(),
            "threads": threads,
            "load": load,
            "rival": rival,
            "data": str(data),
        },
        rows=len(picked),
        of=picked.of,
        points=lines,
        times=times,
        verdicts=ranked(judged, means),
        notes=[*_about_load(load), *_about_rows(picked), *notes],
    )


def _check(seconds: float, pace: float, threads: int | None) -> None:
    if not 0 < seconds < float("inf"):
        raise InputError(f"seconds is {seconds!r}, expected more than 0.")
    if not 0 < pace <= 1000:
        raise InputError(f"pace is {pace!r}, expected milliseconds above 0 and up to 1000.")
    if threads is not None:
        check_threads(threads)


class _Told:
    """How much of the time is spent."""

    def __init__(self, progress: Progress | None, seconds: float) -> None:
        self._progress, self._started, self._seconds = progress, time.monotonic(), seconds
        self._end = self._started + seconds
        self()

    def begin(self) -> None:
        """Whatever came before, there is time for turns."""
        self._end = max(self._end, time.monotonic() + _LEAST * self._seconds)

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def __call__(self, done: bool = False) -> None:
        if self._progress is not None:
            spent = round(time.monotonic() - self._started)
            total = max(1, spent) if done else max(spent + 1, round(self._end - self._started))
            self._progress(total if done else spent, total)


def _turns(
    cascade: Cascade,
    runs_of: Callable[[Mode], dict[Taker, Run]],
    picked: Picked,
    modes: Sequence[Mode],
    whole: Mapping[str, OperatingPoint],
    told: _Told,
) -> tuple[list[Line], dict[str, list[Measured]], list[str]]:
    lines: list[Line] = []
    measured: dict[str, list[Measured]] = {name: [] for name in whole}
    shares = [_SHARES.get((mode.rows, mode.pace is not None), 3) for mode in modes]
    short = []
    best: set[str] = set()  # settings hardly matter to larger batches, which take the most time
    for k, mode in enumerate(modes):
        work, repeated = units(picked, cascade.manifest, mode.rows, most=64)
        if repeated:
            short.append(str(mode.rows))
        runs = runs_of(mode)
        if mode.rows > 1 and best:
            runs = {who: run for who, run in runs.items() if who[0] != "plain" or who[1] in best}
        taken = take_turns(
            runs,
            work,
            seconds=told.left * shares[k] / sum(shares[k:]),
            pace=None if mode.pace is None else mode.pace / 1e3,
            progress=told,
        )
        rival, made = _lines(mode, taken, whole)
        if mode.rows > 1:
            best = {made[0]["setting"]}
        lines += made
        for name, point in whole.items():
            nobody = taken[_nobody(point) if len(point.exits) > 1 else ("point", name)]
            measured[name].append(
                Measured(
                    mode,
                    middle(rival / taken["point", name]),
                    *(float(np.median(each)) for each in (rival, taken["point", name], nobody)),
                )
            )
    told(done=True)
    notes = []
    if short:
        most = max(pool.rows for pool in picked.pools)  # rows of different shapes share no batch
        rows = "1 row" if most == 1 else f"{most} different rows"
        if len(picked.pools) > 1:
            rows += " of one shape"
        notes = [f"there are only {rows}: they were repeated to fill batches of {' and '.join(short)}."]
    return lines, measured, notes


def _lines(mode: Mode, taken: Mapping[Taker, Floats], whole: Mapping[str, OperatingPoint]) -> tuple[Floats, list[Line]]:
    """The rival's seconds, by whichever of its settings is faster in this mode, and a line for it and each point."""
    best = min((who for who in taken if who[0] == "plain"), key=lambda who: float(np.median(taken[who])))
    rival = taken[best]
    lines = [_line(mode, None, rival, rival) | {"setting": best[1]}]
    for name, point in whole.items():
        nobody = taken[_nobody(point)] if len(point.exits) > 1 else None
        lines.append(_line(mode, name, taken["point", name], rival, nobody))
    return rival, lines


def _line(mode: Mode, point: str | None, seconds: Floats, rival: Floats, nobody: Floats | None = None) -> Line:
    whole = None if nobody is None else float(np.median(nobody))
    return {
        "mode": mode.name,
        "batch": mode.rows,
        "pace_ms": mode.pace,
        "point": point,
        "rounds": len(seconds),
        **_ends("ms", middle(seconds * 1e3)),
        **_ends("rows_per_second", middle(mode.rows / seconds)),
        **_ends("speedup", middle(rival / seconds)),
        "costs_ms": None if whole is None else (whole - float(np.median(rival))) * 1e3,
        "saves_ms": None if whole is None else (whole - float(np.median(seconds))) * 1e3,
        "setting": None,
    }


def _ends(name: str, found: Middle) -> Line:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def _run(cascade: Cascade, allow_nonfinite: bool) -> Run:
    def run(inputs: Mapping[str, Any]) -> object:
        out = cascade.predict(inputs, allow_nonfinite=allow_nonfinite)
        return out.label, out.abstain  # looked at: they are made out only then

    return run


def _nobody(point: OperatingPoint) -> Taker:
    return "nobody leaves", str(point.exits)


def _about_load(load: float | None) -> list[str]:
    cores = usable_cores()
    if load is None or load <= _BUSY * cores:
        return []
    return [
        f"the machine was busy before this began (load {load:.1f} on {cores} core{'' if cores == 1 else 's'}): "
        "intervals are wide, and threads that wait for each other lose most. Run it again when it is idle."
    ]


def _about_rows(picked: Picked) -> list[str]:
    notes = []
    if picked.reach < picked.of:
        notes.append(f"rows are drawn from the first {picked.reach:,}.")
    if len(picked.pools) > 1:
        notes.append(f"rows come in {len(picked.pools)} shapes, and only those of one shape share a batch.")
    return notes


def document(found: Bench) -> dict[str, Any]:
    """JSON-able; docs/guide/calibration.md says what is where."""
    return {
        "schema": SCHEMA,
        **found.about,
        "rows": found.rows,
        "of": found.of,
        "verdict": found.verdict.sentence,
        "verdicts": [{**asdict(one), "pays": [mode.name for mode in one.pays]} for one in found.verdicts],
        "operating_points": found.points,
        "times": found.times,
        "notes": found.notes,
    }
