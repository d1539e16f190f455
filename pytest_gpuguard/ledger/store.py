"""The ledger in a database: SQLite in a file, or PostgreSQL for many. It must never lose what ``add`` returned for.

Importing it imports SQLAlchemy, so only the controller does, and only once there is something to read or write.
"""

from __future__ import annotations

import gc
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

from sqlalchemy import Connection, Engine, delete, func, select, update

from . import database, reading, rows, schema
from .errors import LedgerError
from .merge import merge_aliases, merge_payloads, merge_records, merge_runs
from .migrate import bring_up
from .names import Alias, names_of, present_names
from .record import Kind, Record, Run
from .writing import chunks, lock, put_evidence, put_records, put_run, upsert

__all__ = ["LedgerError", "Store", "open_ledger"]

_NEWEST: Final = re.compile(r"last(?:~(\d{1,6}))?")
_NOTES_LOCK: Final = 0x67707568


def open_ledger(url: str) -> Store:
    """Opens, and where there is none yet makes, the ledger at ``sqlite:///PATH``, ``postgresql://…`` or a path.

    An older one is moved forward. One that this user may only read is opened for reading: what writes then raises.
    Raises LedgerError: unreachable, neither there nor to be made, no ledger, of a newer version.
    """
    place = database.find(url)
    engine = database.read_only(place) or database.connect(place)
    try:
        with database.told(place, engine):
            bring_up(engine, place.shown)
            database.keep_beside(engine)
    except LedgerError:
        engine.dispose()
        raise
    return Store(place, engine)


class Store:
    """The ledger. Every method raises LedgerError when the database does not do what it should.

    A claim is shown under its present name, whatever it was called when it was judged.
    """

    def __init__(self, place: database.Place, engine: Engine) -> None:
        self._place = place
        self._engine = engine
        self._reader = reading.Reader()

    @property
    def url(self) -> str:
        """Where it is, without a password."""
        return self._place.shown

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections. The next use opens one again."""
        self._engine.dispose()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        collects = gc.isenabled()
        gc.disable()  # among tens of thousands of records without a cycle it would search for one again and again
        try:
            with database.told(self._place, self._engine), self._engine.connect() as connection, connection.begin():
                yield connection
        finally:
            if collects:
                gc.enable()

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

    def runs(self, kind: Kind | None = None, limit: int | None = None) -> tuple[Run, ...]:
        """Newest first."""
        with self._reading() as connection:
            return reading.runs(connection, kind, limit)

    def run(self, name: str) -> Run:
        """The run with this id, or the only one whose id begins so; ``last``, ``last~2`` (the second before it)."""
        with self._reading() as connection:
            known = reading.runs(connection)
        newest = _NEWEST.fullmatch(name)
        if newest is not None:
            back = int(newest[1] or 0)
            if back < len(known):
                return known[back]
            raise LedgerError(f"{self.url} has {len(known)} runs, so there is no {name}")
        found = [one for one in known if one.id == name] or [one for one in known if name and one.id.startswith(name)]
        if len(found) == 1:
            return found[0]
        if found:
            some = ", ".join(one.id for one in found[:3])
            raise LedgerError(f"{len(found)} runs begin with {name!r} ({some}): give more of the id")
        latest = f"the newest is {known[0].id}" if known else "it has no runs"
        raise LedgerError(f"{self.url} has no run {name!r}: {latest}. Give an id, its beginning, last, or last~1")

    def records(self, run_id: str, evidence: bool = False) -> tuple[Record, ...]:
        """All judgements of a run, in the order in which they were made. Unknown runs have none.

        Without ``evidence`` they have only that of fresh boots which disagreed (``confirmed``), for that is a flip.
        """
        with self._reading() as connection:
            found = self._reader.records(connection, reading.in_run(rows.clean(run_id)), evidence, confirmed=True)
        return tuple(sorted(found, key=lambda one: (one.when, one.claim, one.stack, one.expectation)))

    def raw(self, run_id: str) -> tuple[list[Record], list[rows.Payload]]:
        """A run's judgements and their evidence, under the names of that day, in an order that only they decide."""
        with self._reading() as connection:
            found = self._reader.records(connection, reading.in_run(rows.clean(run_id)), rename=False)
            found.sort(key=lambda one: (one.claim, one.stack, one.expectation))
            return found, reading.payloads(connection, found)

    def history(self, claim: str, limit: int | None = None, evidence: bool = False) -> tuple[Record, ...]:
        """All judgements of a claim, oldest first, under all names that it ever had; the newest ``limit`` of them."""
        with self._reading() as connection:
            names = names_of(rows.clean(claim), present_names(reading.aliases(connection)))
            found = self._reader.records(connection, reading.of_claims(connection, names, limit), evidence)
        return tuple(reversed(found))

    def before(self, run_id: str) -> tuple[Record, ...]:
        """What was known when a run started.

        For each claim, cards, stack and kind: the last deciding judgement that says whether the claim holds, of runs
        that started before. Raises LedgerError for an unknown run.
        """
        run = self.run(run_id)
        with self._reading() as connection:
            return tuple(self._reader.newest(connection, reading.last(before=run)))

    def latest(self, kind: Kind = "verified") -> tuple[Record, ...]:
        """What is known now: as ``before``, of all runs."""
        with self._reading() as connection:
            return tuple(self._reader.newest(connection, reading.last(kind=kind)))

    def evaluated(self, kind: Kind = "verified") -> Mapping[str, tuple[float | None, int]]:
        """Claim → when it was last found to hold or not (epoch seconds; None: never), and how many runs since then
        found that of other claims.
        """
        with self._reading() as connection:
            present = present_names(reading.aliases(connection))
            subjects = select(schema.subjects.c.claim).where(schema.subjects.c.kind == kind).distinct()
            claims = {present.get(name, name) for name in connection.execute(subjects).scalars()}
            found = self._reader.newest(connection, reading.last(kind=kind))
            table = schema.judgements.c
            counting = select(table.run).where(table.run == schema.runs.c.id, table.counts == 1).exists()
            places = {run.id: place for place, run in enumerate(reading.runs(connection, kind))}  # 0 is the newest
            told = set(connection.execute(select(schema.runs.c.id).where(counting)).scalars())
        spoke = sorted(place for name, place in places.items() if name in told)
        answer: dict[str, tuple[float | None, int]] = {name: (None, len(spoke)) for name in claims}
        for record in found:
            # Another writer may have brought the claim in between.
            when, since = answer.get(record.claim, (None, len(spoke)))
            newer = bisect_left(spoke, places.get(record.run, len(places)))
            answer[record.claim] = (max(record.when, when or record.when), min(since, newer))
        return answer

    def alias(self, old: str, new: str) -> None:
        """From now on, claim ``old`` is called ``new``; its history follows. ``alias(a, a)`` takes that back."""
        with self._writing() as connection:
            lock(connection, _NOTES_LOCK)
            since = max((time.time(), *(one.since + 1e-3 for one in reading.aliases(connection))))
            merge_aliases(connection, [Alias(rows.clean(old), rows.clean(new), since)])

    def aliases(self) -> Mapping[str, str]:
        """Old name → the present one."""
        with self._reading() as connection:
            return present_names(reading.aliases(connection))

    def renamings(self) -> tuple[Alias, ...]:
        """Every renaming that was ever told, for export."""
        with self._reading() as connection:
            return tuple(sorted(reading.aliases(connection), key=lambda one: (one.since, one.old, one.new)))

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

    def notes(self) -> dict[str, dict[str, Any]]:
        """What was kept by ``amend``: name → JSON object."""
        with self._reading() as connection:
            table = schema.notes.c
            found = connection.execute(select(table.name, table.data))
            return {name: rows.unpacked(data, f"note {name!r}") for name, data in found}

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

    def count(self) -> tuple[int, int]:
        """Runs and judgements."""
        with self._reading() as connection:
            tables = (schema.runs, schema.judgements)
            first, second = (connection.execute(select(func.count()).select_from(one)).scalar_one() for one in tables)
            return first, second
