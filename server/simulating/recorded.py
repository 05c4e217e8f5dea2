"""A server that keeps a record: `offramp serve` in every respect, and at its end what it has done is in a file.

python -m offramp.server.simulating.recorded FILE BUNDLE [options of `offramp serve`]
"""

import argparse
import io
import itertools
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fastapi import FastAPI
from offramp.runtime.arrays import Floats
from offramp.runtime.errors import OfframpError
from offramp.runtime.files import write_atomically
from offramp.server import cli
from offramp.server.engine import BatchingEngine, Told
from offramp.server.patience import Patience
from offramp.server.query import Answer, Query
from offramp.server.scheduling.outcome import Outcome
from offramp.server.scheduling.scheduler import Batch
from offramp.server.scheduling.ways import GraphWay
from starlette.types import ASGIApp, Receive, Scope, Send

NUMBER = "X-Request-Number"
"""The header by which a request says which one it is."""

_HEADER = NUMBER.lower().encode()
_number: ContextVar[float] = ContextVar("number", default=-1.0)


@dataclass(frozen=True)
class Record:
    """What a server has done. Times are seconds of the machine's monotonic clock, which its clients share.

    batches: (B, 8) its number, start, end, the thread that ran it, stage, rows, FLOPs run, whether it went through the
    cascade graph. parts: (P, 4) of batches: which, the number of the request, when that came to the engine, and since
    when those rows have waited.
    """

    batches: Floats
    parts: Floats

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Raises OfframpError if there is none."""
        try:
            with np.load(path, allow_pickle=False) as found:
                return cls(found["batches"], found["parts"])
        except OSError as error:
            raise OfframpError("the server that was measured left no record of it.") from error


class Recorder:
    """Looks on while an engine runs, at as little cost as can be: numbers, in arrays that the collector passes over."""

    def __init__(self, engine: BatchingEngine) -> None:
        self._batches, self._parts = array("d"), array("d")
        self._numbers: dict[int, float] = {}  # by the query
        self._count = itertools.count()
        self._run, self._infer = engine.run_batch, engine.infer
        engine.run_batch = self.run_batch  # type: ignore[method-assign]
        engine.infer = self.infer  # type: ignore[method-assign]

    async def infer(self, query: Query, patience: Patience, told: Told | None = None) -> Answer:
        self._numbers[id(query)] = _number.get()
        try:
            return await self._infer(query, patience, told)
        finally:
            del self._numbers[id(query)]

    def run_batch(self, batch: Batch) -> Outcome:
        started = time.monotonic()
        outcome = self._run(batch)
        ended = time.monotonic()
        place, number, graph = batch.place, next(self._count), isinstance(batch.place.way, GraphWay)
        thread, flops = threading.get_ident(), sum(outcome.executed)
        # A single call into C, which no other lane comes between.
        self._batches.extend((number, started, ended, thread, place.stage, batch.rows, flops, graph))
        jobs = [(part.waiting.owner, part.waiting.since) for part in batch.parts]
        self._parts.extend(
            [x for job, since in jobs for x in (number, self._numbers.get(id(job.query), -1.0), job.arrived, since)]
        )
        return outcome

    def write(self, path: Path) -> None:
        out = io.BytesIO()
        np.savez(out, batches=np.array(self._batches).reshape(-1, 8), parts=np.array(self._parts).reshape(-1, 4))
        write_atomically(path, out.getvalue())


class _Numbered:
    """Remembers, for what is called within a request, which one it is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for name, value in scope.get("headers", ()):
            if name == _HEADER:
                _number.set(float(value))
        await self._app(scope, receive, send)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    cli.add_arguments(parser)
    args = parser.parse_args(arguments)
    recorders: list[Recorder] = []

    def watch(app: FastAPI) -> None:
        build = app.state.in_front
        app.state.in_front = lambda asked: _Numbered(build(asked))
        recorders.append(Recorder(app.state.engine))

    code = cli.run(args, watch)
    for recorder in recorders:
        recorder.write(args.file)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
