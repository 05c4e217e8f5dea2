"""`offramp serve`: load a bundle, listen, serve until a signal."""

import argparse
import errno
import gc
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from fastapi import FastAPI
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError, OfframpError
from offramp.runtime.execution.cpu.session import available_threads
from offramp.server.app import create_app, load
from offramp.server.connections.draining import BACKLOG, DrainingServer, end_at_once, hanging_up
from offramp.server.connections.workers import serve_together
from offramp.server.settings import Settings

_TRIES = 8  # free ports
Watch = Callable[[FastAPI], None]
_METAVARS = {
    "host": "ADDRESS",
    "operating_point": "NAME",
    "device": "DEVICE",
    "timeout": "SECONDS",
    "log_level": "LEVEL",
    "batching": "HOW",
    "recalibration": "WHERE",
    "recalibration_mode": "MODE",
    "recalibration_shadow": "SHARE",
    "recalibration_share": "SHARE",
    "kept_durably": "YES|NO",
    "overload_operating_point": "NAME",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option a setting; those that aren't given are read from the environment."""
    parser.add_argument("bundle", nargs="?", help=_help("bundle"))
    for name in Settings.model_fields:
        if name != "bundle":
            parser.add_argument(f"--{name.replace('_', '-')}", default=None, metavar=_metavar(name), help=_help(name))
    parser.epilog = "Each option can also be an environment variable: OFFRAMP_PORT=8000, and so on."


def _help(name: str) -> str:
    field = Settings.model_fields[name]
    default = "" if field.default is None else f" (default {field.default})"
    return f"{field.description}{default}"


def _metavar(name: str) -> str:
    return _METAVARS.get(name, "N")


def run(args: argparse.Namespace, watch: Watch | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 0, or 2 after one line that says what is wrong.

    watch: called with the app before it serves.
    """
    try:
        settings = Settings.of(**{name: getattr(args, name, None) for name in Settings.model_fields})
        with ExitStack() as stack:
            listeners = [stack.enter_context(one) for one in listen(settings.host, settings.port)]
            if settings.workers > 1:
                return serve_together(serve, settings.of_a_worker(available_threads()), listeners)
            return serve(settings, listeners, watch=watch)
    except OfframpError as error:
        print(f"offramp serve: {error}", file=sys.stderr)
        return 2


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to all addresses of a host, which are two for localhost, at one port.

    They are bound before the bundle is loaded: a busy port is said at once.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _busy(host, port, error) from error
    for _ in range(_TRIES):
        listeners: list[socket.socket] = []
        try:
            _bind(found, listeners)
            return listeners
        except OSError as error:
            for listener in listeners:
                listener.close()
            # A free port of the first address may be taken at the second.
            if port or not listeners or error.errno != errno.EADDRINUSE:
                raise _busy(host, port, error) from error
            busy = error
    raise _busy(host, port, busy)


def _bind(found: list[Any], listeners: list[socket.socket]) -> None:
    """Bind what getaddrinfo has found. An address that this machine lacks is passed over if another is there."""
    lacking: OSError | None = None
    places = {(family, address): (kind, protocol) for family, kind, protocol, _, address in found}
    for (family, address), (kind, protocol) in places.items():
        if listeners and not address[1]:
            address = (address[0], listeners[0].getsockname()[1], *address[2:])
        try:
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            lacking = error  # no IPv6 here
            continue
        try:
            if os.name == "posix":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and len(places) > 1:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # else it takes IPv4's port, too
            listener.bind(address)
        except OSError as error:
            listener.close()
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            lacking = error
        else:
            listeners.append(listener)
    if not listeners:
        raise lacking or OSError("it has no address")


def _busy(host: str, port: int, error: OSError) -> InputError:
    return InputError(f"can't listen on {host} port {port}: {error.strerror or error}.")


def serve(
    settings: Settings, listeners: Sequence[socket.socket], greets: bool = True, watch: Watch | None = None
) -> int:
    """Serve until a signal. greets: whether it says where it listens. Returns the exit code."""
    with load(settings.bundle, settings) as cascade:
        app = create_app(cascade, settings)
        app.state.engine.measure()
        if watch is not None:
            watch(app)
        try:
            # Two sockets may be bound to one address as long as neither listens: the second is told here.
            for listener in listeners:
                listener.listen(BACKLOG)
        except OSError as error:
            raise _busy(settings.host, listeners[0].getsockname()[1], error) from error
        server = DrainingServer(app, settings, _greeting(app, cascade, settings, listeners) if greets else "")
        # What is here stays: each full round of the garbage collector would go through it, with Python's lock held.
        gc.collect()
        gc.freeze()
        with hanging_up(server):
            server.run(sockets=list(listeners))
        if not server.drained:
            end_at_once(0)  # the drain's limit has passed; Python would wait for the threads
        return 0


def _greeting(app: FastAPI, cascade: Cascade, settings: Settings, listeners: Sequence[socket.socket]) -> str:
    points = app.state.operating_points
    host, port = listeners[0].getsockname()[:2]
    if len(listeners) > 1:
        host = settings.host  # the name of them all
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    others = ", ".join(name for name in points.points if name != points.default)
    workers = f", {settings.workers} workers" if settings.workers > 1 else ""
    return (
        f"offramp serves {cascade.manifest.name} {cascade.manifest.version} at {address} (live page; {address}/docs)\n"
        f"operating point {points.default!r}; others: {others or 'none'}\n"
        f"runs on {cascade.fingerprint}{workers}"
    )
