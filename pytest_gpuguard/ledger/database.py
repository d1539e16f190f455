"""Where a ledger is, how it is connected to, and what its errors mean. It must never show a password.

Connections are made so that what was committed survives kill -9 and a power cut, and so that a writer waits for others.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from ..files import make_folder
from .errors import LedgerError
from .file import BUSY_S, cause, path_in
from .reading import Ask

#: Seconds that a server has to answer.
CONNECT_S: Final = 10

_POSTGRES: Final = ("postgresql", "postgres", "postgresql+psycopg")
_SECRET: Final = ("password", "sslpassword")

_SERVER: Final = (
    ("password authentication", "refuses this user or password: correct the URL, or the variable PGPASSWORD"),
    ("no password supplied", "wants a password: put it into the variable PGPASSWORD, or into ~/.pgpass"),
    ("does not exist", "does not have what the URL names: create it, or correct the URL"),
    ("permission denied", "does not let this user write there: GRANT it CREATE on the schema and write access"),
    ("read-only", "cannot be written: it is a standby, or out of room. Name the primary, or make room there"),
    ("no space left", "cannot be written, because its disk is full: make room there"),
    ("lock timeout", f"has had its tables locked for {BUSY_S} s: see who holds them (pg_locks), and try again"),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a ledger is. ``shown`` has no password; ``secrets`` are masked in whatever is told."""

    url: URL = field(repr=False)
    shown: str
    secrets: tuple[str, ...] = field(default=(), repr=False)


def find(url: str) -> Place:
    """Reads ``sqlite:///PATH``, ``postgresql://…``, ``postgres://…``, or a plain path. Raises LedgerError."""
    path = path_in(url)
    if path is not None:
        return Place(URL.create("sqlite", database=path), path)
    scheme, _, rest = url.partition("://")
    if scheme not in _POSTGRES:
        raise LedgerError(
            f"a ledger cannot be kept at {scheme}://: give sqlite:///PATH, postgresql://USER@HOST/DATABASE, or a path"
        )
    try:
        parsed = make_url(f"postgresql+psycopg://{rest}")
    except (ArgumentError, ValueError):  # their text quotes the URL
        raise LedgerError(
            "the ledger's PostgreSQL URL cannot be read: it is postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with "
            "special characters in the password written as %40 and the like"
        ) from None
    secrets = [parsed.password, *(parsed.query.get(name) for name in _SECRET)]
    shown = parsed.set(drivername="postgresql").difference_update_query(_SECRET)
    if shown.password is not None:
        shown = URL.create(shown.drivername, shown.username, None, shown.host, shown.port, shown.database, shown.query)
    return Place(parsed, shown.render_as_string(), tuple(str(one) for one in secrets if one))


def connect(place: Place, make: bool = True) -> Engine:
    """An engine that has not connected yet. Makes the folder of a file; without ``make`` the file must be there.

    Raises LedgerError.
    """
    if place.url.drivername == "sqlite":
        return _sqlite(place, make)
    settings = {"connect_timeout": CONNECT_S, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
    given = {name: value for name, value in settings.items() if name not in place.url.query}
    try:
        # The connection may have been cut while a server booted for twenty minutes: it is looked at before each use.
        engine = create_engine(place.url, pool_pre_ping=True, connect_args={**given, "client_encoding": "utf8"})
    except ImportError as error:
        raise LedgerError(
            f"a ledger in PostgreSQL needs psycopg 3 ({error}): pip install 'pytest-gpuguard[postgres]'"
        ) from None
    event.listen(engine, "connect", _settle)
    return engine


def _sqlite(place: Place, make: bool) -> Engine:
    path = Path(str(place.url.database))
    if not make and not os.path.isfile(path):
        raise LedgerError(f"there is no ledger {place.shown}: a run of pytest makes one")
    try:
        make_folder(path.parent)
        if path.is_dir():
            raise LedgerError(f"the ledger {place.shown} is a folder: name a file in it")
    except OSError as error:
        raise LedgerError(
            f"the folder of the ledger {place.shown} cannot be made ({error.strerror}): make it, or name another place"
        ) from None
    engine = create_engine(place.url, connect_args={"timeout": BUSY_S})
    event.listen(engine, "connect", _durable)
    event.listen(engine, "begin", _begin)
    return engine


def read_only(place: Place) -> Engine | None:
    """An engine for a file that this user may read and not write, or whose folder; None for everything else.

    SQLite would keep files beside a ledger even to read it: it could not, or those who write could not write in them.
    """
    path = Path(str(place.url.database))
    if place.url.drivername != "sqlite" or not os.path.isfile(path) or not os.access(path, os.R_OK):
        return None
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        return None

    def opened() -> sqlite3.Connection:
        # A writer has its files there, which must be read too; where there is none, SQLite may take it that none comes.
        beside = [path.with_name(path.name + end) for end in ("-wal", "-shm")]
        how = "mode=ro" if any(one.exists() and one.stat().st_size for one in beside) else "immutable=1"
        return sqlite3.connect(f"{path.as_uri()}?{how}", uri=True, timeout=BUSY_S)

    # Connected anew for each reading: a writer may have come meanwhile.
    engine = create_engine("sqlite://", creator=opened, poolclass=NullPool)
    event.listen(engine, "connect", _durable)
    event.listen(engine, "begin", _begin)
    return engine


def _durable(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # sqlite3 would begin transactions when it likes; `_begin` does
    connection.execute("PRAGMA synchronous=FULL")


def _begin(connection: Connection) -> None:
    # A writer takes its lock at once: one that read first could not wait for another, it would have to start over.
    writes = connection.get_execution_options().get("gpuguard_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _settle(connection: Any, _record: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET lock_timeout = '{BUSY_S}s'")
        cursor.execute("SET synchronous_commit = on")
        cursor.execute("SHOW server_encoding")
        (encoding,) = cursor.fetchone()
    connection.commit()
    if encoding not in ("UTF8", "SQL_ASCII"):
        raise LedgerError(
            f"the ledger's PostgreSQL database is in {encoding}, which cannot hold every log line: make one WITH "
            "ENCODING 'UTF8' TEMPLATE template0, and name that"
        )


def keep_beside(engine: Engine) -> None:
    """Lets readers and a writer of a file work at once (WAL), where the file system can."""
    if engine.dialect.name != "sqlite":
        return
    connection = engine.raw_connection()
    try:
        cursor = connection.cursor()
        if cursor.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            cursor.execute("PRAGMA journal_mode=WAL")
    except sqlite3.OperationalError as error:
        # Another process is in the file at this moment: it makes the change itself, or the next run does. Or this user
        # may only read, which needs none.
        if not any(one in str(error) for one in ("locked", "readonly")):
            raise
    finally:
        connection.close()


def asked(connection: Connection) -> Ask:
    """A connection, as ``reading`` asks it."""

    def ask(statement: str, given: Mapping[str, Any] | None = None, /) -> Sequence[Sequence[Any]]:
        return connection.execute(text(statement), given or {}).all()

    return ask


@contextmanager
def told(place: Place, engine: Engine) -> Iterator[None]:
    """What the database says against it becomes a LedgerError."""
    driver: Any = engine.dialect.loaded_dbapi
    try:
        yield
    except (SQLAlchemyError, driver.Error) as error:
        raise LedgerError(_cause(place, error)) from None


def _cause(place: Place, error: Exception) -> str:
    said = " ".join(str(getattr(error, "orig", None) or error).split())[:500]
    for secret in place.secrets:
        said = said.replace(secret, "***")
    if place.url.drivername == "sqlite":
        return cause(place.shown, said)
    for needle, meaning in _SERVER:
        if needle in said.lower():
            return f"the ledger {place.shown} {meaning} ({said})"
    return f"the ledger {place.shown} cannot be reached or used: is the server up, and the URL right? ({said})"
