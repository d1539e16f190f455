"""Records out of the tables, inside a transaction of the caller's. It must never write.

The statements are text with ``:name`` parameters, which both SQLAlchemy and the standard library's sqlite3 take: a
command that only reads a file need not import SQLAlchemy.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from ..claims.judgement import Verdict
from . import rows
from .names import Alias, present_names
from .record import Kind, Record, Run
from .rows import chunks


class Ask(Protocol):
    """A database, in a transaction: all rows that a statement finds."""

    def __call__(self, statement: str, given: Mapping[str, Any] | None = None, /) -> Sequence[Sequence[Any]]:
        """Raises what the driver raises."""


class Query(NamedTuple):
    """A statement and its parameters."""

    statement: str
    given: Mapping[str, Any]


_RUN: Final = ("id", "started", "ended", "host", "kind", "rig", "tool", "suite", "stacks")
#: In the order of a record's fields.
_COLUMNS: Final = (
    "j.run, s.claim, s.stack, j.expectation, j.verdict, j.outcome, j.fact, j.judged, s.kind, j.nodeid, j.reason, "
    "j.decides, j.hearsay, s.cards, j.fingerprint"
)
#: What orders judgements by age follows the record's fields in what ``last`` finds.
_BEGAN, _KEY = 15, 16
_JOINED: Final = "gpuguard_judgements AS j JOIN gpuguard_subjects AS s ON s.id = j.subject"
_UNDECIDED: Final = Verdict.INCONCLUSIVE.value


def version(ask: Ask) -> str | None:
    """What the ledger says its tables' version is; None where it does not."""
    found = ask("SELECT value FROM gpuguard_meta WHERE name = 'version'")
    return str(found[0][0]) if found else None


def aliases(ask: Ask) -> tuple[Alias, ...]:
    """Every renaming that was ever told."""
    return tuple(Alias(*row) for row in ask('SELECT "old", "new", since FROM gpuguard_aliases'))


def runs(ask: Ask, kind: Kind | None = None, limit: int | None = None) -> tuple[Run, ...]:
    """Newest first."""
    where, given = ("", {}) if kind is None else (" WHERE kind = :kind", {"kind": kind})
    statement = f"SELECT {', '.join(_RUN)} FROM gpuguard_runs{where} ORDER BY started DESC, id DESC{_first(limit)}"
    return tuple(rows.run_of(dict(zip(_RUN, row, strict=True))) for row in ask(statement, given))


def in_run(run: str) -> Query:
    """All judgements of one run."""
    return Query(f"SELECT {_COLUMNS} FROM {_JOINED} WHERE j.run = :run", {"run": run})


def of_claims(ask: Ask, names: Iterable[str], limit: int | None = None) -> Query:
    """All judgements of claims, newest first."""
    # Asked for by number: a planner without statistics would rather read all judgements than join.
    numbers: set[int] = set()
    for some in chunks(names):
        listed, given = _listed(some)
        numbers.update(row[0] for row in ask(f"SELECT id FROM gpuguard_subjects WHERE claim IN ({listed})", given))
    # In the text, for a database takes only so many parameters.
    wanted = ", ".join(str(int(one)) for one in sorted(numbers)) or "NULL"
    statement = f"SELECT {_COLUMNS} FROM {_JOINED} WHERE j.subject IN ({wanted}) ORDER BY {_newest_first('j.')}"
    return Query(statement + _first(limit), {})


def last(before: Run | None = None, kind: Kind | None = None) -> Query:
    """For each subject the last judgement that counts, of all runs, or of those that started before one."""
    given: dict[str, Any] = {}
    earlier = where = ""
    if before is not None:
        earlier = " AND (began, run) < (:began, :run)"
        given |= {"began": before.started, "run": rows.clean(before.id)}
    if kind is not None:
        where = " WHERE s.kind = :kind"
        given["kind"] = kind
    # One seek in the index for each subject: grouping would read every judgement there is.
    newest = f"SELECT id FROM gpuguard_judgements WHERE subject = s.id AND counts = 1{earlier}"
    return Query(
        f"SELECT {_COLUMNS}, j.began, j.key FROM gpuguard_subjects AS s JOIN gpuguard_judgements AS j "
        f"ON j.id = ({newest} ORDER BY {_newest_first()} LIMIT 1){where}",
        given,
    )


def claims(ask: Ask, kind: Kind) -> list[str]:
    """Of this kind, under all names that were ever used."""
    return [row[0] for row in ask("SELECT DISTINCT claim FROM gpuguard_subjects WHERE kind = :kind", {"kind": kind})]


def telling(ask: Ask) -> set[str]:
    """The runs that found a claim to hold or not."""
    counting = "SELECT 1 FROM gpuguard_judgements AS j WHERE j.run = r.id AND j.counts = 1"
    return {row[0] for row in ask(f"SELECT r.id FROM gpuguard_runs AS r WHERE EXISTS ({counting})")}


def notes(ask: Ask) -> dict[str, dict[str, Any]]:
    """Name → JSON object."""
    return {name: rows.unpacked(data, f"note {name!r}") for name, data in ask("SELECT name, data FROM gpuguard_notes")}


def count(ask: Ask) -> tuple[int, int]:
    """Runs and judgements."""
    ((number_of_runs, number_of_judgements),) = ask(
        "SELECT (SELECT count(*) FROM gpuguard_runs), (SELECT count(*) FROM gpuguard_judgements)"
    )
    return number_of_runs, number_of_judgements


class Reader:
    """Turns rows into records. Fingerprints are kept from one call to the next: they never change."""

    def __init__(self) -> None:
        self._components: dict[str, dict[str, str | None]] = {}

    def records(
        self,
        ask: Ask,
        wanted: Query,
        evidence: bool = False,
        rename: bool = True,
        confirmed: bool = False,
    ) -> list[Record]:
        """In the order of ``wanted``. ``rename``: under the claims' present names. ``confirmed``: with what fresh boots
        came to where that left it undecided, and no other evidence.
        """
        found = ask(*wanted)
        present = present_names(aliases(ask)) if rename else {}
        told = found if evidence else [row for row in found if confirmed and row[11] and row[4] == _UNDECIDED]
        return self._made(ask, found, present, told, None if evidence else "confirmed")

    def newest(self, ask: Ask, wanted: Query, evidence: bool = False, only: str | None = None) -> list[Record]:
        """Of what ``last`` finds, one per present name of the claim, cards, stack and kind: the newest.

        ``only``: with this part of their evidence, and no other.
        """
        found = ask(*wanted)
        present = present_names(aliases(ask))
        if present:
            chosen: dict[tuple[str, str, str, str], Any] = {}
            for row in found:
                subject = (present.get(row[1], row[1]), row[13], row[2], row[8])
                other = chosen.get(subject)
                if other is None or _age(other) < _age(row):
                    chosen[subject] = row
            found = list(chosen.values())
        made = self._made(ask, found, present, found if evidence or only is not None else (), only)
        return sorted(made, key=lambda one: (one.claim, one.stack, one.kind, one.cards))

    def _made(
        self,
        ask: Ask,
        found: Sequence[Sequence[Any]],
        present: Mapping[str, str],
        told: Sequence[Sequence[Any]] = (),
        only: str | None = None,
    ) -> list[Record]:
        """``told`` are the rows whose evidence is wanted; ``only``: of that, this part."""
        self._learn(ask, {row[14] for row in found})
        payloads: dict[tuple[str, str], dict[str, Any]] = {}
        if told:
            cases: dict[str, set[str]] = {}
            for row in told:
                cases.setdefault(row[0], set()).add(rows.digest(row[1], row[2]))
            payloads = {
                (run, case): data if only is None or not data else {only: data.get(only)}
                for run, case, _, data in _evidence(ask, cases)
            }
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
                bool(row[11]),
                bool(row[12]),
                cards[row[13]],
                learnt[row[14]],
                payloads.get((row[0], rows.digest(row[1], row[2])), {}) if payloads else {},
            )
            for row in found
        ]

    def _learn(self, ask: Ask, digests: set[str]) -> None:
        for some in chunks(digests - self._components.keys()):
            listed, given = _listed(some)
            statement = f"SELECT digest, components FROM gpuguard_fingerprints WHERE digest IN ({listed})"
            for digest, components in ask(statement, given):
                self._components[digest] = rows.unpacked(components, f"fingerprint {digest}")
        if missing := digests - self._components.keys():
            raise rows.damaged(f"the fingerprint {min(missing)} of a verdict is missing")


def _newest_first(table: str = "") -> str:
    return ", ".join(f"{table}{column} DESC" for column in ("began", "run", "judged", "key"))


def _first(limit: int | None) -> str:
    return "" if limit is None else f" LIMIT {int(limit)}"


def _listed(names: Collection[str]) -> tuple[str, dict[str, str]]:
    """The inside of an IN list, and its parameters."""
    given = {f"n{at}": name for at, name in enumerate(names)}
    return ", ".join(f":{one}" for one in given), given


def _age(row: Sequence[Any]) -> tuple[float, str, float, str]:
    return (row[_BEGAN], row[0], row[7], row[_KEY])


def _evidence(ask: Ask, cases: Mapping[str, Iterable[str]]) -> Iterable[tuple[str, str, float, Any]]:
    """Run, case, time and JSON object of what there is for ``cases``: run → keys."""
    for run, wanted in cases.items():
        for some in chunks(wanted):
            listed, given = _listed(some)
            statement = f'SELECT "case", judged, data FROM gpuguard_evidence WHERE run = :run AND "case" IN ({listed})'
            for case, judged, data in ask(statement, {"run": run, **given}):
                yield run, case, judged, rows.unpack(data)


def payloads(ask: Ask, records: Sequence[Record]) -> list[rows.Payload]:
    """The evidence of ``records``, in their order."""
    cases: dict[str, dict[str, Record]] = {}
    for one in records:
        cases.setdefault(one.run, {}).setdefault(rows.case_of(one), one)
    found = {(run, case): (judged, data) for run, case, judged, data in _evidence(ask, cases)}
    return [
        rows.Payload(run, one.claim, one.stack, *found[run, case])
        for run, some in cases.items()
        for case, one in some.items()
        if (run, case) in found
    ]
