"""Requests out of data, as the bytes that are sent: nothing is encoded while a clock runs."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from offramp.runtime.arrays import Ints
from offramp.runtime.bundle import Bundle
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.data.sources import DataFile, open_data
from offramp.runtime.preprocess import Text
from offramp.server.load.target import Target

PREDICT = "/v1/predict"
# Enough for an accuracy to within two points; a server whose caches held all of these would be told apart by hand.
MOST_ROWS = 2048
# Rows further back are left unread, as `offramp bench` does in-process.
REACH = 20_000
_MOST_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Rows:
    """Rows of the data as JSON instances. labels: (N,), −1 where unknown; None without. of: rows in the data."""

    instances: list[bytes]
    labels: Ints | None
    of: int

    def __len__(self) -> int:
        return len(self.instances)


def read_rows(path: str | Path, target: Target, *, most: int = MOST_ROWS, seed: int = 0) -> Rows:
    """At most so many rows at random, of the first 20,000, in random order, and at most 64 MiB of them.

    path: what `open_data` takes; texts and pictures stay what they are. Raises InputError naming file and row.
    """
    sources = open_data(path, Bundle(Path(target.url), target.manifest), prepared=False)
    total = sum(source.rows for source in sources)
    if not total:
        raise InputError(f"{path}: has no rows.")
    reach = min(total, REACH)
    rng = np.random.default_rng(seed)
    wanted = set(rng.choice(reach, min(most, reach), replace=False).tolist())
    found: list[tuple[bytes, int]] = []
    place = size = 0
    for source in sources:
        labels = np.full(source.rows, -1, np.int64) if source.labels is None else source.labels
        for k, instance in enumerate(_instances(source)):
            if place + k >= reach or size > _MOST_BYTES:
                break
            if place + k in wanted:
                encoded = msgspec.json.encode(instance)
                found.append((encoded, int(labels[k])))
                size += len(encoded)
        place += source.rows
    shuffled = [found[k] for k in rng.permutation(len(found))]
    labelled = sources[0].labels is not None
    return Rows(
        [instance for instance, _ in shuffled],
        np.array([label for _, label in shuffled], np.int64) if labelled else None,
        total,
    )


def _instances(source: DataFile) -> Iterator[Any]:
    if source.column is not None:
        for k, row in enumerate(source.raw_rows()):
            yield _raw(row, f"{source.name}: row {k}", isinstance(source.manifest.preprocess, Text))
        return
    start = 0
    for chunk in source.chunks(0, 256):
        for positions, inputs in chunk.parts:
            columns = {
                given.name: np.moveaxis(inputs[given.name], given.batch_axis, 0) for given in source.manifest.inputs
            }
            for k in range(len(positions)):
                for name, values in columns.items():
                    if values.dtype.kind == "f" and not np.isfinite(values[k]).all():
                        raise InputError(
                            f"{source.name}: {name}[{start + k}] holds NaN or infinity: JSON can't say it."
                        )
                yield {name: values[k].tolist() for name, values in columns.items()}
        start += chunk.rows


def _raw(row: Any, where: str, text: bool) -> dict[str, str]:
    if text:
        if not isinstance(row, str):
            raise InputError(f"{where} is {row!r}, expected a text.")
        return {"text": row}
    try:
        data = row if isinstance(row, bytes) else Path(row).read_bytes()
    except (OSError, TypeError) as error:
        raise InputError(f"{where} can't be read ({error}): expected the path of a picture, or its bytes.") from error
    return {"b64": base64.b64encode(data).decode()}


def bodies(instances: Sequence[bytes], rows: int, point: str) -> list[bytes]:
    """Bodies of /v1/predict with so many rows each; rows are repeated only where there are fewer than that."""
    tail = b'],"operating_point":' + msgspec.json.encode(point) + b"}"
    order = list(instances) if len(instances) >= rows else [instances[k % len(instances)] for k in range(rows)]
    return [b'{"instances":[' + b",".join(order[k : k + rows]) + tail for k in range(0, len(order) - rows + 1, rows)]


def post(host: str, path: str, body: bytes, kind: str = "application/json", headers: str = "") -> bytes:
    """A whole request on a connection that is kept. host: as the Host header says it. headers: more, each a line."""
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{headers}\r\n".encode() + body
