"""Makes the tables of a new ledger and moves an old one forward, in one transaction, however many processes try.

It must never touch a ledger of a newer version, nor a database that is somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from sqlalchemy import Connection, Engine, inspect, select, text, update

from . import schema
from .errors import LedgerError

#: Of the advisory lock that PostgreSQL's migrations take. Any number, but always the same one.
_LOCK: Final = 0x67707567


def _to_2(connection: Connection) -> None:
    """Judgements know whether their claim is hearsay; notes are kept."""
    # Written out, as it was then: the tables of this module's day would not be those of that version.
    server = connection.dialect.name == "postgresql"
    name, false = ('TEXT COLLATE "C"', "false") if server else ("TEXT", "0")
    for statement in (
        f"ALTER TABLE gpuguard_judgements ADD COLUMN hearsay BOOLEAN DEFAULT {false} NOT NULL",
        f"CREATE TABLE gpuguard_notes (digest {name} NOT NULL PRIMARY KEY, name TEXT NOT NULL, data TEXT NOT NULL)",
    ):
        connection.execute(text(statement))


#: Version → the step to the next one. Each runs once in a ledger's life, and is never edited once it was released.
STEPS: Final[Mapping[int, Callable[[Connection], None]]] = {1: _to_2}


def bring_up(engine: Engine, place: str, make: bool = True) -> None:
    """Leaves the ledger at this version, durable. ``place`` is its name in messages. Without ``make`` nothing is
    written: it must be at this version already.

    Raises LedgerError for a ledger of a newer version and for a database that is none, before anything is written.
    """
    with engine.connect() as connection, connection.begin():
        found = _version(connection, place)
        if found == schema.VERSION:
            return
    if not make:
        state = "no ledger yet: a run of pytest makes one" if found is None else f"a ledger of version {found}, older"
        raise LedgerError(f"{place} is {state}; nothing in it was changed")
    with (
        engine.connect().execution_options(gpuguard_writes=True) as connection,
        connection.begin(),
    ):
        if connection.dialect.name == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
        version = _version(connection, place)  # again: another process may have been here in between
        if version is None:
            schema.metadata.create_all(connection)
            connection.execute(schema.meta.insert().values(name="version", value=str(schema.VERSION)))
            return
        for step in range(version, schema.VERSION):
            STEPS[step](connection)
        value = update(schema.meta).where(schema.meta.c.name == "version").values(value=str(schema.VERSION))
        connection.execute(value)


def _version(connection: Connection, place: str) -> int | None:
    """None: there is no ledger yet, and one may be made."""
    tables = set(inspect(connection).get_table_names())
    if schema.meta.name not in tables:
        # A server's database may be shared; a file that others keep their tables in is theirs.
        if tables and connection.dialect.name == "sqlite":
            raise LedgerError(
                f"{place} is a database, but no ledger: it has the tables {', '.join(sorted(tables)[:3])}. "
                "Name another file; nothing in this one was changed"
            )
        return None
    found = connection.execute(select(schema.meta.c.value).where(schema.meta.c.name == "version")).scalar()
    if found is None or not found.isdecimal() or int(found) < 1:
        raise LedgerError(
            f"{place} does not say what version of a ledger it is ({found!r}). Restore it from a copy, or name another"
        )
    if int(found) > schema.VERSION:
        raise LedgerError(
            f"{place} is a ledger of version {found}, made by a newer pytest-gpuguard; this one knows versions up to "
            f"{schema.VERSION}. Install the newer one here, or name another ledger; nothing in this one was changed"
        )
    return int(found)
