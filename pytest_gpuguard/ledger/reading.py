"""Records out of the tables, inside a transaction of the caller's. It must never write."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Connection, Select, select, tuple_

from ..claims.verdict import Verdict
from . import rows, schema
from .names import Alias, present_names
from .record import Kind, Record, Run
from .writing import chunks

_J: Final = schema.judgements.c
_S: Final = schema.subjects.c
#: In the order of a record's fields.
_COLUMNS: Final = (
    *(_J.run, _S.claim, _S.stack, _J.expectation, _J.verdict, _J.outcome, _J.fact, _J.judged, _S.kind, _J.nodeid),
    *(_J.reason, _J.decides, _J.hearsay, _S.cards, _J.fingerprint),
)
_UNDECIDED: Final = Verdict.INCONCLUSIVE.value
_JOINED: Final = schema.judgements.join(schema.subjects, _S.id == _J.subject)


def aliases(connection: Connection) -> tuple[Alias, ...]:
    """Every renaming that was ever told."""
    table = schema.aliases.c
    return tuple(Alias(*row) for row in connection.execute(select(table.old, table.new, table.since)))


def runs(connection: Connection, kind: Kind | None = None, limit: int | None = None) -> tuple[Run, ...]:
    """Newest first."""
    wanted = select(schema.runs).order_by(schema.runs.c.started.desc(), schema.runs.c.id.desc()).limit(limit)
    if kind is not None:
        wanted = wanted.where(schema.runs.c.kind == kind)
    return tuple(rows.run_of(dict(row)) for row in connection.execute(wanted).mappings())


def in_run(run: str) -> Select[Any]:
    """All judgements of one run."""
    return select(*_COLUMNS).select_from(_JOINED).where(_J.run == run)


def of_claims(connection: Connection, names: Iterable[str], limit: int | None) -> Select[Any]:
    """All judgements of claims, newest first."""
    # Asked for by number: a planner without statistics would rather read all judgements than join.
    numbers = [
        number
        for some in chunks(names)
        for number in connection.execute(select(_S.id).where(_S.claim.in_(some))).scalars()
    ]
    wanted = select(*_COLUMNS).select_from(_JOINED).where(_J.subject.in_(sorted(numbers)))
    return wanted.order_by(_J.began.desc(), _J.run.desc(), _J.judged.desc(), _J.key.desc()).limit(limit)


def last(before: Run | None = None, kind: Kind | None = None) -> Select[Any]:
    """For each subject the last judgement that counts, of all runs, or of those that started before one."""
    other = schema.judgements.alias()
    # One seek in the index for each subject: grouping would read every judgement there is.
    newest = select(other.c.id).where(other.c.subject == _S.id, other.c.counts == 1)
    if before is not None:
        newest = newest.where(tuple_(other.c.began, other.c.run) < tuple_(before.started, rows.clean(before.id)))
    order = (other.c.began.desc(), other.c.run.desc(), other.c.judged.desc(), other.c.key.desc())
    chosen = newest.order_by(*order).limit(1).correlate(schema.subjects).scalar_subquery()
    joined = schema.subjects.join(schema.judgements, _J.id == chosen)
    wanted = select(*_COLUMNS, _J.began, _J.key).select_from(joined)
    return wanted if kind is None else wanted.where(_S.kind == kind)


class Reader:
    """Turns rows into records. Fingerprints are kept from one call to the next: they never change."""

    def __init__(self) -> None:
        self._components: dict[str, dict[str, str | None]] = {}

    def records(
        self,
        connection: Connection,
        wanted: Select[Any],
        evidence: bool = False,
        rename: bool = True,
        confirmed: bool = False,
    ) -> list[Record]:
        """In the order of ``wanted``. ``rename``: under the claims' present names. ``confirmed``: with what fresh boots
        came to where that left it undecided, and no other evidence.
        """
        found = connection.execute(wanted).all()
        present = present_names(aliases(connection)) if rename else {}
        told = found if evidence else [row for row in found if confirmed and row[11] and row[4] == _UNDECIDED]
        made = self._made(connection, found, present, told)
        if evidence or not told:
            return made
        return [
            replace(one, evidence={"confirmed": one.evidence.get("confirmed")}) if one.evidence else one for one in made
        ]

    def newest(self, connection: Connection, wanted: Select[Any]) -> list[Record]:
        """Of what ``last`` finds, one per present name of the claim, cards, stack and kind: the newest."""
        found = connection.execute(wanted).all()
        present = present_names(aliases(connection))
        if present:
            chosen: dict[tuple[str, str, str, str], Any] = {}
            for row in found:
                subject = (present.get(row.claim, row.claim), row.cards, row.stack, row.kind)
                other = chosen.get(subject)
                if other is None or _age(other) < _age(row):
                    chosen[subject] = row
            found = list(chosen.values())
        made = self._made(connection, found, present)
        return sorted(made, key=lambda one: (one.claim, one.stack, one.kind, one.cards))

    def _made(
        self, connection: Connection, found: Sequence[Any], present: Mapping[str, str], told: Sequence[Any] = ()
    ) -> list[Record]:
        """``told`` are the rows whose evidence is wanted."""
        self._learn(connection, {row[14] for row in found})
        payloads: dict[tuple[str, str], dict[str, Any]] = {}
        if told:
            cases: dict[str, set[str]] = {}
            for row in told:
                cases.setdefault(row[0], set()).add(rows.digest(row[1], row[2]))
            payloads = {(run, case): data for run, case, _, data in _evidence(connection, cases)}
        with rows.intact("cards"):
            cards = {text: tuple(map(str, json.loads(text))) for text in {row[13] for row in found}}
        learnt = self._components
        # By position: there are tens of thousands of them.
        return [
            Record(
                row[0],
                present.get(row[1], row[1]),
                row[2],
                row[3],
                row[4],
                row[5],
                row[6],
                row[7],
                row[8],
                row[9],
                row[10],
                row[11],
                row[12],
                cards[row[13]],
                learnt[row[14]],
                payloads.get((row[0], rows.digest(row[1], row[2])), {}) if payloads else {},
            )
            for row in found
        ]

    def _learn(self, connection: Connection, digests: set[str]) -> None:
        table = schema.fingerprints.c
        for some in chunks(digests - self._components.keys()):
            for digest, components in connection.execute(
                select(table.digest, table.components).where(table.digest.in_(some))
            ):
                self._components[digest] = rows.unpacked(components, f"fingerprint {digest}")
        if missing := digests - self._components.keys():
            raise rows.damaged(f"the fingerprint {min(missing)} of a verdict is missing")


def _age(row: Any) -> tuple[float, str, float, str]:
    return (row.began, row.run, row.judged, row.key)


def _evidence(connection: Connection, cases: Mapping[str, Iterable[str]]) -> Iterable[tuple[str, str, float, Any]]:
    """Run, case, time and JSON object of what there is for ``cases``: run → keys."""
    table = schema.evidence.c
    for run, wanted in cases.items():
        for some in chunks(wanted):
            query = select(table.case, table.judged, table.data).where(table.run == run, table.case.in_(some))
            for case, judged, data in connection.execute(query):
                yield run, case, judged, rows.unpack(data)


def payloads(connection: Connection, records: Sequence[Record]) -> list[rows.Payload]:
    """The evidence of ``records``, in their order."""
    cases: dict[str, dict[str, Record]] = {}
    for one in records:
        cases.setdefault(one.run, {}).setdefault(rows.case_of(one), one)
    found = {(run, case): (judged, data) for run, case, judged, data in _evidence(connection, cases)}
    return [
        rows.Payload(run, one.claim, one.stack, *found[run, case])
        for run, some in cases.items()
        for case, one in some.items()
        if (run, case) in found
    ]
