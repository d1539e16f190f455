"""The ledger in a database: SQLite in a file, or PostgreSQL for many. It must never lose what ``add`` returned for.

Importing it imports SQLAlchemy, so only the controller does, and only once there is something to read or write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection, Engine, delete, select, update

from . import database, reading, rows, schema
from .answers import Answers
from .errors import LedgerError
from .merge import merge_aliases, merge_payloads, merge_records, merge_runs
from .migrate import bring_up
from .names import Alias
from .record import Record, Run
from .rows import chunks
from .writing import lock, put_evidence, put_records, put_run, upsert

__all__ = ["LedgerError", "Store", "open_ledger"]

_NOTES_LOCK: Final = 0x67707568


def open_ledger(url: str, make: bool = True) -> Store:
    """Opens, and where there is none yet makes, the ledger at ``sqlite:///PATH``, ``postgresql://…`` or a path.

    An older one is moved forward. One that this user may only read is opened for reading: what writes then raises.
    Without ``make`` nothing at all is made or changed: it must be there, and of this version.
    Raises LedgerError: unreachable, neither there nor to be made, no ledger, of a newer version.
    """
    place = database.find(url)
    engine = database.read_only(place) or database.connect(place, make)
    try:
        with database.told(place, engine):
            bring_up(engine, place.shown, make)
            if make:
                database.keep_beside(engine)
    except LedgerError:
        engine.dispose()
        raise
    return Store(place, engine)


class Store(Answers):
    """The ledger. Every method raises LedgerError when the database does not do what it should.

    A claim is shown under its present name, whatever it was called when it was judged.
    """

    def __init__(self, place: database.Place, engine: Engine) -> None:
        super().__init__()
        self._place = place
        self._engine = engine

    @property
    def url(self) -> str:
        """Where it is, without a password."""
        return self._place.shown

    def close(self) -> None:
        """Closes all connections. The next use opens one again."""
        self._engine.dispose()

    @contextmanager
    def _asking(self) -> Iterator[reading.Ask]:
        with database.told(self._place, self._engine), self._engine.connect() as connection, connection.begin():
            yield database.asked(connection)

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with (
            database.told(self._place, self._engine),
            self._engine.connect().execution_options(gpuguard_writes=True) as connection,
            connection.begin(),
        ):
            yield connection

    def begin(self, run: Run) -> None:
        """Notes a run; the same id again replaces what was noted."""
        with self._writing() as connection:
            put_run(connection, run)

    def finish(self, run_id: str, ended: float) -> None:
        """Notes when a run ended, in epoch seconds."""
        rows.check(run_id, ended)
        with self._writing() as connection:
            table = schema.runs
            done = connection.execute(update(table).where(table.c.id == rows.clean(run_id)).values(ended=ended))
            if not done.rowcount:
                raise LedgerError(f"run {run_id} is not in the ledger, so it cannot be finished: begin it first")

    def add(self, records: Sequence[Record]) -> None:
        """Adds judgements of runs that were begun, all or none of them; the same judgement again replaces.

        They are on the disk when it returns.
        """
        if records:
            with self._writing() as connection:
                put_records(connection, records)
                put_evidence(connection, rows.payloads_of(records))

    def alias(self, old: str, new: str) -> None:
        """From now on, claim ``old`` is called ``new``; its history follows. ``alias(a, a)`` takes that back."""
        with self._writing() as connection:
            lock(connection, _NOTES_LOCK)
            since = max((time.time(), *(one.since + 1e-3 for one in reading.aliases(database.asked(connection)))))
            merge_aliases(connection, [Alias(rows.clean(old), rows.clean(new), since)])

    def merge(
        self,
        runs: Iterable[Run] = (),
        records: Sequence[Record] = (),
        payloads: Iterable[rows.Payload] = (),
        aliases: Iterable[Alias] = (),
    ) -> None:
        """Takes in what another ledger holds. Of two versions of a thing the later one stays, in whatever order they
        come; records of runs that are unknown bring a run that is made up from them.
        """
        with self._writing() as connection:
            lock(connection, _NOTES_LOCK)
            merge_runs(connection, runs)
            merge_records(connection, records)
            merge_payloads(connection, [*rows.payloads_of(records), *payloads])
            merge_aliases(connection, aliases)

    def amend(
        self, names: Iterable[str], change: Callable[[str, dict[str, Any] | None], dict[str, Any] | None]
    ) -> None:
        """Changes notes, all or none of them, while no other process does.

        ``change`` gets a name and its note (None: there is none) and returns the new one (None: none any more). What
        it raises leaves all notes as they were.
        """
        wanted = {rows.digest(rows.clean(name)): rows.clean(name) for name in names}
        with self._writing() as connection:
            lock(connection, _NOTES_LOCK)
            table = schema.notes
            found: dict[str, str] = {}
            for some in chunks(wanted):
                query = select(table.c.digest, table.c.data).where(table.c.digest.in_(some))
                found.update((row.digest, row.data) for row in connection.execute(query))
            changed = {
                key: change(name, rows.unpacked(found[key], f"note {name!r}") if key in found else None)
                for key, name in wanted.items()
            }
            for some in chunks(key for key, value in changed.items() if value is None and key in found):
                connection.execute(delete(table).where(table.c.digest.in_(some)))
            kept = [
                {"digest": key, "name": wanted[key], "data": rows.compact(value)}
                for key, value in changed.items()
                if value is not None
            ]
            upsert(connection, table, kept, ["digest"])
