"""Labels that come back, and what becomes of each."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import sqlalchemy as sa
from offramp.runtime.online.store.schema import gone, labellers, served
from offramp.runtime.online.store.source import AT_ONCE, Name, Source, add, find_rows, hash_of


class Outcome(StrEnum):
    """What became of a label."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # the row has this very label
    CONFLICTING = "conflicting"  # it has another, which stays
    LATE = "late"  # it was served, but is kept no longer
    UNKNOWN = "unknown"  # no such row


@dataclass(frozen=True)
class Labels:
    """Labels as they came: one a name. key: who gave them, None for nobody in particular. asked: the probability with
    which each was sought, None for what the row says."""

    names: Sequence[Name]
    labels: Sequence[int]
    key: str | None
    time: float
    asked: Sequence[float] | None = None


def label(connection: sa.Connection, source: Source, given: Labels) -> list[Outcome]:
    """Give rows their labels; what became of each. The first label of a row stays."""
    found = find_rows(connection, source, given.names, served.c.bundle, served.c.label)
    missing = [name for name in given.names if name not in found]
    late = _gone(connection, source, missing)
    labels = {name: line.label for name, line in found.items()}
    key = _labeller(connection, given.key)
    outcomes, changes = [], []
    for k, (name, said) in enumerate(zip(given.names, given.labels, strict=True)):
        line = found.get(name)
        if line is None:
            outcomes.append(Outcome.LATE if name in late else Outcome.UNKNOWN)
        elif line.bundle != source.bundle:  # its numbers mean another model's classes
            outcomes.append(Outcome.LATE)
        elif labels[name] is None:
            labels[name] = said
            sought = {} if given.asked is None else {"asked": given.asked[k]}
            changes.append({"at": line.seq, "label": said, "labelled": given.time, "key": key, **sought})
            outcomes.append(Outcome.ACCEPTED)
        else:
            outcomes.append(Outcome.DUPLICATE if labels[name] == said else Outcome.CONFLICTING)
    if changes:
        # Another engine may have labelled it since: the first label stays here, too.
        where = (served.c.seq == sa.bindparam("at")) & served.c.label.is_(None)
        connection.execute(sa.update(served).where(where), changes)
    return outcomes


def _labeller(connection: sa.Connection, key: str | None) -> int:
    """A small number for who labels: keys may be secrets, so none is kept. −1 for nobody in particular."""
    if key is None:
        return -1
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    known = sa.select(labellers.c.id).where(labellers.c.digest == digest)
    if (number := connection.execute(known).scalar_one_or_none()) is None:
        add(connection, labellers, {"digest": digest})
        number = connection.execute(known).scalar_one()
    return int(number)


def _gone(connection: sa.Connection, source: Source, names: Sequence[Name]) -> set[Name]:
    """Those of the names whose rows were let go."""
    hashes = {hash_of(name): name for name in names}
    some = list(hashes)
    found: set[int] = set()
    for start in range(0, len(some), AT_ONCE):
        chosen = gone.c.hash.in_(some[start : start + AT_ONCE])
        found |= set(connection.execute(sa.select(gone.c.hash).where(gone.c.model == source.model, chosen)).scalars())
    return {hashes[number] for number in found}
