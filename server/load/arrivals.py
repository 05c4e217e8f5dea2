"""When requests come: as others are answered (closed loop), or when they come (open loop)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from offramp.runtime.arrays import Floats
from offramp.runtime.errors import InputError


@dataclass(frozen=True)
class Closed:
    """So many connections, each of which sends its next request when the last one was answered."""

    connections: int

    @property
    def name(self) -> str:
        return f"{self.connections} connection{'' if self.connections == 1 else 's'}"


@dataclass(frozen=True)
class Poisson:
    """So many requests a second, independent of each other and of the answers.

    share: None; or of what the closed loop carried at the baseline, from which the rate follows.
    """

    rate: float | None = None
    share: float | None = None

    @property
    def name(self) -> str:
        rate = "" if self.rate is None else f"{self.rate:.4g} requests/s"
        return rate if self.share is None else f"{self.share:.0%} of full{f', {rate}' if rate else ''}"


@dataclass(frozen=True)
class Trace:
    """Recorded arrivals. offsets: seconds from the first one on, rising."""

    file: str
    offsets: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"trace {self.file}"

    @property
    def seconds(self) -> float:
        """The time it covers; of a single arrival a second is assumed."""
        return self.offsets[-1] or 1.0


Load = Closed | Poisson | Trace


def rate(text: str, rows: int = 1) -> Poisson:
    """`120` requests a second, `3000rows` a second, or `70%`. rows: a request. Raises ValueError for anything else."""
    number = float(text.removesuffix("%").removesuffix("rows"))
    if not 0 < number < float("inf"):
        raise ValueError(text)
    if text.endswith("%"):
        return Poisson(share=number / 100)
    return Poisson(rate=number / rows if text.endswith("rows") else number)


def read_trace(path: str | Path) -> Trace:
    """One arrival a line, in seconds from any beginning. Raises InputError naming the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: can't be read ({getattr(error, 'strerror', None) or error}).") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        if not re.fullmatch(r"\s*\d+(\.\d*)?([eE][+-]?\d+)?\s*", line, re.ASCII):
            raise InputError(f"{path}: line {number} is {line[:40]!r}, expected an arrival in seconds from 0 on.")
        found.append(float(line))
    if not found:
        raise InputError(f"{path}: has no arrivals, expected one a line, in seconds.")
    ordered = sorted(found)
    return Trace(Path(path).name, tuple(each - ordered[0] for each in ordered))


def poisson(requests_per_second: float, seconds: float, seed: int | Sequence[int]) -> Floats:
    """Arrivals within so many seconds, rising: gaps between them are exponential."""
    rng = np.random.default_rng(seed)
    # A count that is too small by chance would end the load early; six deviations more never are.
    mean = requests_per_second * seconds
    arrivals = np.cumsum(rng.exponential(1 / requests_per_second, int(mean + 6 * mean**0.5 + 10)))
    return arrivals[arrivals < seconds]
