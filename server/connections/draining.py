"""The server itself: it listens until a signal, then drains and stops in time whatever its clients do."""

import asyncio
import errno
import functools
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from offramp.runtime.errors import OutputLost
from offramp.server.connections.choice import connection
from offramp.server.connections.crowd import Crowd
from offramp.server.engine import Engine
from offramp.server.protocols.hot import in_front
from offramp.server.settings import Settings

BACKLOG = 2048
"""Connections that wait to be accepted."""

# So many are accepted in one turn of the event loop: asyncio takes as many as its backlog says, and would take all
# descriptors there are before any connection is looked at. Four turns pass until one that had to give way is closed.
_ACCEPTED_AT_ONCE, _TURNS = 32, 4
# Bytes of an answer that the system takes for each client; by itself it takes megabytes, which nobody counts.
_SEND_BUFFER = 256 * 2**10
_DESCRIPTORS = 64  # for everything else: the bundle's files, the log, who has been turned away
_QUIET = 0.1  # seconds without a sign of any client, after which nothing that was on its way is cut off
_FLUSH = 1.0  # of the drain's seconds, at most: for answers on their way behind the engine's last
_EXIT = 0.5  # and for the exit itself
_SAID_EVERY = 10.0  # seconds between two lines in the log about the same lack
_log = logging.getLogger("uvicorn.error.offramp")


class DrainingServer(uvicorn.Server):
    """Listens until a signal; then fails readiness, answers every request that is here, and stops.

    While it drains it still accepts connections, so that whoever asks is told 503 rather than nothing.
    A second signal ends the process at once.
    """

    def __init__(self, app: FastAPI, settings: Settings, greeting: str) -> None:
        self._engine: Engine = app.state.engine
        self._settings = settings
        self._greeting = greeting
        self._crowd = Crowd(settings, app.state.memory, _affordable(settings.max_connections))
        self._draining: asyncio.Task[None] | None = None
        self._said = -_SAID_EVERY
        super().__init__(
            uvicorn.Config(
                in_front(app),
                http=functools.partial(connection(), self._crowd),  # type: ignore[arg-type]
                ws="none",
                loop="auto",
                backlog=_ACCEPTED_AT_ONCE,
                timeout_keep_alive=settings.keep_alive,  # type: ignore[arg-type]
                timeout_graceful_shutdown=1,
                log_level=settings.log_level,
                access_log=settings.log_level in ("info", "debug"),
                server_header=False,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has set it to what is accepted at once
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # its connections inherit it
        self._watching = self._loop.create_task(self._crowd.watch())
        if self._greeting:
            with suppress(OSError, OutputLost):  # a server is no worse for a full or closed stdout
                print(self._greeting, flush=True)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() - self._said >= _SAID_EVERY:  # asyncio says it for each connection that waits
            self._said = loop.time()
            _log.error("no connection can be accepted for now: %s", error.strerror)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own would raise the signal again when it is done, and the exit code wouldn't be 0.
        if self._draining is None and self.started:
            self._draining = self._loop.create_task(self._drain())
            self._loop.call_soon_threadsafe(lambda: None)  # wakes the loop: this runs between two of its steps
        else:
            end_at_once(128 + sig)

    async def _drain(self) -> None:
        try:
            await self._answer_what_is_here()
        finally:  # whatever went wrong, it stops
            for server in self.servers:
                server.close()
            self._crowd.scatter()
            self.should_exit = True

    async def _answer_what_is_here(self) -> None:
        seconds = self._settings.drain_timeout
        limit = self._loop.time() + seconds - min(_EXIT, seconds / 4)
        self._crowd.drain()
        await self._engine.close(seconds - min(_EXIT, seconds / 4) - min(_FLUSH, seconds / 4))
        calm = min(limit, self._loop.time() + _FLUSH)  # new ones may come for ever, each is told 503
        self._crowd.heard = self._loop.time()  # what waits in the sockets is read first
        while self._loop.time() < limit:
            now = self._loop.time()
            if not self._crowd.working and (now >= calm or self._crowd.quiet_for(_QUIET, now)):
                break
            await asyncio.sleep(_QUIET / 4)

    @property
    def drained(self) -> bool:
        """Whether everything that was begun has ended; else something still runs in a thread."""
        return self._engine.stopped and not self.server_state.tasks


@contextmanager
def hanging_up(server: DrainingServer) -> Iterator[None]:
    """A terminal that hangs up (SIGHUP) drains the server as SIGTERM does, unless nohup has it ignored."""
    hang_up = getattr(signal, "SIGHUP", None)  # Windows has none
    if hang_up is None or signal.getsignal(hang_up) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(hang_up, server.handle_exit)
    try:
        yield
    finally:
        signal.signal(hang_up, before)


def end_at_once(code: int) -> None:
    """End the process, whatever its threads do: one that is inside ONNX Runtime would abort an orderly exit."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _affordable(wanted: int) -> int:
    """Connections that this process has descriptors for; its soft limit is raised where that is allowed."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    needed = wanted + _TURNS * _ACCEPTED_AT_ONCE + _DESCRIPTORS + _open_descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        if soft < needed:
            affordable = max(1, wanted - (needed - soft))
            _log.warning(
                "at most %d connections at a time instead of %d: this process may open %d files (ulimit -n)",
                affordable,
                wanted,
                soft,
            )
            return affordable
    return wanted


def _open_descriptors() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 64
