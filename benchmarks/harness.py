"""Fair timing: variants take turns in random order, ratios are formed within a round, medians have intervals."""

import json
import os
import platform
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, Picked

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """Wall and CPU seconds of one variant, one entry a round."""

    wall: np.ndarray
    cpu: np.ndarray

    @property
    def median(self) -> float:
        return float(np.median(self.wall))


@dataclass(frozen=True)
class Ratio:
    """The median over rounds of one variant's time over another's, with a 95% bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def take_turns(
    variants: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    seconds: float = 60.0,
    warm_up: int = 3,
    seed: int = 0,
    settle: float = 0.0,
) -> dict[str, Timing]:
    """Time every variant once a round, in random order, for `rounds` rounds or until `seconds` are spent.

    settle: seconds of sleep before each measurement; it cools the caches too, which costs small batches most.
    """
    order, rng = list(variants), random.Random(seed)
    for _ in range(warm_up):
        for name in order:
            variants[name]()
    wall: dict[str, list[float]] = {name: [] for name in order}
    cpu: dict[str, list[float]] = {name: [] for name in order}
    started = time.perf_counter()
    for done in range(rounds):
        rng.shuffle(order)
        for name in order:
            run = variants[name]
            time.sleep(settle)
            before, busy = time.perf_counter(), time.process_time()
            run()
            cpu[name].append(time.process_time() - busy)
            wall[name].append(time.perf_counter() - before)
        if time.perf_counter() - started > seconds and done >= 9:
            break
    return {name: Timing(np.array(wall[name]), np.array(cpu[name])) for name in variants}


def ratio(one: Timing, other: Timing, *, kind: str = "wall", seed: int = 0) -> Ratio:
    """one / other, paired by round."""
    quotients = getattr(one, kind) / getattr(other, kind)
    picks = np.random.default_rng(seed).integers(0, len(quotients), (2000, len(quotients)))
    low, high = np.quantile(np.median(quotients[picks], axis=1), [0.025, 0.975])
    return Ratio(float(np.median(quotients)), float(low), float(high))


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor()
    versions = {}
    for name in ("offramp", "numpy", "onnxruntime", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def save(name: str, results: Any) -> Path:
    """Write results beside what they were measured on, as benchmarks/results/<date>/<name>.json."""
    about = machine()
    path = RESULTS / str(about["date"])[:10] / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": about, "results": results}, indent=1, default=_plain) + "\n")
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, Ratio):
        return {"median": round(value.value, 4), "interval": [round(value.low, 4), round(value.high, 4)]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(type(value).__name__)


def table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def bare_rows(score: np.ndarray, right: np.ndarray, flops: np.ndarray) -> LabelledRows:
    """Made-up rows that have no logits: (J, N) scores and whether each exit is right, (J,) cumulative cost."""
    n = score.shape[1]
    everything = np.arange(n)
    return LabelledRows(
        logits=tuple(Picked(np.zeros((1, 2)), everything) for _ in score),
        score=score.astype(np.float32),
        label=(~right).astype(np.int64),
        flops=np.repeat(np.asarray(flops, float)[:, None], n, axis=1),
        truth=np.zeros(n, np.int64),
        rows=everything,
        classes=2,
    )
