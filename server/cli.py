"""`offramp serve`: load a bundle, listen, serve until a signal."""

import argparse
import os
import socket
import sys

from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError, OfframpError
from offramp.server.app import create_app, load
from offramp.server.connections.draining import BACKLOG, DrainingServer, end_at_once, hanging_up
from offramp.server.settings import Settings

_METAVARS = {
    "host": "ADDRESS",
    "operating_point": "NAME",
    "device": "DEVICE",
    "timeout": "SECONDS",
    "log_level": "LEVEL",
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


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 0, or 2 after one line that says what is wrong."""
    try:
        settings = Settings.of(**{name: getattr(args, name, None) for name in Settings.model_fields})
        with listen(settings.host, settings.port) as listener, load(settings.bundle, settings) as cascade:
            return serve(cascade, settings, listener)
    except OfframpError as error:
        print(f"offramp serve: {error}", file=sys.stderr)
        return 2


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address. It is bound before the bundle is loaded: a busy port is said at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise _busy(host, port, error) from error
    return listener


def _busy(host: str, port: int, error: OSError) -> InputError:
    return InputError(f"can't listen on {host} port {port}: {error.strerror or error}.")


def serve(cascade: Cascade, settings: Settings, listener: socket.socket) -> int:
    app = create_app(cascade, settings)
    try:
        # Two sockets may be bound to one address as long as neither listens: the second is told here.
        listener.listen(BACKLOG)
    except OSError as error:
        raise _busy(settings.host, listener.getsockname()[1], error) from error
    points = app.state.operating_points
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    others = ", ".join(name for name in points.points if name != points.default)
    greeting = (
        f"offramp serves {cascade.manifest.name} {cascade.manifest.version} at {address} (live page; {address}/docs)\n"
        f"operating point {points.default!r}; others: {others or 'none'}"
    )
    server = DrainingServer(app, settings, greeting)
    with hanging_up(server):
        server.run(sockets=[listener])
    if not server.drained:
        end_at_once(0)  # the drain's limit has passed; Python would wait for the threads
    return 0
