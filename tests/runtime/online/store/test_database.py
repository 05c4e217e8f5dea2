"""What isn't a store, or none any more, is said so once and left as it is."""

import os
import sqlite3
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from kept_rows import opened, rows
from offramp.runtime.errors import InputError, StoreError
from offramp.runtime.online.store.database import Database
from offramp.runtime.online.store.schema import METADATA


@pytest.fixture
def store_file(tmp_path):
    path = tmp_path / "store.db"
    with opened(path) as store:
        for k in range(20):
            store.append(rows([f"r{k}-{i}" for i in range(50)], inputs=[b"x" * 200] * 50))
    return path


def refusal(path) -> str:
    before = path.read_bytes()
    with pytest.raises(StoreError) as refused:
        opened(path)
    assert path.read_bytes() == before
    assert str(path) in str(refused.value)
    return str(refused.value)


def test_the_migrations_lead_to_the_schema(where):
    database = Database(where)
    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []
    database.close()


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("a shopping list\n" * 20)
    assert "isn't a store of offramp" in refusal(path)
    path.write_text("x")
    assert "isn't a store of offramp" in refusal(path)


def test_another_programs_database_is_refused(tmp_path):
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE served (x)")
    connection.close()
    assert "isn't a store of offramp" in refusal(path)


def test_a_newer_schema_is_refused(store_file):
    connection = sqlite3.connect(store_file)
    connection.execute("UPDATE alembic_version SET version_num = '999'")
    connection.commit()
    connection.close()
    assert "a newer one wrote it" in refusal(store_file)


@pytest.mark.parametrize("share", [0.99, 0.5, 0.01])
def test_a_truncated_file_is_refused(store_file, share):
    os.truncate(store_file, int(store_file.stat().st_size * share))
    assert "damaged" in refusal(store_file)


def test_a_file_with_zeros_in_its_middle_is_refused(store_file):
    size = store_file.stat().st_size
    with store_file.open("r+b") as stream:
        stream.seek(size // 2)
        stream.write(bytes(size // 4))
    assert "damaged" in refusal(store_file)


def test_random_damage_is_refused_or_does_no_harm(store_file):
    rng = np.random.default_rng(0)
    whole = store_file.read_bytes()
    for _ in range(10):
        data = bytearray(whole)
        for at in rng.integers(100, len(data), 200):
            data[at] = rng.integers(256)
        store_file.write_bytes(data)
        with suppress(StoreError), opened(store_file) as store:  # any other error is a failure
            assert len(store.window()) <= 1000
            assert store.append(rows(["more"]))


def test_a_table_that_is_lost_later_is_an_alarm_and_answering_goes_on(store_file):
    with opened(store_file) as store:
        connection = sqlite3.connect(store_file)
        connection.execute("DROP TABLE served")
        connection.close()
        store.append(rows(["a"]))
        with pytest.raises(StoreError, match="no such table"):
            store.flush()
        assert "no such table" in store.alarm
        with pytest.raises(StoreError, match="no such table"):
            store.window()
        assert store.append(rows(["b"]))


def test_a_place_where_nothing_can_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="can't be opened"):
        opened(tmp_path / "file" / "store.db")
    with pytest.raises(StoreError, match="can't be opened"):
        opened(tmp_path)


def test_folders_are_made_and_nobody_else_reads_the_file(tmp_path):
    with opened(tmp_path / "a" / "b" / "store.db"):
        modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "a" / "b").iterdir()}
    assert modes == {0o600}


def test_urls_are_of_kinds_that_are_known(tmp_path):
    with pytest.raises(InputError, match="of the kind 'mysql'"):
        opened("mysql://user:secret@host/name")
    with pytest.raises(InputError, match="can't be read"):
        opened("://")


def test_a_server_that_is_not_there_is_said_without_its_password():
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError) as refused:
        opened("postgresql://user:secret@127.0.0.1:1/name")
    assert "127.0.0.1" in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.slow
def test_a_database_with_tables_of_another_program_is_refused(request):
    psycopg = pytest.importorskip("psycopg")
    server = request.getfixturevalue("server")
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE taken")
    with psycopg.connect(f"{server}/taken", autocommit=True) as connection:
        connection.execute("CREATE TABLE served (x int)")
    with pytest.raises(StoreError, match="tables of another program"):
        opened(f"{server}/taken")


def test_what_is_missing_is_said_with_the_command_that_brings_it():
    code = (
        "import sys\n"
        "sys.modules['sqlalchemy'] = None\n"
        "import offramp.runtime.online\n"
        "try:\n    import offramp.runtime.online.store.store\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("RuntimeUnavailable keeping served rows needs SQLAlchemy")
    assert '".[online]"' in printed


def test_a_server_needs_its_driver_and_that_is_said():
    code = (
        "import sys\n"
        "sys.modules['psycopg'] = None\n"
        "from offramp.runtime.online.store.database import Database\n"
        "try:\n    Database('postgresql://user:secret@host/name')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("RuntimeUnavailable a store in PostgreSQL needs psycopg")
    assert '".[postgres]"' in printed


def test_many_may_open_a_new_store_at_once(where):
    code = "import sys; sys.path.insert(0, 'tests/support'); from kept_rows import opened; opened(sys.argv[1]).close()"
    started = [subprocess.Popen([sys.executable, "-c", code, where], stderr=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate()[1] for process in started] == [b""] * 3


def test_tables_are_as_a_reader_of_the_file_expects(store_file):
    engine = sa.create_engine(f"sqlite:///{store_file}")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA page_size").scalar() == 8192
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    engine.dispose()


def test_a_connection_that_was_made_while_nothing_could_be_written_is_not_kept(tmp_path):
    database = Database(tmp_path / "store.db")
    insert = sa.insert(METADATA.tables["labellers"])
    with database.engine.connect() as connection:  # as SQLite opens a file that is read-only at that moment
        connection.exec_driver_sql("PRAGMA query_only = ON")
    with pytest.raises(StoreError, match="readonly"), database.writing() as connection:
        connection.execute(insert.values(digest="a"))
    with database.writing() as connection:
        connection.execute(insert.values(digest="b"))
    database.close()


def test_a_file_that_was_moved_away_is_missed_until_it_is_back(store_file):
    with opened(store_file) as store:
        store_file.rename(store_file.with_suffix(".away"))
        with pytest.raises(StoreError, match="moved or deleted"):
            store.feedback(["r0-0"], [0], [1])
        assert "moved or deleted" in store.alarm
        assert not store_file.exists()
        store_file.with_suffix(".away").rename(store_file)
        for _ in range(100):
            if store.alarm is None:
                break
            time.sleep(0.05)
        assert store.feedback(["r0-0"], [0], [1]) == ["accepted"]
