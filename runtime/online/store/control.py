"""The desired state of a model: what every engine is to serve, who may decide that, and all that was decided."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import sqlalchemy as sa
from offramp.runtime.errors import InputError, NotLeader
from offramp.runtime.online.online import MODES
from offramp.runtime.online.store.schema import decisions, leases, states, versions
from offramp.runtime.online.store.source import Source, add


@dataclass(frozen=True)
class State:
    """What every engine is to serve.

    revision: how many decisions led to it. bundle: a manifest's digest. point: an operating point's name, "" for the
    engine's own. calibration: the version in force, 0 for the bundle's own. frozen: no version may take over by itself.
    mode: one of MODES.
    """

    revision: int
    bundle: str
    point: str
    calibration: int
    frozen: bool
    mode: str


@dataclass(frozen=True)
class Version:
    """A calibration that was made online. document: what is served under it, as text. parent: what it came from."""

    version: int
    parent: int
    time: float
    bundle: str
    method: str
    document: str


@dataclass(frozen=True)
class Decision:
    """One entry of the log. revision: the state's after it. by: a person, or the engine that led. token: its lease's.

    version: the calibration version that was added with it. numbers: why, whatever decided it.
    """

    revision: int
    time: float
    kind: str
    by: str
    token: int | None
    version: int | None
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Lease:
    """Leave to decide until somebody else gets it. token: larger than every earlier one of this name."""

    name: str
    holder: str
    token: int
    until: float


@dataclass(frozen=True)
class Draft:
    """A calibration that becomes a version. in_force: at once."""

    method: str
    document: str
    in_force: bool


def start(connection: sa.Connection, source: Source, digest: str) -> None:
    """A model that is new begins with its bundle's own calibration, and is only observed."""
    first = State(revision=0, bundle=digest, point="", calibration=0, frozen=False, mode="observe")
    add(connection, states, {"model": source.model, **_values(first)})


def state(connection: sa.Connection, source: Source, *, hold: bool = False) -> State:
    """hold: nobody else decides until the transaction's end."""
    chosen = sa.select(*(states.c[field.name] for field in fields(State))).where(states.c.model == source.model)
    return State(*connection.execute(chosen.with_for_update() if hold else chosen).one())


def decide(
    connection: sa.Connection,
    source: Source,
    kind: str,
    numbers: Mapping[str, Any],
    by: Lease | str,
    revision: int | None,
    draft: Draft | None,
    changes: Mapping[str, Any],
) -> State:
    """One decision: its log entry, its version and the new state, all or nothing. Raises NotLeader, InputError."""
    if isinstance(by, Lease):
        _check_newest(connection, by)
    now = state(connection, source, hold=True)
    if revision is not None and now.revision != revision:
        raise NotLeader(f"the state was decided anew (revision {now.revision}, not {revision}): read it again.")
    added = None
    if draft is not None:
        added = _add(connection, source, now, draft)
        changes = {**changes, "calibration": added} if draft.in_force else changes
    new = replace(now, **changes, revision=now.revision + 1)
    _check(connection, source, new)
    connection.execute(sa.update(states).where(states.c.model == source.model).values(_values(new)))
    connection.execute(
        sa.insert(decisions).values(
            model=source.model,
            revision=new.revision,
            time=time.time(),
            kind=kind,
            by=by.holder if isinstance(by, Lease) else by,
            token=by.token if isinstance(by, Lease) else None,
            version=added,
            numbers=_json(numbers),
        )
    )
    return new


def _values(made: State) -> dict[str, Any]:
    return {field.name: getattr(made, field.name) for field in fields(State)}


def _json(numbers: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(numbers), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"numbers: {error}. Expected what JSON can hold; None for what is unknown.") from error


def _check_newest(connection: sa.Connection, lease: Lease) -> None:
    """Held until the transaction's end: nobody takes over in between."""
    newest = sa.select(leases.c.token).where(leases.c.name == lease.name).with_for_update()
    if connection.execute(newest).scalar_one_or_none() != lease.token:
        raise NotLeader(f"{lease.holder} leads no more: somebody else got the lease {lease.name!r} after it.")


def _add(connection: sa.Connection, source: Source, now: State, draft: Draft) -> int:
    newest = sa.select(sa.func.max(versions.c.version)).where(versions.c.model == source.model)
    number: int = (connection.execute(newest).scalar_one() or 0) + 1
    connection.execute(
        sa.insert(versions).values(
            model=source.model,
            version=number,
            parent=now.calibration,
            time=time.time(),
            bundle=now.bundle,
            method=draft.method,
            document=draft.document,
        )
    )
    return number


def _check(connection: sa.Connection, source: Source, new: State) -> None:
    if new.mode not in MODES:
        raise InputError(f"mode is {new.mode!r}, expected one of {', '.join(MODES)}.")
    if new.calibration == 0:
        return
    known = sa.select(versions.c.bundle).where(versions.c.model == source.model)
    bundle = connection.execute(known.where(versions.c.version == new.calibration)).scalar_one_or_none()
    if bundle != new.bundle:
        said = "there is none such" if bundle is None else "it belongs to another bundle"
        raise InputError(f"version is {new.calibration}: {said}.")


def history(connection: sa.Connection, source: Source) -> list[Version]:
    """All versions, oldest first."""
    chosen = sa.select(*(versions.c[field.name] for field in fields(Version)))
    ordered = chosen.where(versions.c.model == source.model).order_by(versions.c.version)
    return [Version(*line) for line in connection.execute(ordered)]


def log(connection: sa.Connection, source: Source, limit: int) -> list[Decision]:
    """The newest decisions, the oldest of them first."""
    chosen = sa.select(*(decisions.c[field.name] for field in fields(Decision))).where(
        decisions.c.model == source.model
    )
    newest = connection.execute(chosen.order_by(decisions.c.revision.desc()).limit(limit)).all()
    return [Decision(**{**line._mapping, "numbers": json.loads(line.numbers)}) for line in reversed(newest)]


def lease(connection: sa.Connection, name: str, holder: str, seconds: float) -> Lease | None:
    """Get or renew a lease; None while another holds it."""
    add(connection, leases, {"name": name, "holder": "", "token": 0, "until": 0.0, "seconds": 0.0})
    held = connection.execute(sa.select(leases).where(leases.c.name == name).with_for_update()).one()
    now = _now(connection)
    # More left than was ever granted: the clock was set back, and its holder may be long gone.
    lasts = 0 < held.until - now <= held.seconds
    if lasts and held.holder != holder:
        return None
    token = held.token if held.holder == holder else held.token + 1
    changed = {"holder": holder, "token": token, "until": now + seconds, "seconds": seconds}
    connection.execute(sa.update(leases).where(leases.c.name == name).values(changed))
    return Lease(name, holder, token, now + seconds)


def release(connection: sa.Connection, held: Lease) -> None:
    """Let the next one have it at once, if it is still held."""
    mine = (leases.c.name == held.name) & (leases.c.token == held.token)
    connection.execute(sa.update(leases).where(mine).values(holder="", until=0.0))


def _now(connection: sa.Connection) -> float:
    """Seconds since the epoch by the one clock that all engines share."""
    if connection.dialect.name != "postgresql":
        return time.time()
    asked = sa.select(sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Double))
    return float(connection.execute(asked).scalar_one())
