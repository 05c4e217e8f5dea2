"""Several whole servers behind the same sockets, each a process of its own; and whoever starts and ends them."""

import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue

from offramp.runtime.errors import OfframpError
from offramp.server.metrics import SHARED_COUNTS
from offramp.server.settings import Settings
from prometheus_client.multiprocess import mark_process_dead

Serve = Callable[[Settings, Sequence[socket.socket], bool], int]
_SPAWN = multiprocessing.get_context("spawn")  # ONNX Runtime's threads wouldn't come along with a fork
_log = logging.getLogger("uvicorn.error.offramp")


def serve_together(serve: Serve, settings: Settings, listeners: Sequence[socket.socket], *, young: float = 5.0) -> int:
    """Run `settings.workers` servers until a signal. Returns the exit code: that of the first that didn't end well.

    serve: runs one, in its own process; its last argument says whether it greets. young: seconds; one that ends by
    itself later than that is replaced, and before it would only end again, so all are stopped. Raises what a server
    refused to start with.
    """
    with _counting_together():
        return _Workers(serve, settings, listeners, young).run()


class _Workers:
    def __init__(self, serve: Serve, settings: Settings, listeners: Sequence[socket.socket], young: float) -> None:
        self._work = serve, settings, listeners
        self._count, self._young = settings.workers, young
        self._refused: SimpleQueue[str] = _SPAWN.SimpleQueue()
        self._running: dict[BaseProcess, float] = {}  # since when
        self._stopping = False
        self._code = 0

    def run(self) -> int:
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP, and nohup has it ignored
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._stop)
        for k in range(self._count):
            self._start(greets=k == 0)
        while self._running:
            ended = set(wait([process.sentinel for process in self._running]))
            for process in [one for one in self._running if one.sentinel in ended]:
                self._ended(process)
        if not self._refused.empty():
            raise OfframpError(self._refused.get())
        return self._code

    def _start(self, *, greets: bool = False) -> None:
        process = _SPAWN.Process(target=_work, args=(*self._work, greets, self._refused))
        process.start()
        self._running[process] = time.monotonic()
        if self._stopping:  # the signal came while it began
            process.terminate()

    def _stop(self, *_: object) -> None:
        self._stopping = True
        for process in list(self._running):
            process.terminate()

    def _ended(self, process: BaseProcess) -> None:
        process.join()
        lived, code = time.monotonic() - self._running.pop(process), process.exitcode
        mark_process_dead(process.pid)  # type: ignore[no-untyped-call]
        if self._stopping:
            if code not in (0, -signal.SIGTERM):
                self._code = self._code or abs(code or 0)
        elif lived < self._young:
            self._code = abs(code or 0) or 1
            self._stop()
        else:
            _log.error("worker %d has ended with code %d: another takes its place", process.pid, code)
            self._start()


def _work(
    serve: Serve,
    settings: Settings,
    listeners: Sequence[socket.socket],
    greets: bool,
    refused: "SimpleQueue[str]",
) -> None:
    if os.name == "posix":
        os.setpgrp()  # a terminal's Ctrl-C is for the parent, which passes it on once
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        raise SystemExit(serve(settings, listeners, greets))
    except OfframpError as error:
        refused.put(str(error))
        raise SystemExit(2) from None


def _end_with_parent() -> None:
    """A worker whose parent was killed would hold its port for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _counting_together() -> Iterator[None]:
    """/metrics has the numbers of all, whichever process is asked."""
    if os.environ.get(SHARED_COUNTS):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="offramp-metrics-") as folder:
        os.environ[SHARED_COUNTS] = folder
        try:
            yield
        finally:
            del os.environ[SHARED_COUNTS]
