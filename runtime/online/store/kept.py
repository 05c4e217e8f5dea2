"""What a store has of one bundle, for jobs that read it from outside: they leave nothing in it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sqlalchemy as sa
from offramp.runtime.arrays import Bools
from offramp.runtime.errors import InputError
from offramp.runtime.online.store import control
from offramp.runtime.online.store.control import Decision, State, Version
from offramp.runtime.online.store.database import Database
from offramp.runtime.online.store.reading import read
from offramp.runtime.online.store.schema import bundles, models, served
from offramp.runtime.online.store.source import Source
from offramp.runtime.online.window import Window


@dataclass(frozen=True)
class Kept:
    """Rows that say what calibration needs to know.

    name: of the store, without its password. window: labelled rows with all exits known, of times at which early
    leavers were drawn for shadow runs, oldest first. labelled: rows with a label in all. passed_by: share of the early
    leavers of these times that couldn't be drawn, and so are missing.
    """

    name: str
    window: Window
    labelled: int
    passed_by: float


def read_kept(where: str | Path, *, model: str, bundle: str, exits: int, classes: int, rows: int) -> Kept:
    """The newest `rows` of them that this bundle served. where, model, bundle: as in `Store.open`.

    Raises InputError if there is no such store or it has nothing of this bundle, StoreError, RuntimeUnavailable.
    """
    database = _opened(where)
    try:
        with database.reading() as connection:
            source = _source(connection, database.name, model, bundle, exits, classes)
            window = read(connection, source, point=None, since=None, limit=rows, complete=True, labelled=True)
            begun, passed_by = _shadow_runs(connection, source)
            known = served.c.label.is_not(None) & (served.c.bundle == source.bundle)
            labelled = connection.execute(sa.select(sa.func.count()).where(known)).scalar_one()
    finally:
        database.close()
    return Kept(database.name, window.take(_drawn(window, begun)), labelled, passed_by)


@dataclass(frozen=True)
class Past:
    """What was decided online. name: of the store, without its password. state: in force. versions, decisions: oldest
    first."""

    name: str
    state: State
    versions: list[Version]
    decisions: list[Decision]


def read_past(where: str | Path, *, model: str, bundle: str, decisions: int = 10_000) -> Past:
    """The versions made online and the newest decisions, for this bundle; `read_kept` says what it raises."""
    database = _opened(where)
    try:
        with database.reading() as connection:
            source = _source(connection, database.name, model, bundle, 0, 0)
            made = [one for one in control.history(connection, source) if one.bundle == bundle]
            log = control.log(connection, source, decisions)
            return Past(database.name, control.state(connection, source), made, log)
    finally:
        database.close()


def _opened(where: str | Path) -> Database:
    if "://" not in str(where) and not Path(where).is_file():
        raise InputError(f"{where}: no such file. Name the store that served rows are kept in.")
    return Database(where)


def _source(connection: sa.Connection, name: str, model: str, bundle: str, exits: int, classes: int) -> Source:
    rows = connection.execute(
        sa.select(models.c.name, models.c.id, bundles.c.id, bundles.c.digest).join(
            models, bundles.c.model == models.c.id
        )
    ).all()
    for known, of_model, number, digest in rows:
        if (known, digest) == (model, bundle):
            return Source(of_model, number, exits, classes)
    others = ", ".join(sorted({repr(line[0]) for line in rows})) or "none"
    raise InputError(
        f"{name}: it keeps no row of this bundle ({model!r}, manifest {bundle[:12]}…), but of other ones of the models "
        f"{others}. Name the bundle that served them."
    )


def _shadow_runs(connection: sa.Connection, source: Source) -> tuple[dict[str, float], float]:
    """Since when early leavers were drawn at each operating point; what share of them couldn't be since."""
    early = (served.c.bundle == source.bundle) & (served.c.exit < source.exits - 1)
    drawn = sa.func.min(sa.case((served.c.shadow > 0, served.c.time)))
    first = connection.execute(sa.select(served.c.point, drawn).where(early).group_by(served.c.point)).all()
    begun = {point: float("inf") if time is None else float(time) for point, time in first}
    passed_by = every = 0
    for point, time in begun.items():
        since = early & (served.c.point == point) & (served.c.time >= time)
        missed = sa.func.sum(sa.case((served.c.shadow > 0, 0), else_=1))
        count, lost = connection.execute(sa.select(sa.func.count(), missed).where(since)).one()
        passed_by, every = passed_by + (lost or 0), every + count
    return begun, passed_by / every if every else 0.0


def _drawn(window: Window, begun: dict[str, float]) -> Bools:
    """(n,) rows of times at which whoever left early could be drawn: before, only hard rows have all exits known."""
    since = np.array([begun.get(point, -np.inf) for point in window.point.tolist()])
    return np.asarray(window.time >= since)
