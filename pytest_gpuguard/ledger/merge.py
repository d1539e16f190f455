"""Takes what another ledger holds into this one. The result must never depend on the order of what is taken in.

Each thing has a rank by its content alone; the highest stays. Two made-up runs become one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Final

from sqlalchemy import Connection, select

from . import rows, schema
from .names import Alias
from .record import Record, Run
from .rows import chunks
from .writing import put_evidence, put_records, put_run, upsert

#: Host and rig of a run that is known from its records alone; its ``tool`` is empty.
UNKNOWN: Final = "unknown"


def is_made_up(run: Run) -> bool:
    """Whether it stands for a run whose own line is missing."""
    return not run.tool


def made_up(records: Sequence[Record]) -> Run:
    """A run for records of one run, which must not be empty."""
    started = min(one.when for one in records)
    stacks = tuple(sorted({rows.clean(one.stack) for one in records}))
    kind = max(one.kind for one in records)
    return Run(rows.clean(records[0].run), started, UNKNOWN, kind, UNKNOWN, "", stacks=stacks)


def later(one: Run, other: Run) -> Run:
    """What is to be known of a run of which two things are told."""
    if is_made_up(one) and is_made_up(other):
        started, kind = min(one.started, other.started), max(one.kind, other.kind)
        ended = max((end for end in (one.ended, other.ended) if end is not None), default=None)
        return replace(one, started=started, kind=kind, ended=ended, stacks=tuple(sorted({*one.stacks, *other.stacks})))
    return max(one, other, key=_rank)


def _rank(run: Run) -> tuple[bool, bool, float, str]:
    return (not is_made_up(run), run.ended is not None, run.ended or 0.0, json.dumps(run.to_dict(), sort_keys=True))


def merge_runs(connection: Connection, runs: Iterable[Run]) -> None:
    """Each run as the later of what was and what is told of it."""
    new: dict[str, Run] = {}
    for run in map(_cleaned, runs):
        new[run.id] = later(new[run.id], run) if run.id in new else run
    table = schema.runs
    for some in chunks(new):
        for row in connection.execute(select(table).where(table.c.id.in_(some))).mappings():
            known = rows.run_of(dict(row))
            new[known.id] = later(known, new[known.id])
            if new[known.id] == known:
                del new[known.id]
    for name in sorted(new):
        put_run(connection, new[name])


def _cleaned(run: Run) -> Run:
    return rows.run_of(rows.run_row(run))


def merge_records(connection: Connection, records: Sequence[Record]) -> None:
    """Judgements; the later one stays. Evidence is not looked at."""
    _make_up(connection, records)
    new: dict[tuple[str, str], Record] = {}
    for record in records:
        key = (rows.clean(record.run), rows.key_of(record))
        if key not in new or _worth(new[key]) < _worth(record):
            new[key] = record
    _drop_older(connection, new)
    put_records(connection, list(new.values()))


def merge_payloads(connection: Connection, payloads: Iterable[rows.Payload]) -> None:
    """Evidence; the later one stays."""
    new: dict[tuple[str, str], rows.Payload] = {}
    for payload in payloads:
        rows.check(payload.run, payload.when)
        key = (rows.clean(payload.run), rows.case_of(payload))
        if key not in new or _evidence_worth(new[key]) < _evidence_worth(payload):
            new[key] = payload
    _drop_older_evidence(connection, new)
    put_evidence(connection, new.values())


def _make_up(connection: Connection, records: Sequence[Record]) -> None:
    by_run: dict[str, list[Record]] = {}
    for record in records:
        by_run.setdefault(rows.clean(record.run), []).append(record)
    # Also for runs that are there: a made-up one may have to start earlier now, and a real one stays as it is.
    merge_runs(connection, [made_up(some) for some in by_run.values()])


def _worth(record: Record) -> tuple[float, str]:
    row = rows.judgement_row(record, 0, 0.0)
    return (record.when, json.dumps([row, rows.subject_row(record)["digest"]], sort_keys=True))


def _evidence_worth(payload: rows.Payload) -> tuple[float, str]:
    return (payload.when, rows.compact(dict(payload.evidence)))


def _by_run(keys: Iterable[tuple[str, str]]) -> Iterable[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for run, key in keys:
        found.setdefault(run, []).append(key)
    return [(run, some) for run, names in found.items() for some in chunks(names)]


def _drop_older(connection: Connection, new: dict[tuple[str, str], Record]) -> None:
    """Without what the ledger has in a version at least as late."""
    table, subjects = schema.judgements, schema.subjects.c
    joined = table.join(schema.subjects, subjects.id == table.c.subject)
    for run, keys in _by_run(list(new)):
        query = select(table, subjects.digest.label("about")).select_from(joined)
        for row in connection.execute(query.where(table.c.run == run, table.c.key.in_(keys))).mappings():
            known = {name: value for name, value in row.items() if name not in ("id", "about")}
            known.update(subject=0, began=0.0)
            worth = (row["judged"], json.dumps([known, row["about"]], sort_keys=True))
            if _worth(new[run, row["key"]]) <= worth:
                del new[run, row["key"]]


def _drop_older_evidence(connection: Connection, new: dict[tuple[str, str], rows.Payload]) -> None:
    table = schema.evidence.c
    for run, cases in _by_run(list(new)):
        query = select(table.case, table.judged, table.data).where(table.run == run, table.case.in_(cases))
        for case, judged, data in connection.execute(query):
            if _evidence_worth(new[run, case]) <= (judged, rows.compact(rows.unpack(data))):
                del new[run, case]


def merge_aliases(connection: Connection, aliases: Iterable[Alias]) -> None:
    """Every renaming that was ever told, each with the last time that it was."""
    new: dict[str, Alias] = {}
    for alias in aliases:
        one = Alias(rows.clean(alias.old), rows.clean(alias.new), alias.since)
        key = rows.digest(one.old, one.new)
        if key not in new or new[key].since < one.since:
            new[key] = one
    table = schema.aliases.c
    for some in chunks(new):
        for key, since in connection.execute(select(table.digest, table.since).where(table.digest.in_(some))):
            if new[key].since <= since:
                del new[key]
    upsert(connection, schema.aliases, [{"digest": key, **asdict(one)} for key, one in new.items()], ["digest"])
