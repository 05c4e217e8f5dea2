"""wrk and oha, if they are there: written in C and Rust, they take less of the machine than we do."""

import json
import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from offramp.runtime.arrays.cores import usable_cores
from offramp.runtime.errors import OfframpError
from offramp.server.load.clients import Measured, processes
from offramp.server.load.requests import PREDICT, post

WRK, OHA = "wrk", "oha"
_SCRIPT = Path(__file__).with_name("wrk.lua")
_TIMEOUT = 30  # seconds for one request, as our own client has it
_QUANTILES = (0.5, 0.9, 0.99)
Tool = Callable[..., Measured]
"""tool(url, bodies, connections, seconds=, warm=, path=)"""


def found() -> dict[str, Tool]:
    """What is on the PATH, the better one first."""
    return {name: tool for name, tool in ((WRK, wrk), (OHA, oha)) if shutil.which(name)}


def wrk(
    url: str, bodies: Sequence[bytes], connections: int, *, seconds: float, warm: float, path: str = PREDICT
) -> Measured:
    """A closed loop by wrk, whose threads go through the bodies in turn.

    Its percentiles count a request that took long as if others had waited behind it, so they are above those of our
    own client. It tells no statuses apart: "4xx or 5xx" is all of them.
    """
    threads = min(processes(), connections)
    host = url.removeprefix("http://")
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch) / "requests", Path(scratch) / "wrk.lua"
        requests = [post(host, path, body) for body in bodies]
        source.write_bytes(b"".join(b"%d\n%b" % (len(each), each) for each in requests))
        script.write_text(_SCRIPT.read_text(encoding="utf-8").replace("@SOURCE@", str(source)), encoding="utf-8")

        def command(last: float) -> list[str]:
            # wrk takes whole seconds.
            length = f"{max(1, math.ceil(last))}s"
            fixed = ["-t", str(threads), "-c", str(connections), "--timeout", f"{_TIMEOUT}s"]
            return [WRK, *fixed, "-d", length, "-s", str(script), f"{url}{path}"]

        if warm:
            _run(command(warm))
        printed, busy = _run(command(seconds))
    return read_wrk(printed, busy / threads)


def read_wrk(printed: str, busy: float) -> Measured:
    """What our script has it print at the end. Raises OfframpError if that isn't there."""
    try:
        line = next(line for line in printed.splitlines() if line.startswith("offramp "))
        told: dict[str, float] = json.loads(line.removeprefix("offramp "))
        answered, failed = int(told["requests"]), int(told["status"])
        outcomes = {
            "2xx or 3xx": answered - failed,
            "4xx or 5xx": failed,
            "refused": int(told["connect"]),
            "hung up": int(told["read"] + told["write"]),
            "timed out": int(told["timeout"]),
        }
        quantiles = {q: told[f"p{q * 100:.0f}"] / 1e3 if answered else math.nan for q in _QUANTILES}
        seconds = told["microseconds"] / 1e6
    except (StopIteration, KeyError, ValueError) as error:
        raise OfframpError(f"wrk printed {printed[-300:]!r}, expected what our script has it print.") from error
    kept = {name: count for name, count in outcomes.items() if count}
    return Measured(seconds, answered - failed, np.zeros(0), kept, busy, WRK, quantiles)


def oha(
    url: str, bodies: Sequence[bytes], connections: int, *, seconds: float, warm: float, path: str = PREDICT
) -> Measured:
    """A closed loop by oha, which draws its bodies from a file at random.

    Its percentiles count errors, too. Raises OfframpError for an oha so old that it knows one body only.
    """
    known = subprocess.run([OHA, "--help"], capture_output=True, text=True, check=False).stdout
    if "-Z " not in known and len(set(bodies)) > 1:
        raise OfframpError("this oha sends one body only, which would be one row again and again: get a newer one.")
    output = ["--output-format", "json"] if "--output-format" in known else ["-j"]
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "bodies"
        source.write_bytes(b"\n".join(bodies) + b"\n" if len(set(bodies)) > 1 else bodies[0])

        def command(last: float) -> list[str]:
            fixed = [OHA, "--no-tui", *output, "-c", str(connections), "-t", f"{_TIMEOUT}s", "-m", "POST"]
            sent = ["-T", "application/json", "-Z" if len(set(bodies)) > 1 else "-D", str(source)]
            return [*fixed, *sent, "-z", f"{max(1, round(last * 1e3))}ms", f"{url}{path}"]

        if warm:
            _run(command(warm))
        started = time.monotonic()
        printed, busy = _run(command(seconds))
    # It has as many threads as there are cores.
    return read_oha(printed, busy / usable_cores(), time.monotonic() - started)


def read_oha(printed: str, busy: float, wall: float) -> Measured:
    """What it prints as JSON. wall: seconds that it ran. Raises OfframpError if it isn't JSON as we know it."""
    try:
        told: dict[str, Any] = json.loads(printed)
        statuses = {str(status): int(count) for status, count in told["statusCodeDistribution"].items()}
        # Requests that are under way at the end are no errors of the server's.
        errors = {str(e): int(n) for e, n in told["errorDistribution"].items() if "deadline" not in str(e)}
        carried = sum(count for status, count in statuses.items() if status.startswith("2"))
        seconds = float(told["summary"]["total"] or wall)
        of = told["latencyPercentiles"]
        quantiles = {q: _ms(of.get(f"p{q * 100:.0f}")) for q in _QUANTILES}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OfframpError(f"oha printed {printed[-300:]!r}, expected its JSON.") from error
    return Measured(seconds, carried, np.zeros(0), {**statuses, **errors}, busy, OHA, quantiles)


def _ms(seconds: float | None) -> float:
    return math.nan if seconds is None else float(seconds) * 1e3


def _run(command: Sequence[str]) -> tuple[str, float]:
    """What it printed, and the cores that it took on average. Raises OfframpError if it fails."""
    import resource

    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - started
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise OfframpError(f"{command[0]} ended with {done.returncode}: {said[-1] if said else 'it said nothing'}")
    spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return done.stdout, spent / wall if wall else 0.0
