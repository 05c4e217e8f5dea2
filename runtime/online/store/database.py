"""The database under the store: opened, checked to be ours, brought to this schema, and its errors said plainly."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from offramp.runtime.errors import InputError, RuntimeUnavailable, StoreError, how_to_install
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

SCHEMA = "1"
_MIGRATIONS = Path(__file__).parent / "migrations"
_BEING_MADE = 1.0  # seconds within which another process that makes a store has put its name into the file
_APPLICATION = 0x6F666672  # "offr": SQLite keeps it in the file's head
_HEAD = b"SQLite format 3\0"
_FILE_WAITS = 2.0  # seconds for another process's lock
_SERVER_WAITS = 5.0  # seconds for a server that doesn't answer, or another engine's lock
# Four rows of six exits and 150 classes; of the usual 4 kB every second one would be wasted.
_PAGE = 8192
_LOG_BYTES = 16 * 2**20
# Reading all of a larger file would take longer than starting may: its damage is found where it is read.
_CHECKED_BYTES = 256 * 2**20
_VACUUM_PAGES = 512
_CREATING = 0x6F666672  # PostgreSQL's advisory lock while the tables are made


class Database:
    """A SQLite file, or a PostgreSQL database. Any number of processes may have it open."""

    def __init__(self, where: str | Path) -> None:
        """where: the path of a SQLite file, which is made if there is none, or postgresql://user:password@host/name.

        Raises StoreError if it can't be opened or isn't a store, InputError, RuntimeUnavailable.
        """
        url = _url(where)
        self.is_file = url.get_backend_name() == "sqlite"
        self.name = url.database or "" if self.is_file else url.render_as_string(hide_password=True)
        if self.is_file:
            self._check_file(Path(self.name))
        self._inode: int | None = None
        self.engine = sa.create_engine(url, pool_pre_ping=not self.is_file, connect_args=_connect_args(self.is_file))
        sa.event.listen(self.engine, "connect", _prepare_file if self.is_file else _prepare_session)
        sa.event.listen(self.engine, "begin", _begin_file if self.is_file else _begin_session)
        try:
            self._bring_to_schema()
        except BaseException:
            self.engine.dispose()
            raise
        self._inode = _inode(self.name) if self.is_file else None

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A transaction that ends on the disk, or leaves nothing. Raises StoreError for what the database says."""
        # SQLite would go on to write into a file that nobody finds any more.
        if self.is_file and self._inode is not None and _inode(self.name) != self._inode:
            raise StoreError(f"{self.name}: it was moved or deleted while it was in use. Put it back, or start anew.")
        with self._said(), self.engine.execution_options(writes=True).begin() as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """What was committed before, however long it takes and whoever writes meanwhile. Raises StoreError."""
        with self._said(), self.engine.begin() as connection:
            yield connection

    def tidy(self, *, erase: bool) -> bool:
        """Give back space that nothing needs. erase: also what the log still has of deleted rows.

        False if somebody read at that moment, and the log is still there.
        """
        if not self.is_file:
            return True
        with self._said(), self.engine.connect() as connection:
            raw = connection.connection.dbapi_connection
            assert raw is not None
            free, pages = (
                raw.cursor().execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_count")
            )
            if free > max(_VACUUM_PAGES, pages // 4):
                # A pragma without columns is stepped through only in a script: by itself it frees one page.
                raw.cursor().executescript(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
            return not erase or raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        # Pragmas are run without SQLAlchemy; what a damaged file says of itself may be no text.
        except (SQLAlchemyError, sqlite3.Error, UnicodeDecodeError) as error:
            if "readonly" in str(error):  # whoever came while the file was so would stay so
                self.engine.dispose()
            raise StoreError(f"{self.name}: {_reason(error)}") from error

    def _check_file(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # answers say a lot of who asked: nobody else reads them
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            end = time.monotonic() + _BEING_MADE
            while not _is_ours(_head_of(path)):
                # What was written just now may be a store that another process is making.
                if time.time() - path.stat().st_mtime > _BEING_MADE or time.monotonic() > end:
                    raise _not_ours(path)
                time.sleep(0.01)
        except OSError as error:
            raise StoreError(f"{path}: it can't be opened ({error.strerror}). Choose another place.") from error

    def _bring_to_schema(self) -> None:
        with self.writing() as connection:
            if not self.is_file:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATING)))
            elif connection.dialect.has_table(connection, "served"):
                self._check_damage(connection)
            found = self._schema_of(connection)
            if found == SCHEMA:
                return
            if found is not None and not (found.isdecimal() and int(found) < int(SCHEMA)):
                raise StoreError(
                    f"{self.name}: its schema is {found!r}, and this offramp knows up to {SCHEMA!r}: a newer one wrote "
                    "it. Update offramp, or choose another place."
                )
            # Only here: its import takes longer than opening the store does.
            from alembic import command
            from alembic.config import Config

            config = Config()
            config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    def _check_damage(self, connection: sa.Connection) -> None:
        if Path(self.name).stat().st_size <= _CHECKED_BYTES:
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
            if found != "ok":
                raise StoreError(f"{self.name}: {_DAMAGED} ({found})")

    def _schema_of(self, connection: sa.Connection) -> str | None:
        """The schema's number, None where there is no table at all. Raises StoreError for somebody else's tables."""
        tables = set(sa.inspect(connection).get_table_names())
        if "alembic_version" in tables and "served" in tables:
            return str(connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one_or_none())
        if tables and self.is_file:
            raise _not_ours(self.name)
        if tables & {"served", "alembic_version"}:
            raise StoreError(f"{self.name} has tables of another program. Give offramp a database of its own.")
        return None


def _inode(name: str) -> int | None:
    try:
        return os.stat(name).st_ino
    except OSError:
        return None


def _head_of(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(100)


def _is_ours(head: bytes) -> bool:
    return not head or (head.startswith(_HEAD) and int.from_bytes(head[68:72], "big") == _APPLICATION)


_DAMAGED = "it is damaged. Restore it, or move it away: a new one is made in its place"


def _not_ours(name: str | Path) -> StoreError:
    return StoreError(f"{name} isn't a store of offramp, or none any more. It is left as it is: choose another place.")


def _url(where: str | Path) -> sa.URL:
    if isinstance(where, Path) or "://" not in where:
        return sa.URL.create("sqlite", database=str(Path(where).absolute()))
    try:
        url = sa.make_url(where)
    except (ArgumentError, ValueError) as error:  # the text may hold a password
        raise InputError("the store's URL can't be read: expected postgresql://user:password@host/name.") from error
    if url.drivername not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise InputError(f"the store is of the kind {url.drivername!r}: expected a path, or postgresql://….")
    if find_spec("psycopg") is None:
        raise RuntimeUnavailable(
            f"a store in PostgreSQL needs psycopg, which isn't installed. {how_to_install('postgres')}"
        )
    return url.set(drivername="postgresql+psycopg")


def _connect_args(is_file: bool) -> dict[str, Any]:
    if is_file:
        return {"timeout": _FILE_WAITS, "check_same_thread": False}
    # A network that swallows everything is noticed, too.
    return {"connect_timeout": int(_SERVER_WAITS), "tcp_user_timeout": int(2e3 * _SERVER_WAITS)}


def _prepare_file(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # transactions begin where SQLAlchemy says, not where Python guesses
    run = connection.execute
    if run("PRAGMA page_count").fetchone()[0] == 0:
        run(f"PRAGMA page_size = {_PAGE}")
        run("PRAGMA auto_vacuum = INCREMENTAL")
        run(f"PRAGMA application_id = {_APPLICATION}")
    if run("PRAGMA journal_mode").fetchone()[0] != "wal":
        run("PRAGMA journal_mode = WAL")
    # What was said to be kept is kept even if the power goes: there are few transactions, and one flush each.
    run("PRAGMA synchronous = FULL")
    run("PRAGMA secure_delete = ON")
    run(f"PRAGMA journal_size_limit = {_LOG_BYTES}")


def _prepare_session(connection: Any, _: Any) -> None:
    """Nobody waits for ever: neither for a lock, nor for an engine that was stopped in the middle of a transaction."""
    connection.autocommit = True
    for name, times in (("lock", 1), ("statement", 6), ("idle_in_transaction_session", 2)):
        connection.execute(f"SET {name}_timeout = {int(times * _SERVER_WAITS * 1e3)}")
    connection.autocommit = False


def _begin_file(connection: sa.Connection) -> None:
    # A transaction that reads first and then wants to write would be refused if somebody wrote in between.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")


def _begin_session(connection: sa.Connection) -> None:
    """PostgreSQL begins by itself, with the first statement."""


def _reason(error: Exception) -> str:
    said = (str(getattr(error, "orig", None) or error).strip() or repr(error)).splitlines()[0]
    if isinstance(error, UnicodeDecodeError) or "malformed" in said or "not a database" in said:
        return f"{_DAMAGED} ({said})."
    if "full" in said:
        return f"there is no room left ({said})."
    if "locked" in said:
        return f"another process holds it ({said})."
    return f"the database says: {said}."
