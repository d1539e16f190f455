"""A PostgreSQL of the tests' own, from Debian's packages: the tests of the ledger must never touch another one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


def _binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


@dataclass(frozen=True)
class Postgres:
    """A running server. ``password`` is the one of the user ``ledger``, who owns its databases."""

    binaries: Path
    folder: Path
    user: tuple[str, ...]
    port: int
    password: str = "s3cret-w0rd"

    def ctl(self, *args: str) -> None:
        """Runs pg_ctl; its server's output goes to a file, for an inherited pipe would never end."""
        command = [*self.user, str(self.binaries / "pg_ctl"), "-D", str(self.folder / "data"), *args]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    def start(self) -> None:
        options = f"-p {self.port} -k {self.folder} -c listen_addresses=127.0.0.1 -c fsync=on"
        self.ctl("start", "-w", "-l", str(self.folder / "log"), "-o", options)

    def stop(self, mode: str = "fast") -> None:
        self.ctl("stop", "-w", "-m", mode)

    def sql(self, statement: str, database: str = "postgres") -> str:
        """What psql prints for a statement of the superuser's."""
        command = [*self.user, str(self.binaries / "psql"), "-h", str(self.folder), "-p", str(self.port), "-U", "boss"]
        command += ["-d", database, "-v", "ON_ERROR_STOP=1", "-Atqc", statement]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def url(self, database: str, host: str = "127.0.0.1") -> str:
        return f"postgresql://ledger:{self.password}@{host}:{self.port}/{database}"

    def database(self, options: str = "") -> str:
        """The URL of a new, empty database."""
        name = f"ledger_{uuid.uuid4().hex[:12]}"
        self.sql(f"CREATE DATABASE {name} OWNER ledger {options}")
        return self.url(name)


@contextmanager
def running() -> Iterator[Postgres]:
    """A server of its own in a temporary folder, as an unprivileged user, stopped at the end."""
    binaries = _binaries()
    if binaries is None:
        reason = "PostgreSQL is not installed (Debian: apt-get install postgresql)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    # Short, because a socket's path has at most 107 characters; PostgreSQL does not run as root.
    folder = Path(tempfile.mkdtemp(prefix="gpuguard-pg-"))
    user: tuple[str, ...] = ()
    if os.geteuid() == 0:
        shutil.chown(folder, "nobody")
        user = ("setpriv", "--reuid=nobody", "--clear-groups", "--")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Postgres(binaries, folder, user, port)
    try:
        initdb = [*user, str(binaries / "initdb"), "-D", str(folder / "data"), "-U", "boss", "-E", "UTF8"]
        made = subprocess.run(
            [*initdb, "--locale=C.UTF-8", "--auth-local=trust", "--auth-host=scram-sha-256"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert made.returncode == 0, made.stdout + made.stderr
        server.start()
        try:
            server.sql(f"CREATE ROLE ledger LOGIN PASSWORD '{server.password}'")
            yield server
        finally:
            server.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", name="postgres")
def started_postgres() -> Iterator[Postgres]:
    """One server for all tests of a worker. Whoever stops it starts it again."""
    with running() as server:
        yield server


@pytest.fixture(name="url", params=["sqlite", "postgresql"])
def url_of_each_database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a ledger may be made, on each kind of database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    server: Postgres = request.getfixturevalue("postgres")
    return server.database()
