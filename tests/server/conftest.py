"""Small real bundles and real servers: uvicorn on a free port, asked over a socket."""

import math
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from offramp.runtime import Cascade, OperatingPoint
from offramp.runtime.bundle import read_bundle
from offramp.runtime.calibration_file import Calibration, write_calibration
from offramp.runtime.points import full
from offramp.server import Settings, create_app
from offramp.server.connections.draining import DrainingServer
from offramp.server.engine import BatchingEngine

CLASSES = ["кот", "dog 🐶", 'quote " \\', "плюс", "five"]


@dataclass
class Running:
    """A server that listens."""

    url: str
    app: Any

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def metric(self, name: str, **labels: str) -> float:
        return self.app.state.metrics.registry.get_sample_value(
            f"offramp_{name}", {**self.app.state.metrics.of_model, **labels}
        )


@contextmanager
def running(cascade: Any, **settings: Any) -> Iterator[Running]:
    given = Settings.of(**settings)
    with listening(create_app(cascade, given), given) as server:
        yield server


@contextmanager
def listening(app: Any, settings: Settings | None = None) -> Iterator[Running]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:  # else without TCP_NODELAY
        listener.bind(("127.0.0.1", 0))
        server = DrainingServer(app, settings or Settings.of(log_level="error"), "")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", app)
        finally:
            server.should_exit = True
            thread.join()


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
    return value


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], Any]], Any]:
    return wait_until


@pytest.fixture
def serve() -> Callable[..., Any]:
    """`with serve(cascade, max_queued_rows=10) as server:`"""
    return running


@pytest.fixture
def listen() -> Callable[..., Any]:
    """`with listen(app) as server:`"""
    return listening


def export(model: Any, example: Any, axes: Any, folder: Path, **options: Any) -> Path:
    from offramp.export import export_bundle

    return export_bundle(model, example, folder, dynamic_axes=axes, **options)


def calibrate(folder: Path, inputs: dict[str, Any]) -> Path:
    """Operating points that split these rows over the exits."""
    manifest = read_bundle(folder).manifest
    with Cascade.load(folder, threads=1) as cascade:
        score = cascade.record(inputs).score
    points = {"full": full(len(score))}
    for name, quantile in (("balanced", 0.6), ("fast", 0.3)):
        thresholds = (*np.quantile(score[:-1], quantile, axis=1).tolist(), -math.inf)
        points[name] = OperatingPoint(thresholds, float(np.quantile(score, 0.1)), name, expected={"coverage": 0.9})
    write_calibration(folder, manifest, Calibration(points, 1), created="2026-01-01T00:00:00Z", producer="tests")
    return folder


@pytest.fixture(scope="session")
def rows_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three exits over one input, x [batch, 8]; operating points full, balanced, fast."""
    torch = pytest.importorskip("torch")

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
            self.heads = torch.nn.ModuleList(torch.nn.Linear(8, len(CLASSES)) for _ in range(3))

        def forward(self, x: Any) -> list[Any]:
            large = 10 * x[:, :1]  # infinite from 3.4e37 on, and then the logits are NaN
            logits = []
            for block, head in zip(self.blocks, self.heads, strict=True):
                x = torch.relu(block(x))
                logits.append(3 * head(x) + (large - large))
            return logits

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("rows") / "bundle"
    export(Rows().eval(), {"x": torch.randn(4, 8)}, {"x": {0: "batch"}}, folder, classes=CLASSES, name="rows")
    return calibrate(folder, {"x": np.random.default_rng(0).normal(size=(500, 8)).astype(np.float32)})


@pytest.fixture(scope="session")
def tokens_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three exits over ids and mask [batch, seq], a vocabulary of 50."""
    torch = pytest.importorskip("torch")

    class Tokens(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(50, 8)
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
            self.heads = torch.nn.ModuleList(torch.nn.Linear(8, 3) for _ in range(3))

        def forward(self, ids: Any, mask: Any) -> list[Any]:
            weight = mask.unsqueeze(-1).float()
            x = self.embedding(ids)
            logits = []
            for block, head in zip(self.blocks, self.heads, strict=True):
                x = torch.relu(block(x)) + x
                logits.append(head((x * weight).sum(1) / weight.sum(1).clamp(min=1)))
            return logits

    torch.manual_seed(1)
    example = {"ids": torch.randint(0, 50, (4, 6)), "mask": torch.ones(4, 6, dtype=torch.int64)}
    axes = {name: {0: "batch", 1: "seq"} for name in example}
    folder = tmp_path_factory.mktemp("tokens") / "bundle"
    return export(Tokens().eval(), example, axes, folder, name="tokens")


@pytest.fixture(scope="session")
def slow_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like rows, but the way to its last exit is long: 1,024 rows take about a second on one thread."""
    torch = pytest.importorskip("torch")

    class Slow(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 1024)
            self.again = torch.nn.Linear(1024, 1024)
            self.heads = torch.nn.ModuleList(torch.nn.Linear(1024, 3) for _ in range(2))

        def forward(self, x: Any) -> list[Any]:
            x = torch.relu(self.first(x))
            early = self.heads[0](x)
            for _ in range(30):
                x = torch.relu(self.again(x))
            return [early, self.heads[1](x)]

    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("slow") / "bundle"
    return export(Slow().eval(), {"x": torch.randn(4, 8)}, {"x": {0: "batch"}}, folder, name="slow")


@pytest.fixture(scope="session")
def rows(rows_bundle: Path) -> Iterator[Cascade]:
    with Cascade.load(rows_bundle, threads=1, operating_point="balanced") as cascade:
        yield cascade


@pytest.fixture(scope="session")
def tokens(tokens_bundle: Path) -> Iterator[Cascade]:
    with Cascade.load(tokens_bundle, threads=1) as cascade:
        yield cascade


@pytest.fixture(scope="session")
def slow(slow_bundle: Path) -> Iterator[Cascade]:
    with Cascade.load(slow_bundle, threads=1) as cascade:
        yield cascade


@pytest.fixture(scope="session")
def rows_server(rows: Cascade) -> Iterator[Running]:
    with running(rows) as server:
        yield server


@pytest.fixture(scope="session")
def tokens_server(tokens: Cascade) -> Iterator[Running]:
    with running(tokens) as server:
        yield server


@pytest.fixture
def client(rows_server: Running) -> Iterator[httpx.Client]:
    with rows_server.client() as client:
        yield client


@pytest.fixture
def x() -> np.ndarray:
    """40 rows for the rows bundle."""
    return np.random.default_rng(5).normal(size=(40, 8)).astype(np.float32)


@pytest.fixture
def slow_batches(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`slow_batches(0.1)`: from now on each batch takes so many seconds more, as on a slower machine."""

    def make(seconds: float) -> None:
        run = BatchingEngine.run_batch

        def slowly(engine: BatchingEngine, batch: Any) -> Any:
            time.sleep(seconds)
            return run(engine, batch)

        monkeypatch.setattr(BatchingEngine, "run_batch", slowly)

    return make


def _hears_everything() -> None:
    """Tests that were started by nohup would have SIGHUP ignored in all that they start."""
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def offramp_serve() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `offramp serve` with some arguments in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(
        *arguments: object, env: dict[str, str] | None = None, descriptors: int | None = None
    ) -> subprocess.Popen[str]:
        """descriptors: the most that the process may have open, which it can't raise."""
        command = [sys.executable, "-m", "offramp.runtime.cli", "serve", *map(str, arguments)]
        if descriptors is not None:
            command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, preexec_fn=_hears_everything
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
