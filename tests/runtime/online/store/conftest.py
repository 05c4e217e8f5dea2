"""Where stores lie in these tests: in files, and, among the slow ones, in a PostgreSQL server of their own."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


def _binaries() -> Path:
    """The folder of PostgreSQL's programs, or a skip."""
    found = [Path(path).resolve().parent for path in [shutil.which("initdb")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not found:
        pytest.skip("PostgreSQL isn't installed: `apt-get install postgresql` brings it")
    return found[-1]


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The URL of a server that runs as long as the tests do, without a database's name."""
    psycopg = pytest.importorskip("psycopg")
    programs, home = _binaries(), Path(tempfile.mkdtemp(prefix="offramp-postgres-"))
    user = "postgres" if os.getuid() == 0 else None  # it refuses to run as root
    if user:
        shutil.chown(home, user)
    try:
        made = [programs / "initdb", "-D", home / "data", "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run(made, check=True, capture_output=True, user=user, cwd="/")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = {"port": port, "listen_addresses": "127.0.0.1", "unix_socket_directories": home, "fsync": "off"}
        flags = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(
                [programs / "postgres", "-D", home / "data", *flags], user=user, cwd="/", stdout=log, stderr=log
            )
        url = f"postgresql://postgres@127.0.0.1:{port}"
        try:
            for _ in range(300):
                try:
                    psycopg.connect(f"{url}/postgres").close()
                    break
                except psycopg.OperationalError:
                    time.sleep(0.1)
            yield url
        finally:
            process.send_signal(signal.SIGINT)  # SIGTERM would wait for those that a failed test left connected
            process.wait()
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place where a store can be made."""
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    import psycopg

    server = request.getfixturevalue("server")
    name = f"offramp_{uuid.uuid4().hex}"
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"{server}/{name}"
