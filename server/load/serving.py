"""`offramp serve` in a process of its own, for as long as somebody asks it something."""

import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offramp.runtime.errors import OfframpError

SERVE = ("offramp.runtime.cli", "serve")
_PATIENCE = 60.0  # seconds for the server to come up


@dataclass(frozen=True)
class Served:
    """A server that is ready: its address and its process."""

    url: str
    pid: int


@contextmanager
def serving(bundle: str | Path, *, port: int = 0, options: Sequence[str] = ()) -> Iterator[str]:
    """The address alone; see `served`."""
    with served(bundle, port=port, options=options) as server:
        yield server.url


@contextmanager
def served(
    bundle: str | Path, *, port: int = 0, options: Sequence[str] = (), command: Sequence[str] = SERVE
) -> Iterator[Served]:
    """A server of that bundle, ready to answer; it is ended in any case.

    port: 0 for a free one. options: more arguments of `offramp serve`. command: what takes these arguments. Raises
    OfframpError if it doesn't come up.
    """
    port = _free_port(port)
    command = [sys.executable, "-m", *command, str(bundle), "--port", str(port), *options]
    address = f"http://127.0.0.1:{port}"
    # A file, for nobody reads while the load runs: a full pipe would stop the server.
    with tempfile.TemporaryFile() as errors, _ended(subprocess.Popen(command, stdout=errors, stderr=errors)) as process:
        deadline = time.monotonic() + _PATIENCE
        while True:
            if process.poll() is not None:
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip()
                raise OfframpError(f"the server stopped at once: {said or f'exit code {process.returncode}'}")
            try:
                urllib.request.urlopen(f"{address}/v2/health/ready", timeout=1).close()
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if time.monotonic() > deadline:
                    raise OfframpError(f"the server wasn't ready within {_PATIENCE:.0f} s.") from None
                time.sleep(0.05)
        yield Served(address, process.pid)


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
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
