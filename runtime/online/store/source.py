"""Whose rows a store keeps, and how a row is named and found."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from offramp.runtime.online.store.schema import bundles, models, served
from sqlalchemy.dialects import postgresql, sqlite

Name = tuple[bytes, int]
"""What names a row: its request's id as bytes, and its index."""

AT_ONCE = 500  # ids in one statement


@dataclass(frozen=True)
class Source:
    """Whose rows: numbers of the model and of its bundle in their tables, and the bundle's sizes."""

    model: int
    bundle: int
    exits: int
    classes: int


def find_source(connection: sa.Connection, model: str, digest: str, exits: int, classes: int) -> Source:
    """The numbers of a model and its bundle, which get theirs now if they are new."""
    add(connection, models, {"name": model, "rows": 0, "bytes": 0})
    number = connection.execute(sa.select(models.c.id).where(models.c.name == model)).scalar_one()
    of_bundle = {"model": number, "digest": digest, "exits": exits, "classes": classes}
    add(connection, bundles, of_bundle)
    known = sa.select(bundles.c.id).where(bundles.c.model == number, bundles.c.digest == digest)
    return Source(number, connection.execute(known).scalar_one(), exits, classes)


def add(connection: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> None:
    """Insert a row, unless there is one like it."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    connection.execute(insert(table).values(values).on_conflict_do_nothing())


def name_of(request: str, row: int) -> Name:
    return request.encode("utf-8", "surrogatepass"), int(row)


def hash_of(name: Name) -> int:
    data = hashlib.blake2b(name[0] + name[1].to_bytes(8, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(data, "little", signed=True)


def find_rows(
    connection: sa.Connection, source: Source, names: Sequence[Name], *more: "sa.Column[Any]"
) -> dict[Name, Any]:
    """The rows that are there, by name: their seq, and what else is asked for."""
    found = {}
    wanted = set(names)
    ids = sorted({id for id, _ in names})
    for start in range(0, len(ids), AT_ONCE):
        chosen = sa.select(served.c.request, served.c.row, served.c.seq, *more).where(
            served.c.model == source.model, served.c.request.in_(ids[start : start + AT_ONCE])
        )
        for line in connection.execute(chosen):
            if (name := (bytes(line.request), line.row)) in wanted:
                found[name] = line
    return found
