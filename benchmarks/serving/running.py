"""Peers as processes: installed in an environment of their own, started, counted, ended with all that they started."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENTS = HERE / ".venvs"
_PATIENCE = 120.0  # seconds until a server must have answered its first row
_TRIES = 3  # ports
_TICKS = os.sysconf("SC_CLK_TCK")


class Missing(Exception):
    """A peer that isn't here, and why."""


@dataclass(frozen=True)
class Peer:
    """A server of the whole model. body: a row's JSON as its request has it. settings: those to try, by environment."""

    name: str
    title: str
    path: str
    body: Callable[[bytes], bytes]
    settings: Sequence[Mapping[str, object]]

    @property
    def python(self) -> Path:
        return ENVIRONMENTS / self.name / "bin" / "python"

    def install(self) -> None:
        """Make its environment, unless it is there. Raises Missing with the reason."""
        wanted = HERE / "peers" / f"{self.name}.txt"
        done = ENVIRONMENTS / self.name / ".installed"
        if done.exists() and done.stat().st_mtime >= wanted.stat().st_mtime:
            return
        for command in (
            [sys.executable, "-m", "venv", str(ENVIRONMENTS / self.name)],
            [str(self.python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", str(wanted)],
        ):
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                raise Missing(f"{self.title} can't be installed: {_last(ran.stderr)}")
        done.touch()

    def version(self) -> str:
        """As pip has installed it: its own line of its requirements."""
        lines = (HERE / "peers" / f"{self.name}.txt").read_text().splitlines()
        return next(line.partition("==")[2] for line in lines if line.lower().startswith(f"{self.name}=="))

    @contextmanager
    def serving(self, model: Path, setting: Mapping[str, object], row: bytes) -> Iterator["Server"]:
        given = {"MODEL": model, "PYTHONPATH": HERE, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", **setting}
        environment = {**os.environ, **{name: str(value) for name, value in given.items()}}
        command = [str(self.python), str(HERE / "peers" / f"{self.name}.py")]

        def start(port: int) -> tuple[list[str], dict[str, str]]:
            return command, {**environment, "PORT": str(port)}

        with _running(start, self.path, self.body(row)) as server:
            yield server


@contextmanager
def offramp(bundle: Path, options: Sequence[str], path: str, body: bytes) -> Iterator["Server"]:
    """`offramp serve` of this environment."""
    command = [sys.executable, "-m", "offramp.runtime.cli", "serve", str(bundle), *options, "--port"]
    with _running(lambda port: ([*command, str(port)], dict(os.environ)), path, body) as server:
        yield server


@dataclass(frozen=True)
class Server:
    """One that answers. pid: of its first process."""

    port: int
    pid: int

    def cpu_seconds(self) -> float:
        """User and system time of it and all that it has started, those that ended included (Linux)."""
        return sum(sum(map(int, _stat(pid)[11:15])) for pid in _family(self.pid)) / _TICKS


@contextmanager
def _running(
    start: Callable[[int], tuple[Sequence[str], Mapping[str, str]]], path: str, body: bytes
) -> Iterator[Server]:
    """start: command and environment for a port."""
    with ExitStack() as stack:
        for tries_left in reversed(range(_TRIES)):
            port = free_port()
            command, environment = start(port)
            said = stack.enter_context(tempfile.TemporaryFile())
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            process = subprocess.Popen(
                command, env=environment, cwd=scratch, stdout=said, stderr=said, start_new_session=True
            )
            stack.callback(_end, process)
            try:
                _wait(process, port, path, body, said)
                break
            except Missing:
                # A port that was free a moment ago may be somebody's by now.
                if process.poll() is None or not tries_left:
                    raise
        yield Server(port, process.pid)


def _wait(process: subprocess.Popen[bytes], port: int, path: str, body: bytes, said: object) -> None:
    deadline = time.monotonic() + _PATIENCE
    last = "it never listened"
    while process.poll() is None and time.monotonic() < deadline:
        try:
            status, answer = post(port, path, body)
            if status == 200:
                return
            last = f"it answers {status}: {answer[:200].decode(errors='replace')}"
        except (OSError, http.client.HTTPException) as error:
            last = f"{type(error).__name__}: {error}"
        time.sleep(0.2)
    said.seek(0)  # type: ignore[attr-defined]
    printed = said.read().decode(errors="replace")  # type: ignore[attr-defined]
    raise Missing(f"doesn't answer ({last}; {_last(printed)})")


def post(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Some start daemons that outlive them: whoever belonged to it is ended too."""
    family = _family(process.pid)
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=15)
    for pid in family:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _family(pid: int) -> list[int]:
    """A process and those that it or they have started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def _stat(pid: int) -> list[str]:
    """What /proc/PID/stat says behind the command's name, which may hold blanks; zeros for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["0"] * 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def labels_of(answer: bytes) -> int:
    """The label in an answer of any of them."""
    found = json.loads(answer)
    if "predictions" in found:
        return int(found["predictions"][0]["label"])
    if isinstance(found, list):
        return int(found[0]["label"])
    if "outputs" in found:
        return int(found["outputs"][0]["data"][0])
    return int(found["label"])
