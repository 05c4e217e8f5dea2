"""offramp demo: a real server over the digits that ship with offramp, asked over HTTP, and what that saved.

First it keeps the exits that pay on this machine, as `offramp repack --auto` does.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offramp.runtime import Cascade, sample
from offramp.runtime.errors import OfframpError
from offramp.runtime.jobs.bundles.repack import choose_exits, describe, repack
from offramp.runtime.jobs.bundles.timing import time_parts

POINTS = ("full", "balanced", "fast")
_REQUEST_ROWS = 16
_PATIENCE = 60.0  # seconds for the server to come up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="stop when the table is printed")
    parser.add_argument("--port", type=int, default=0, help="port to serve on (default: a free one)")


def run(args: argparse.Namespace) -> int:
    images, labels = sample.heldout()
    with tempfile.TemporaryDirectory() as scratch, _server(_worthwhile(images, Path(scratch)), args.port) as address:
        print(
            f"serving {sample.BUNDLE.name} at {address}; sending {len(labels)} held-out digits over HTTP …",
            flush=True,
        )
        results = _ask(address, images.tolist(), labels.tolist())
        print(_report(results))
        print(f"\nlook at it: {address}/   (API: {address}/docs, metrics: {address}/metrics)", flush=True)
        if args.once:
            return 0
        print("Ctrl-C ends it.", flush=True)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            print()
            return 0


def _worthwhile(images: Any, scratch: Path) -> Path:
    """What `offramp repack --auto` makes of the digits: the exits that pay on this machine."""
    with Cascade.load(sample.BUNDLE) as cascade:
        timings = time_parts(cascade, {}, seconds=2.0)
        records = cascade.record({"x": images})
        choices = choose_exits(cascade.manifest, cascade.calibration.points, records, timings)
    print(f"which exits pay on this machine?\n{describe(choices)}\n")
    return repack(sample.BUNDLE, scratch / "digits", choices[0].exits)


@contextmanager
def _server(bundle: Path, port: int) -> Iterator[str]:
    """`offramp serve` in a process of its own, ready to answer."""
    port = _free_port(port)
    command = [sys.executable, "-m", "offramp.runtime.cli", "serve", str(bundle)]
    command += ["--port", str(port), "--operating-point", "balanced"]
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + _PATIENCE
        while True:
            if process.poll() is not None:
                said = (process.stderr.read() if process.stderr else "").strip()
                raise OfframpError(f"the server stopped at once: {said or f'exit code {process.returncode}'}")
            try:
                urllib.request.urlopen(f"{address}/v2/health/ready", timeout=1).close()
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if time.monotonic() > deadline:
                    raise OfframpError(f"the server wasn't ready within {_PATIENCE:.0f} s.") from None
                time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port(port: int) -> int:
    """The port, if nobody has it, or any free one for 0: another server's answers must not be taken for ours."""
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise OfframpError(f"port {port}: {getattr(error, 'strerror', None) or error}.") from error
        return int(probe.getsockname()[1])


@dataclass
class _Result:
    """The answers of one operating point, and how long each kind of request took, in milliseconds."""

    right: list[bool] = field(default_factory=list)
    exit: list[int] = field(default_factory=list)
    abstain: list[bool] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)
    single: list[float] = field(default_factory=list)
    batch: list[float] = field(default_factory=list)


def _ask(address: str, images: list[Any], labels: list[int]) -> dict[str, _Result]:
    """Every row at every operating point, in turn, so that what the machine does meanwhile hits all alike."""
    results = {name: _Result() for name in POINTS}
    for start in range(0, len(images), _REQUEST_ROWS):
        rows = images[start : start + _REQUEST_ROWS]
        for name, result in results.items():
            answers, took = _post(address, rows, name)
            result.batch.append(took)
            for answer, label in zip(answers, labels[start:], strict=False):
                result.right.append(answer["label"] == label)
                result.exit.append(answer["exit"])
                result.abstain.append(answer["abstain"])
                result.flops.append(answer["flops"])
    for row in images[:200]:
        for name, result in results.items():
            result.single.append(_post(address, [row], name)[1])
    return results


def _post(address: str, rows: list[Any], point: str) -> tuple[list[dict[str, Any]], float]:
    body = json.dumps({"instances": [{"x": row} for row in rows], "operating_point": point}).encode()
    request = urllib.request.Request(f"{address}/v1/predict", body, {"Content-Type": "application/json"})
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    return answer["predictions"], (time.perf_counter() - started) * 1e3


def _report(results: dict[str, _Result]) -> str:
    lines = ["", "operating point          " + "".join(f"{name:>12}" for name in results)]

    def line(title: str, cells: list[str]) -> None:
        lines.append(f"{title:<25}" + "".join(f"{cell:>12}" for cell in cells))

    exits = max(max(r.exit) for r in results.values()) + 1
    for j in range(exits):
        line(f"leave at exit {j}", [f"{r.exit.count(j) / len(r.exit):.1%}" for r in results.values()])
    for j in range(exits):
        line(
            f"accuracy at exit {j}",
            [_mean([ok for ok, e in zip(r.right, r.exit, strict=True) if e == j]) for r in results.values()],
        )
    line("accuracy in all", [_mean(r.right) for r in results.values()])
    line("abstained", [f"{sum(r.abstain)} rows" for r in results.values()])
    line(
        "error among answered",
        [_mean([not ok for ok, a in zip(r.right, r.abstain, strict=True) if not a]) for r in results.values()],
    )
    whole = sum(results["full"].flops)
    line("FLOPs saved", [f"{1 - sum(r.flops) / whole:.1%}" for r in results.values()])
    line("1 row over HTTP, median", [f"{statistics.median(r.single):.2f} ms" for r in results.values()])
    line(
        f"{_REQUEST_ROWS} rows over HTTP, median",
        [f"{statistics.median(r.batch):.2f} ms" for r in results.values()],
    )
    return "\n".join(lines)


def _mean(values: list[bool]) -> str:
    return f"{sum(values) / len(values):.2%}" if values else "-"
