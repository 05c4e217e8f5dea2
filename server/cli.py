"""`offramp serve`: load a bundle, listen, drain on SIGTERM."""

import argparse
import asyncio
import os
import socket
import sys
from contextlib import suppress
from types import FrameType

import uvicorn
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError, OfframpError, OutputLost
from offramp.server.app import create_app, load
from offramp.server.engine import Engine
from offramp.server.settings import Settings

_BACKLOG = 2048  # uvicorn's own
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


class DrainingServer(uvicorn.Server):
    """Listens until a signal; then fails readiness, answers every request that is here, and stops.

    While it drains it still accepts connections, so that whoever asks is told 503 rather than nothing.
    A second signal stops it at once.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, greeting: str) -> None:
        super().__init__(config)
        self._engine = engine
        self._greeting = greeting
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        with suppress(OSError, OutputLost):  # a server is no worse for a full or closed stdout
            print(self._greeting, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own would raise the signal again when it is done, and the exit code wouldn't be 0.
        if self._draining is None and self.started:
            self._draining = self._loop.create_task(self._drain())
            self._loop.call_soon_threadsafe(lambda: None)  # wakes the loop: this runs between two of its steps
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        await self._engine.close()
        self.should_exit = True


def serve(cascade: Cascade, settings: Settings, listener: socket.socket) -> int:
    app = create_app(cascade, settings)
    try:
        # Two sockets may be bound to one address as long as neither listens: the second is told here.
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _busy(settings.host, listener.getsockname()[1], error) from error
    config = uvicorn.Config(
        app, log_level=settings.log_level, access_log=settings.log_level in ("info", "debug"), server_header=False
    )
    points = app.state.operating_points
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    others = ", ".join(name for name in points.points if name != points.default)
    greeting = (
        f"offramp serves {cascade.manifest.name} {cascade.manifest.version} at {address} (live page; {address}/docs)\n"
        f"operating point {points.default!r}; others: {others or 'none'}"
    )
    DrainingServer(config, app.state.engine, greeting).run(sockets=[listener])
    return 0
