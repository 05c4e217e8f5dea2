"""offramp bench"""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from offramp.runtime.cli.options import DATA, add_json, add_nonfinite, add_points, seed, write_json
from offramp.runtime.cli.progress import bar
from offramp.runtime.errors import InputError, OfframpError, how_to_install
from offramp.runtime.files import write_atomically
from offramp.runtime.jobs.benching.bench import PACE, SECONDS, bench, document
from offramp.runtime.jobs.benching.describe import describe
from offramp.runtime.jobs.benching.page import page

# What goes with a server only, and what without one only, as argparse names them.
_LOADED = ("connections", "rate", "trace", "rows", "turns", "client", "processes", "seed")
_PLAIN = ("pace", "html")
_SIMULATED = ("lanes", "batching", "max_queued_rows", "measured_seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "In the program it asks whether leaving early pays, on the CPU. With a server's address, or --load, it sends "
        "requests over HTTP: offramp bench http://127.0.0.1:8000 test.npz --rate 70%. "
        "Exit codes: 0, whether it pays or not; 2 bad input."
    )
    parser.add_argument("bundle", metavar="BUNDLE|URL", help="a bundle's folder, or a running server: http://host:port")
    parser.add_argument("data", type=Path, help=DATA)
    add_points(parser)
    parser.add_argument("--threads", type=int, help="threads of every session (default: what the machine allows)")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"about how long it may take (default: {SECONDS:g}); of a server: each measurement (default: 5)",
    )
    parser.add_argument(
        "--pace",
        type=float,
        metavar="MS",
        help=f"milliseconds between single rows that come one by one (default: {PACE:g})",
    )
    add_json(parser)
    parser.add_argument("--html", type=Path, help="also write a page with the figures")
    add_nonfinite(parser)
    _add_load(parser.add_argument_group("load on a server"))
    _add_simulation(parser.add_argument_group("a server that is simulated"))
    _add_tuning(parser.add_argument_group("settings of a server"))


def _add_load(group: Any) -> None:
    group.add_argument("--load", action="store_true", help="serve the bundle in a process of its own, and ask that")
    group.add_argument(
        "--connections",
        type=int,
        nargs="+",
        metavar="N",
        help="closed loop: so many connections, each asks again once it is answered (default: 16 64)",
    )
    group.add_argument(
        "--rate",
        nargs="+",
        action="extend",
        metavar="R",
        help="open loop: so many requests a second at random, so many rows (3000rows), or 70%% of what the closed loop "
        "carried at full",
    )
    group.add_argument("--trace", metavar="FILE", help="open loop: recorded arrivals, one a line, in seconds")
    group.add_argument("--rows", type=int, help="rows a request (default: 1)")
    group.add_argument("--turns", type=int, help="measurements of each point (default: 3)")
    group.add_argument(
        "--client", help="of the closed loop: wrk, oha, own (default: auto, the first of them that is here)"
    )
    group.add_argument("--processes", type=int, help="of offramp's own client (default: a quarter of the cores)")
    group.add_argument("--seed", type=seed, help="of the rows and arrivals (default: 0)")


def _add_simulation(group: Any) -> None:
    group.add_argument(
        "--simulate",
        action="store_true",
        help="the server's scheduler under a clock that isn't real, by times measured here: --rate 3000rows --lanes 4",
    )
    group.add_argument("--lanes", type=int, metavar="N", help="batches that run together (default: the server's)")
    group.add_argument("--batching", metavar="HOW", help="auto, graph or stages (default: auto)")
    group.add_argument("--max-queued-rows", type=int, metavar="N", help="rows that may wait in all (default: 65536)")
    group.add_argument(
        "--measured-seconds",
        type=float,
        metavar="S",
        help="about how long a server is measured first, at each point (default: 60)",
    )


def _add_tuning(group: Any) -> None:
    group.add_argument(
        "--tune", action="store_true", help="serve the bundle with several lanes, threads and batchings: which is best?"
    )
    group.add_argument(
        "--p99-ms",
        type=float,
        metavar="MS",
        help="that the best settings keep at 16 and 64 connections (default: twice the least p99 of all)",
    )


def run(args: argparse.Namespace) -> int:
    if args.simulate:
        return _simulated(args)
    _refuse(args, _SIMULATED, "goes with --simulate")
    if args.tune:
        return _tuned(args)
    _refuse(args, ("p99_ms",), "goes with --tune")
    if args.load or "://" in args.bundle:
        return _under_load(args)
    _refuse(args, _LOADED, "goes with a server's address, --load or --simulate")
    with bar("benching, seconds") as progress:
        found = bench(
            args.bundle,
            args.data,
            points=args.operating_point,
            threads=args.threads,
            seconds=SECONDS if args.seconds is None else args.seconds,
            pace=PACE if args.pace is None else args.pace,
            allow_nonfinite=args.allow_nonfinite,
            progress=progress,
        )
    if args.html is not None:
        write_atomically(args.html, page(found).encode())
    if not write_json(args.json, document(found)):
        print(describe(found))
    return 0


def _refuse(args: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(args, name) not in (None, False, []):
            raise InputError(f"--{name.replace('_', '-')} {why}.")


def _under_load(args: argparse.Namespace) -> int:
    """The server's room isn't below this one, and it needs FastAPI: it is imported only now."""
    url = "://" in args.bundle
    _refuse(args, (*_PLAIN, "allow_nonfinite"), "doesn't go with a server")
    if url:
        _refuse(args, ("load", "threads"), "goes with a bundle, and this is a server's address")
    serving, job, arrivals, text = _server_rooms("load.serving", "load.bench", "load.arrivals", "load.describe")
    loads = _loads(args, job.CONNECTIONS, arrivals)
    given = {
        name: getattr(args, name)
        for name in ("seconds", "rows", "turns", "client", "processes", "seed")
        if getattr(args, name) is not None
    }
    # As for Ctrl-C: the server and the clients are ended, whoever ends this.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    threads = [] if args.threads is None else ["--threads", str(args.threads)]
    server: AbstractContextManager[str] = (
        nullcontext(args.bundle) if url else serving.serving(args.bundle, options=threads)
    )
    with server as address, bar("measurements") as progress:
        found = job.load_bench(address, args.data, points=args.operating_point, loads=loads, progress=progress, **given)
    if not write_json(args.json, job.document(found)):
        print(text.describe(found))
    if not found.answered:
        raise OfframpError("the server answered no request in time under any load: see the errors and notes.")
    return 0


def _server_rooms(*names: str) -> list[Any]:
    """Modules of the server's, which isn't below this room, and needs FastAPI."""
    try:
        return [importlib.import_module(f"offramp.server.{name}") for name in names]
    except ModuleNotFoundError as error:
        raise InputError(f"load on a server needs {error.name}. {how_to_install('server')}") from error


def _simulated(args: argparse.Namespace) -> int:
    others = ("turns", "client", "processes", "load", "tune", "p99_ms", *_PLAIN, "allow_nonfinite")
    _refuse(args, others, "doesn't go with --simulate")
    if "://" in args.bundle:
        raise InputError("--simulate goes with a bundle, and this is a server's address.")
    job, arrivals, text = _server_rooms("simulating.simulate", "load.arrivals", "simulating.describe")
    given = {
        name: getattr(args, name)
        for name in ("seconds", "rows", "seed", "lanes", "threads", "batching", "max_queued_rows", "measured_seconds")
        if getattr(args, name) is not None
    }
    loads = _loads(args, (), arrivals) or job.LOADS
    # As for Ctrl-C: the server that is measured is ended, whoever ends this.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with bar("simulations") as progress:
        found = job.simulate_bench(
            args.bundle,
            args.data,
            points=args.operating_point,
            loads=loads,
            progress=progress,
            **given,
        )
    if not write_json(args.json, job.document(found)):
        print(text.describe(found))
    return 0


def _tuned(args: argparse.Namespace) -> int:
    others = ("load", "connections", "rate", "trace", "client", "processes", "threads", *_PLAIN, "allow_nonfinite")
    _refuse(args, others, "doesn't go with --tune")
    if "://" in args.bundle:
        raise InputError("--tune goes with a bundle, and this is a server's address.")
    if len(args.operating_point) > 1:
        raise InputError("--operating-point is given more than once, expected one to tune for.")
    (job,) = _server_rooms("load.tune")
    given = {
        name: getattr(args, name)
        for name in ("seconds", "rows", "turns", "seed", "p99_ms")
        if getattr(args, name) is not None
    }
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with bar("measurements") as progress:
        found = job.tune(
            args.bundle, args.data, point=next(iter(args.operating_point), None), progress=progress, **given
        )
    if not write_json(args.json, job.document(found)):
        print(job.describe(found, args.bundle))
    return 0


def _loads(args: argparse.Namespace, default: Sequence[int], arrivals: Any) -> list[Any]:
    """default: connections of the closed loop that shares of it need, or that are all there is."""
    rates = []
    for text in args.rate or []:
        try:
            rates.append(arrivals.rate(text, 1 if args.rows is None else args.rows))
        except ValueError:
            raise InputError(
                f"--rate is {text!r}, expected requests a second above 0, rows as in 3000rows, or a percentage."
            ) from None
    traces = [arrivals.read_trace(args.trace)] if args.trace else []
    # A share is of a closed loop.
    alone = (rates or traces) and not any(one.share is not None for one in rates)
    connections = args.connections or ([] if alone else default)
    if any(count < 1 for count in connections):
        raise InputError(f"--connections is {min(connections)}, expected at least 1.")
    return [*map(arrivals.Closed, connections), *rates, *traces]
