"""Rows into the tables, inside a transaction of the caller's. It must never begin or end one.

Rows of one table are written in the order of their keys, and tables in one order, so that writers cannot deadlock.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table, select, text, update

from . import rows, schema
from .errors import LedgerError
from .record import Record, Run
from .rows import chunks


def lock(connection: Connection, number: int) -> None:
    """Until the transaction ends, keeps others out that ask for the same number. SQLite has one writer anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": number})


def upsert(
    connection: Connection, table: Table, new: Sequence[Mapping[str, Any]], keys: Sequence[str], replace: bool = True
) -> None:
    """Inserts rows; those whose keys are there already are replaced, or left as they are."""
    if not new:
        return
    make: Any = importlib.import_module(f"sqlalchemy.dialects.{connection.dialect.name}").insert  # the one in use
    statement = make(table)
    if replace:
        values = {name: statement.excluded[name] for name in new[0] if name not in keys}
        statement = statement.on_conflict_do_update(index_elements=list(keys), set_=values)
    else:
        statement = statement.on_conflict_do_nothing(index_elements=list(keys))
    connection.execute(statement, sorted(new, key=lambda row: tuple(row[name] for name in keys)))


def put_run(connection: Connection, run: Run) -> None:
    """The run as it is now, whatever was known of it before."""
    row = rows.run_row(run)
    before = connection.execute(select(schema.runs.c.started).where(schema.runs.c.id == row["id"])).scalar()
    upsert(connection, schema.runs, [row], ["id"])
    if before is not None and before != row["started"]:
        table = schema.judgements
        connection.execute(update(table).where(table.c.run == row["id"]).values(began=row["started"]))


def starts(connection: Connection, names: Iterable[str]) -> dict[str, float]:
    """Run → when it started; without those that the ledger does not know."""
    table = schema.runs.c
    return {
        name: started
        for some in chunks(names)
        for name, started in connection.execute(select(table.id, table.started).where(table.id.in_(some)))
    }


def put_records(connection: Connection, records: Sequence[Record]) -> None:
    """Judgements, and what they refer to; the same judgement again replaces. Raises LedgerError for an unknown run."""
    began = starts(connection, (rows.clean(one.run) for one in records))
    for record in records:
        if rows.clean(record.run) not in began:
            raise LedgerError(f"run {record.run} is not in the ledger, so nothing can be added to it: begin it first")
    subjects = {row["digest"]: row for row in map(rows.subject_row, records)}
    upsert(connection, schema.subjects, list(subjects.values()), ["digest"], replace=False)
    numbers: dict[str, int] = {}
    for some in chunks(subjects):
        table = schema.subjects.c
        query = select(table.digest, table.id).where(table.digest.in_(some))
        numbers.update((row.digest, row.id) for row in connection.execute(query))
    prints = {row["digest"]: row for row in map(rows.fingerprint_row, records)}
    upsert(connection, schema.fingerprints, list(prints.values()), ["digest"], replace=False)
    judgements = [
        rows.judgement_row(one, numbers[rows.subject_row(one)["digest"]], began[rows.clean(one.run)]) for one in records
    ]
    upsert(connection, schema.judgements, judgements, ["run", "key"])


def put_evidence(connection: Connection, payloads: Iterable[rows.Payload]) -> None:
    """Payloads, once per run, claim and stack; the same again replaces."""
    new = {
        (rows.clean(one.run), rows.case_of(one)): {"judged": one.when, "data": rows.pack(one.evidence)}
        for one in payloads
    }
    found = [{"run": run, "case": case, **row} for (run, case), row in new.items()]
    upsert(connection, schema.evidence, found, ["run", "case"])
