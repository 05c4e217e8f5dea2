"""Rows in their table: kept, completed, let go."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from offramp.runtime.errors import InputError
from offramp.runtime.online.store.packing import pack, unpack
from offramp.runtime.online.store.schema import gone, models, served
from offramp.runtime.online.store.served import Served
from offramp.runtime.online.store.source import AT_ONCE, Name, Source, find_rows, hash_of

_MOST_LET_GO = 4096  # rows in one transaction: a limit that was lowered doesn't hold up what is to be kept

_NOBODY = 0
_TOGETHER = 50  # rows a statement: 750 values, of the 999 that old SQLites take


class Values(NamedTuple):
    """A row as it is inserted: what `served` calls its columns, in their order there."""

    model: int
    bundle: int
    request: bytes
    row: int
    time: float
    version: int
    point: str
    exit: int
    abstained: bool
    shadow: float
    asked: float
    complete: bool
    size: int
    exits: bytes
    inputs: bytes | None


def values_of(source: Source, batch: Served) -> list[Values]:
    """A batch's rows as they are inserted. Raises InputError naming the field that doesn't fit."""
    rows = len(batch)
    packed = pack(batch.score, batch.logits, source.classes)
    row, exit = _column(batch, "row", np.int64, 0, 2**31 - 1), _column(batch, "exit", np.int64, 0, source.exits - 1)
    shadow, asked = _column(batch, "shadow", np.float64, 0, 1), _column(batch, "asked", np.float64, 0, 1, unknown=True)
    time, abstained = _column(batch, "time", np.float64), _column(batch, "abstained", np.bool_)
    inputs: Sequence[bytes | None] = batch.inputs or [None] * rows
    complete = (~np.isnan(batch.score)).all(axis=0).tolist()
    ids = [name.encode("utf-8", "surrogatepass") for name in batch.request]
    columns = (
        repeat(source.model),
        repeat(source.bundle),
        ids,
        row,
        time,
        repeat(batch.version),
        repeat(batch.point),
        exit,
        abstained,
        [1.0 if whole else share for whole, share in zip(complete, shadow, strict=True)],  # it went all the way itself
        [share or 1.0 for share in asked],  # unknown, or not asked for at all: a label that comes stands for itself
        complete,
        [len(data) + len(id) + len(given or b"") for data, id, given in zip(packed, ids, inputs, strict=True)],
        packed,
        inputs,
    )
    return list(map(Values._make, zip(*columns, strict=False)))  # some have no end


def _column(
    batch: Served, name: str, kind: Any, least: float = -np.inf, most: float = np.inf, unknown: bool = False
) -> list[Any]:
    values = np.asarray(getattr(batch, name), kind)
    if values.ndim > 1 or (values.ndim == 1 and len(values) != len(batch)):
        raise InputError(f"{name} has the shape {values.shape}, expected ({len(batch)},).")
    if not (((values >= least) & (values <= most)) | (unknown & np.isnan(values))).all():
        raise InputError(f"{name}: expected numbers from {least:g} to {most:g}.")
    listed: list[Any] = np.broadcast_to(values, len(batch)).tolist()
    return [None if value != value else value for value in listed] if unknown else listed


def keep(connection: sa.Connection, source: Source, values: Sequence[Values]) -> int:
    """Insert rows; how many. A name that is there already keeps what it has."""
    if not values:
        return 0
    try:
        with connection.begin_nested():
            _insert(connection, values)
        kept = values
    except sa.exc.IntegrityError:  # a name came twice, which hardly ever happens: to look first would cost all
        rows: dict[Name, Values] = {}
        for row in values:
            rows.setdefault((row.request, row.row), row)
        for name in find_rows(connection, source, list(rows)):
            del rows[name]
        kept = list(rows.values())
        _insert(connection, kept)
    if kept:
        _count(connection, source, len(kept), sum(row.size for row in kept))
    return len(kept)


def _insert(connection: sa.Connection, values: Sequence[Values]) -> None:
    """As the driver takes it: SQLAlchemy's way through every value takes three times as long as SQLite itself.

    Many rows a statement: at each one SQLite's driver lets go of Python's lock, and whoever answers meanwhile is
    interrupted for it to be had again.
    """
    if not values:
        return
    statement = sa.insert(served).compile(dialect=connection.dialect, column_keys=list(Values._fields))
    one = str(statement)
    if not statement.positional:
        connection.exec_driver_sql(one, [row._asdict() for row in values])
        return
    whole = len(values) - len(values) % _TOGETHER
    head, between, row = one.rpartition(" VALUES ")
    many = head + between + ", ".join([row] * _TOGETHER)
    for start in range(0, whole, _TOGETHER):
        connection.exec_driver_sql(many, tuple(chain.from_iterable(values[start : start + _TOGETHER])))
    if whole < len(values):
        connection.exec_driver_sql(one, list(values[whole:]))


def _count(connection: sa.Connection, source: Source, rows: int, bytes: int) -> None:
    changed = {"rows": models.c.rows + rows, "bytes": models.c.bytes + bytes}
    connection.execute(sa.update(models).where(models.c.id == source.model).values(changed))


def touch(connection: sa.Connection, source: Source) -> None:
    """Write something, and take it back: whether that can be done is all that is asked."""
    connection.execute(sa.insert(gone).values(model=source.model, hash=_NOBODY))
    connection.execute(sa.delete(gone).where(gone.c.model == source.model, gone.c.hash == _NOBODY))


@dataclass(frozen=True, eq=False)
class Completion:
    """What exits said that ran after their rows were answered. score: (J, N), logits: J entries, as in Served."""

    names: Sequence[Name]
    score: NDArray[np.floating]
    logits: Sequence[NDArray[np.floating] | None]


def complete(connection: sa.Connection, source: Source, late: Completion) -> int:
    """Add what the deeper exits said to rows that are there; how many are complete now."""
    found = find_rows(connection, source, late.names, served.c.bundle, served.c.exits, served.c.size, served.c.shadow)
    # Rows without a probability of being looked into would stand for nobody, or for all.
    at = [k for k, name in enumerate(late.names) if _can_complete(found.get(name), source)]
    if not at:
        return 0
    lines = [found[late.names[k]] for k in at]
    score, logits = unpack([line.exits for line in lines], source.exits, source.classes)
    new = np.isnan(score) & ~np.isnan(late.score[:, at])
    score = np.where(new, late.score[:, at], score)
    merged = [z.astype(np.float32) for z in logits]
    for j, given in enumerate(late.logits):
        if given is not None:
            merged[j] = np.where(new[j][:, None], given[at], merged[j])
    full: list[bool] = np.asarray(~np.isnan(score).any(axis=0)).tolist()
    packed = pack(score, merged, source.classes)
    changes = [
        {"at": line.seq, "exits": data, "complete": whole, "size": line.size + len(data) - len(line.exits)}
        for line, data, whole in zip(lines, packed, full, strict=True)
    ]
    connection.execute(sa.update(served).where(served.c.seq == sa.bindparam("at")), changes)
    _count(connection, source, 0, sum(new["size"] - line.size for new, line in zip(changes, lines, strict=True)))
    return sum(full)


def _can_complete(line: Any, source: Source) -> bool:
    return line is not None and line.bundle == source.bundle and line.shadow > 0


def delete(connection: sa.Connection, source: Source, requests: Sequence[bytes]) -> int:
    """Remove all rows of requests, without a trace that they were here; how many there were."""
    removed = 0
    for start in range(0, len(requests), AT_ONCE):
        chosen = served.c.request.in_(requests[start : start + AT_ONCE])
        lines = connection.execute(
            sa.select(served.c.seq, served.c.size).where(served.c.model == source.model, chosen)
        ).all()
        _remove(connection, source, lines)
        removed += len(lines)
    return removed


def _remove(connection: sa.Connection, source: Source, lines: Sequence[Any]) -> None:
    if lines:
        numbers = [line.seq for line in lines]
        for start in range(0, len(numbers), AT_ONCE):
            connection.execute(sa.delete(served).where(served.c.seq.in_(numbers[start : start + AT_ONCE])))
        _count(connection, source, -len(lines), -sum(line.size for line in lines))


def let_go(connection: sa.Connection, source: Source, *, rows: int, bytes: int, before: float) -> int:
    """Remove the oldest rows until at most so many, of so many bytes, are left, and none from `before`; how many went.

    Labels that come for them later are told apart from those for rows that never were, as long as as many others have
    not gone after them. Until the transaction's end no other engine lets go of rows, or keeps any.
    """
    counted = sa.select(models.c.rows, models.c.bytes).where(models.c.id == source.model)
    have = connection.execute(counted.with_for_update()).one()
    too_many, too_large = have.rows - rows, have.bytes - bytes
    oldest = sa.select(served.c.seq, served.c.size, served.c.time, served.c.request, served.c.row)
    oldest = oldest.where(served.c.model == source.model).order_by(served.c.time, served.c.seq)
    going: list[Any] = []
    freed = 0
    most = _MOST_LET_GO if too_many > 0 or too_large > 0 else 64
    for line in connection.execute(oldest.limit(most)):
        if len(going) >= too_many and freed >= too_large and line.time >= before:
            break
        going.append(line)
        freed += line.size
    if going:
        _remove(connection, source, going)
        hashes = [{"model": source.model, "hash": hash_of((line.request, line.row))} for line in going]
        connection.execute(sa.insert(gone), hashes)
        newest = sa.select(sa.func.max(gone.c.id)).scalar_subquery()
        connection.execute(sa.delete(gone).where(gone.c.id <= newest - rows))
    return len(going)
