"""One model's store: rows go in, labels find them, windows come out, and engines agree on what to serve."""

import logging
import os
import secrets
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any, Self

import numpy as np
import sqlalchemy as sa
from numpy.typing import ArrayLike, NDArray
from offramp.runtime.arrays.class_numbers import class_numbers
from offramp.runtime.errors import InputError, OfframpError, StoreError
from offramp.runtime.online.online import Limits
from offramp.runtime.online.store import control, keeping, labelling, reading
from offramp.runtime.online.store.control import Decision, Draft, Lease, State, Version
from offramp.runtime.online.store.database import Database
from offramp.runtime.online.store.keeping import Completion
from offramp.runtime.online.store.labelling import Labels, Outcome
from offramp.runtime.online.store.lot import Lot, served_of
from offramp.runtime.online.store.served import MOST_CHARACTERS, Served, check_requests
from offramp.runtime.online.store.source import Name, Source, find_source, name_of
from offramp.runtime.online.store.writer import Task, Writer
from offramp.runtime.online.window import LEAST_ASKED, Window

_log = logging.getLogger("offramp.store")
_DAY = 86_400.0


@dataclass
class Counts:
    """What happened since the store was opened.

    kept: rows. repeated: rows whose name was there already. refused: rows whose arrays didn't fit. deleted: rows, by
    their ids. let_go: rows, by the limits. completed: rows that shadow runs made complete. feedback: labels by what
    became of them. Rows that found no place are `Store.dropped`.
    """

    kept: int = 0
    repeated: int = 0
    refused: int = 0
    deleted: int = 0
    let_go: int = 0
    completed: int = 0
    feedback: Counter[Outcome] = field(default_factory=Counter)

    def __iadd__(self, more: "Counts") -> Self:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(more, each.name))
        return self


class Store:
    """Rows that one bundle served, in a database that several engines may share. Any number of threads may use it.

    Serving calls `append` and `complete`, which never wait (unless it is to be durable) and never fail for the
    database's sake. Everything else says what went wrong by StoreError; `alarm` says it as long as it lasts, and as
    long as it does nothing should be recalibrated.
    """

    def __init__(self, database: Database, source: Source, classes: Sequence[str], limits: Limits) -> None:
        """By `open`."""
        self.engine = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        """A name for who has the store open here; no other has it."""
        self.counts = Counts()
        self._database, self._source, self._classes, self._limits = database, source, list(classes), limits
        self._erase = False
        self._counting = Lock()
        # Rows whose callers wait for the disk are bounded by their callers.
        rows = 2**62 if limits.durable else limits.unflushed
        self._writer = Writer(self._write, rows=rows, bytes=limits.unflushed_bytes, seconds=limits.seconds)
        self._end = weakref.finalize(self, _close, self._writer, database, os.getpid())

    @classmethod
    def open(
        cls,
        where: str | Path,
        *,
        model: str,
        bundle: str,
        exits: int,
        classes: Sequence[str],
        limits: Limits | None = None,
    ) -> Self:
        """where: the path of a SQLite file, which is made if there is none, or postgresql://user:password@host/name.

        model: its name; others may lie in the same database. bundle: the digest of its manifest; rows that another one
        served are no part of a window. exits, classes: how many, and their names, as in the manifest.

        Raises StoreError if it isn't a store, is damaged, or a newer offramp's; InputError, RuntimeUnavailable.
        """
        database = Database(where)
        try:
            with database.writing() as connection:
                source = find_source(connection, model, bundle, exits, len(classes))
                control.start(connection, source, bundle)
        except BaseException:
            database.close()
            raise
        return cls(database, source, classes, limits or Limits())

    def close(self) -> None:
        """Write what waits, and let go of the database. It is done at the interpreter's end, too."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alarm(self) -> str | None:
        """Why nothing can be written at present, None when all is well. It ends by itself when that does."""
        return self._writer.alarm

    @property
    def dropped(self) -> int:
        """Rows that weren't kept because too many waited already, or the disk didn't take them."""
        return self._writer.dropped

    @property
    def room(self) -> int:
        """Rows that find a place now."""
        return self._writer.room

    # ------------------------------------------------------------ rows

    def append(self, batch: Served | Lot) -> bool:
        """Keep rows; False if they weren't all taken. It waits for nothing, or, durable, for the disk."""
        rows = len(batch)
        if self._limits.durable:
            return self._waited(batch, rows)
        room = self._writer.room
        if rows <= room:
            return self._writer.put(Task(batch, rows, batch.nbytes))
        fits = max(0, room)
        self._writer.drop(rows - fits)
        taken = (batch.served() if isinstance(batch, Lot) else batch).first(fits)
        self._writer.put(Task(taken, fits, taken.nbytes))
        return False

    def complete(
        self,
        requests: Sequence[str],
        rows: Sequence[int],
        score: NDArray[np.floating],
        logits: Sequence[NDArray[np.floating] | None],
    ) -> bool:
        """Add what deeper exits said after N rows were answered; False if there was no room for it.

        score: (J, N), NaN at exits that didn't run now. logits: J entries (N, C), None where none did. Exits that are
        known already stay as they are; rows that aren't kept, or whose `shadow` is 0, are passed by. Waits as `append`.
        """
        late = Completion(_names(requests, rows), score, logits)
        if self._limits.durable:
            return self._waited(late, len(rows))
        return self._writer.put(Task(late, len(rows), score.nbytes + sum(z.nbytes for z in logits if z is not None)))

    def feedback(
        self,
        requests: Sequence[str],
        rows: Sequence[int],
        labels: ArrayLike,
        key: str | None = None,
        asked: ArrayLike | None = None,
    ) -> list[Outcome]:
        """Give N rows their labels, by number or class name; what became of each. On the disk when it returns.

        A label may come before its row is on the disk, to the engine that served the row. key: who says so, whatever
        tells clients apart; only a small number of it is kept. asked: the probability with which each was sought, (N,)
        or one for all; every row's that isn't said is 1. Many labels in one call cost as much as one.
        Raises InputError naming the first label that is none, and nothing is kept then; StoreError.
        """
        names = _names(requests, rows)
        try:
            listed = labels.tolist() if isinstance(labels, np.ndarray) else list(labels)  # type: ignore[arg-type]
        except TypeError:
            raise InputError(f"labels is {labels!r:.40}, expected a list: one class a row.") from None
        numbers = class_numbers(listed, self._classes, "labels", 0, unknown=False)
        if len(numbers) != len(names):
            raise InputError(f"labels has {len(numbers)} entries, expected {len(names)}: one a row.")
        given = Labels(names, numbers.tolist(), key, time.time(), _sought(asked, len(names)))
        outcomes: list[Outcome] = self._do(lambda c: labelling.label(c, self._source, given))
        with self._counting:
            self.counts.feedback.update(outcomes)
        return outcomes

    def delete(self, requests: Sequence[str]) -> int:
        """Remove all rows of these requests, from the disk as well, also those that still wait; how many there were.

        While somebody reads a SQLite file, its log may hold them until the next rows are written.
        Raises InputError, StoreError.
        """
        check_requests(requests)
        ids = [name_of(id, 0)[0] for id in requests]

        def remove(connection: sa.Connection) -> int:
            self._erase = True
            return keeping.delete(connection, self._source, ids)

        removed: int = self._do(remove)
        with self._counting:
            self.counts.deleted += removed
        return removed

    def window(
        self,
        *,
        point: str | None = None,
        since: float | None = None,
        limit: int = 10_000,
        complete: bool = False,
        labelled: bool = False,
    ) -> Window:
        """The newest rows on the disk that this bundle served, at most `limit`, the oldest of them first.

        point: at this operating point alone. since: answered then or later. complete: only rows with all exits known.
        labelled: only rows whose label is known. Raises StoreError.
        """
        with self._database.reading() as connection:
            return reading.read(
                connection, self._source, point=point, since=since, limit=limit, complete=complete, labelled=labelled
            )

    def flush(self) -> None:
        """Return when all that was appended is on the disk. Raises StoreError."""
        self._do(lambda _: None)

    # ------------------------------------------------------------ what to serve

    def state(self) -> State:
        """What every engine is to serve, by the newest decision. Raises StoreError."""
        with self._database.reading() as connection:
            return control.state(connection, self._source)

    def versions(self) -> list[Version]:
        """All calibrations that were made online, oldest first. Raises StoreError."""
        with self._database.reading() as connection:
            return control.history(connection, self._source)

    def decisions(self, limit: int = 100) -> list[Decision]:
        """The newest decisions, the oldest of them first. Raises StoreError."""
        with self._database.reading() as connection:
            return control.log(connection, self._source, limit)

    def decide(
        self,
        kind: str,
        numbers: Mapping[str, Any],
        *,
        by: Lease | str,
        revision: int | None = None,
        draft: Draft | None = None,
        **changes: Any,
    ) -> State:
        """Log a decision with its numbers, and change the state with it: all of it is on the disk then, or nothing.

        by: the lease under which an engine decides by itself, or the name of the person who does. revision: that of the
        state which was decided upon, if it matters. draft: a calibration that becomes the next version. changes: any of
        bundle, point, calibration, frozen and mode; none for what is only to be remembered, as a refusal is.

        Raises NotLeader if a newer lease was given since, or somebody decided after `revision`; InputError; StoreError.
        """
        unknown = changes.keys() - {"bundle", "point", "calibration", "frozen", "mode"}
        if unknown:
            raise InputError(f"a state has no {sorted(unknown)[0]!r}.")
        if not isinstance(by, Lease):
            _check_person(by)
        decided: State = self._do(
            lambda c: control.decide(c, self._source, kind, numbers, by, revision, draft, changes)
        )
        return decided

    def lease(self, name: str, holder: str, seconds: float) -> Lease | None:
        """Lead for so many seconds from now, or go on leading; None while another does. Raises StoreError.

        holder: no two engines may have the same; `engine` is one. The token grows with each change of hands, and an
        engine that was overtaken, even one that doesn't know, can decide nothing more.
        """
        if not seconds > 0:
            raise InputError(f"seconds is {seconds!r}, expected more than 0.")
        got: Lease | None = self._do(lambda c: control.lease(c, name, holder, seconds))
        return got

    def release(self, lease: Lease) -> None:
        """Let another one lead at once. Raises StoreError."""
        self._do(lambda c: control.release(c, lease))

    # ------------------------------------------------------------ writing

    def _do(self, work: Callable[[sa.Connection], Any]) -> Any:
        return self._writer.do(work)

    def _waited(self, work: Served | Lot | Completion, rows: int) -> bool:
        try:
            return bool(self._writer.do(work, rows))
        except StoreError:  # answering goes on; the rows are counted as dropped
            return False

    def _write(self, tasks: Sequence[Task]) -> list[Any]:
        """All of it in one transaction; a task that fails by itself leaves nothing of its own."""
        limits, counts, results = self._limits, Counts(), list[Any]()
        works = [task.work for task in tasks]
        packed = self._packed(works, counts)
        new = [row for values in packed for row in values or ()]
        with self._database.writing() as connection:
            # Who goes first makes room in the very pages that the new ones need.
            counts.let_go = keeping.let_go(
                connection,
                self._source,
                rows=max(limits.rows - len(new), 0),
                bytes=max(limits.bytes - sum(row.size for row in new), 0),
                before=time.time() - limits.days * _DAY,
            )
            if not tasks:
                keeping.touch(connection, self._source)
            for rows, group in groupby(zip(works, packed, strict=True), lambda pair: isinstance(pair[0], Served | Lot)):
                if rows:
                    batches = [values for _, values in group]
                    together = [row for values in batches for row in values or ()]
                    counts.kept += (kept := keeping.keep(connection, self._source, together))
                    counts.repeated += len(together) - kept
                    results += [values is not None for values in batches]
                else:
                    results += [self._single(connection, work, counts) for work, _ in group]
        with self._counting:
            self.counts += counts
        self._tidy()
        return results

    def _packed(self, works: Sequence[Any], counts: Counts) -> list[list[keeping.Values] | None]:
        """For each batch its rows as they are inserted, None for one that doesn't fit and for what is no batch.

        Rows of all lots stand with the first of them: one by one, lots of a row each would cost three times as much.
        """
        made = [self._alone(work, counts) if isinstance(work, Served) else None for work in works]
        places = [k for k, work in enumerate(works) if isinstance(work, Lot)]
        if not places:
            return made
        try:
            joined = [keeping.values_of(self._source, batch) for batch in served_of([works[k] for k in places])]
        except (InputError, ValueError):  # one of them doesn't fit, or isn't like the others
            for k in places:
                made[k] = self._alone(works[k], counts)
            return made
        for k in places:
            made[k] = []
        made[places[0]] = [row for rows in joined for row in rows]
        return made

    def _alone(self, batch: Served | Lot, counts: Counts) -> list[keeping.Values] | None:
        try:
            return keeping.values_of(self._source, batch.served() if isinstance(batch, Lot) else batch)
        except InputError as error:
            _log.warning("%d served rows can't be kept: %s", len(batch), error)
            counts.refused += len(batch)
            return None

    def _single(self, connection: sa.Connection, work: Any, counts: Counts) -> Any:
        try:
            with connection.begin_nested():
                if not isinstance(work, Completion):
                    return work(connection)
                counts.completed += keeping.complete(connection, self._source, work)
                return True
        except (OfframpError, sa.exc.StatementError, ArithmeticError, TypeError, ValueError) as error:
            if not _is_its_own(error):
                raise
            if isinstance(work, Completion):
                _log.warning("%d rows can't be completed: %s", len(work.names), error)
                counts.refused += len(work.names)
                return False
            return error if isinstance(error, OfframpError) else StoreError(f"it can't be written: {error}.")

    def _tidy(self) -> None:
        try:
            if self._database.tidy(erase=self._erase):
                self._erase = False
        except StoreError as error:  # what was written is written
            _log.warning("%s", error)


def _is_its_own(error: Exception) -> bool:
    """Whether a task failed for what it was given, which is no reason to lose those that are written with it."""
    of_database = isinstance(error, sa.exc.DBAPIError)
    return not of_database or isinstance(error, sa.exc.IntegrityError | sa.exc.DataError)


def _check_person(by: str) -> None:
    """Raises InputError for what is no name: it is read by people, and by databases that take no NUL."""
    if not isinstance(by, str) or not by.strip() or len(by) > MOST_CHARACTERS or not by.isprintable():
        raise InputError(f"by is {by!r:.40}, expected a name: at most {MOST_CHARACTERS} printable characters.")


def _sought(asked: ArrayLike | None, rows: int) -> list[float] | None:
    if asked is None:
        return None
    try:
        given = np.asarray(asked, np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"asked: {error}. Expected numbers, one for each of {rows} labels or for all.") from error
    if given.shape not in ((), (rows,)):
        raise InputError(f"asked has the shape {given.shape}, expected one number, or one for each of {rows} labels.")
    wrong = ~((given >= LEAST_ASKED) & (given <= 1))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(f"asked[{at}] is {given.flat[at]:g}, expected a probability from {LEAST_ASKED:g} to 1.")
    return [float(one) for one in np.broadcast_to(given, rows)]


def _names(requests: Sequence[str], rows: Sequence[int]) -> list[Name]:
    check_requests(requests)
    if len(rows) != len(requests):
        raise InputError(f"rows has {len(rows)} entries, expected {len(requests)}: one a request id.")
    return [name_of(id, row) for id, row in zip(requests, rows, strict=True)]


def _close(writer: Writer, database: Database, process: int) -> None:
    if os.getpid() != process:  # a forked child that ends: its parent still writes
        return
    writer.close()
    database.close()
