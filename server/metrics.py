"""What a server counts, as Prometheus reads it.

Nothing from a request becomes a label: a client can't make series. Exits and blocks are the bundle's own,
and every series is there from the start, at zero.
"""

import multiprocessing
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from fastapi import APIRouter
from offramp.runtime.bundle import Manifest, own_version
from offramp.runtime.errors import InputError
from offramp.runtime.points import FULL
from offramp.runtime.thresholds.rule import FEW_ROWS
from offramp.server.errors import NotSupported
from offramp.server.query import Answer
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from starlette.requests import Request
from starlette.responses import Response

OUTCOMES = (
    "ok", "invalid", "too_large", "rejected", "unsupported", "timeout", "unavailable", "cancelled", "error",
)  # fmt: skip
# A lone row of a small model takes 100 microseconds.
_SECONDS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60,
)  # fmt: skip
_REASONS = ("overload", "request")
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SHARED_COUNTS = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's own: the folder where worker processes count together."""
_OF_MODEL = ("model", "version")


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, manifest: Manifest, points: Iterable[str] = (FULL,)) -> None:
        """points: names of the operating points that can be asked for."""
        points = tuple(points)
        folder = os.environ.get(SHARED_COUNTS)
        if folder is not None and not (folder and Path(folder).is_dir()):  # prometheus_client takes "" for this one
            raise InputError(f"{SHARED_COUNTS} is {folder!r}: no such folder. Make an empty one, or unset it.")
        self.shared = folder is not None
        # A worker process that counts for itself alone: whoever asks /metrics gets another one each time.
        self.partial = not self.shared and multiprocessing.parent_process() is not None
        self.registry = CollectorRegistry()
        self.of_model = {"model": manifest.name, "version": manifest.version}
        exits = [str(j) for j in range(len(manifest.exits))]
        blocks = [str(k) for k in range(len(manifest.blocks))]

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"offramp_{name}", text, (*_OF_MODEL, *labels), registry=self.registry)

        def by_point(name: str, text: str) -> dict[str, Counter]:
            made = counter(name, f"{text}, by operating point", "operating_point")
            return {point: made.labels(**self.of_model, operating_point=point) for point in points}

        def histogram(name: str, text: str, label: str | None = None) -> Histogram:
            labels = (*_OF_MODEL, label) if label else _OF_MODEL
            return Histogram(f"offramp_{name}", text, labels, registry=self.registry, buckets=_SECONDS)

        requests = counter("requests_total", "Inference requests, by how they ended", "outcome")
        self._requests = {o: requests.labels(**self.of_model, outcome=o) for o in OUTCOMES}
        # Each point has its own saving: one sum would mix in what was asked of the whole network on purpose.
        self._rows = by_point("rows_total", "Rows answered")
        left = counter(
            "exits_total", "Rows answered, by operating point and the exit they left from", "operating_point", "exit"
        )
        self._exits = {
            point: [left.labels(**self.of_model, operating_point=point, exit=j) for j in exits] for point in points
        }
        self._abstentions = by_point("abstentions_total", "Rows answered with the abstain flag")
        self._flops = by_point("flops_total", "FLOPs of the blocks that answered rows went through")
        self._flops_full = by_point(
            "flops_full_total", "FLOPs that the whole network would have cost for the answered rows"
        )
        executed = counter("flops_executed_total", "FLOPs really run, rows that rode along included", "block")
        self._executed = [executed.labels(**self.of_model, block=k) for k in blocks]
        self._duration = histogram(
            "request_duration_seconds", "From the request's arrival to its answer, for requests that ended ok"
        ).labels(**self.of_model)
        # Only in front of block 0: behind it a request's rows don't wait for anybody else's.
        self._queued = histogram(
            "queue_duration_seconds", "From a request's admission to the start of its first block", "block"
        ).labels(**self.of_model, block="0")
        self._queue_rows = Gauge(
            "offramp_queue_rows",
            "Rows that wait",
            (*_OF_MODEL, "block"),
            registry=self.registry,
            multiprocess_mode="livesum",
        ).labels(**self.of_model, block="0")
        batch_rows = Histogram(
            "offramp_batch_rows",
            "Rows of a batch, by the stage it runs first",
            (*_OF_MODEL, "block"),
            registry=self.registry,
            buckets=_ROWS,
        )
        self._batch_rows = [batch_rows.labels(**self.of_model, block=k) for k in blocks]
        cut_short = Counter(
            "offramp_involuntary_total",
            "Rows answered at an exit that they'd have gone on from, but for an overload or what the request said",
            (*_OF_MODEL, "reason"),
            registry=self.registry,
        )
        self._involuntary = {reason: cut_short.labels(**self.of_model, reason=reason) for reason in _REASONS}
        self._at_depth = Gauge(
            "offramp_batched_at_depth",
            "1 while survivors of several requests are batched anew in front of each block, 0 while batches stay "
            "together in the cascade graph",
            _OF_MODEL,
            registry=self.registry,
            multiprocess_mode="max",
        ).labels(**self.of_model)
        ProcessCollector(registry=self.registry)  # process_resident_memory_bytes and the like, on Linux
        build = {
            "offramp": own_version(),
            "python": platform.python_version(),
            "bundle": manifest.digest,
        }
        labels = {**self.of_model, **build}
        text = "Constant 1, labelled with what runs here"
        built = Gauge("offramp_build_info", text, tuple(labels), registry=self.registry, multiprocess_mode="max")
        built.labels(**labels).set(1)

    def ended(self, outcome: str) -> None:
        """A request is over, one way or the other."""
        self._requests[outcome].inc()

    def answered(self, answer: Answer, point: str, seconds: float) -> None:
        """A request was answered. point: the one that it asked for."""
        self.ended("ok")
        point = answer.operating_point or point
        if cut_short := sum(answer.involuntary.tolist()):
            self._involuntary["overload" if answer.overloaded else "request"].inc(cut_short)
        self._duration.observe(seconds)
        self._rows[point].inc(len(answer))
        if len(answer) <= FEW_ROWS:  # where numpy's calls take longer than the sums
            for exit in answer.exit.tolist():
                self._exits[point][exit].inc()
            abstained, flops = sum(answer.abstain.tolist()), sum(answer.flops.tolist())
        else:
            for exit, rows in zip(self._exits[point], np.bincount(answer.exit), strict=False):
                exit.inc(int(rows))
            abstained, flops = int(answer.abstain.sum()), int(answer.flops.sum())
        if abstained:
            self._abstentions[point].inc(abstained)
        self._flops[point].inc(flops)
        self._flops_full[point].inc(answer.flops_full)

    def waited(self, seconds: float) -> None:
        """A request left the queue to run."""
        self._queued.observe(seconds)

    def batch(self, rows: int, stage: int) -> None:
        """A batch starts. stage: how many stages its rows have behind them."""
        self._batch_rows[stage].observe(rows)

    def batching(self, through_graph: bool) -> None:
        """How rows of several requests are batched now."""
        self._at_depth.set(not through_graph)

    def ran(self, executed: Sequence[int]) -> None:
        """Blocks ran. executed: FLOPs, one number a block."""
        for series, flops in zip(self._executed, executed, strict=True):
            series.inc(flops)

    def queued(self, rows: int) -> None:
        """So many rows wait now."""
        self._queue_rows.set(rows)

    def all(self) -> CollectorRegistry:
        """What to show: this process's numbers, or those of all workers together. Raises NotSupported without them."""
        if self.partial:
            raise NotSupported(
                f"this is one of several worker processes, and each counts for itself: set {SHARED_COUNTS} to "
                "an empty folder before they start, and /metrics has the numbers of all of them."
            )
        if not self.shared:
            return self.registry
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return together

    def close(self) -> None:
        """This process ends: what it counted stays, what it has now doesn't."""
        if self.shared:
            mark_process_dead(os.getpid())  # type: ignore[no-untyped-call]


def routes(metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/metrics", summary="Metrics in Prometheus' text format")
    async def scrape(request: Request) -> Response:
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # a version that is no number
            encode, content_type = choose_encoder("")
        return Response(encode(metrics.all()), headers={"Content-Type": content_type})

    return router
