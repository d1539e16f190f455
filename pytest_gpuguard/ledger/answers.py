"""What the ledger says, whichever way its tables are read. It must never write, nor import a database.

A claim is shown under its present name, whatever it was called when it was judged.
"""

from __future__ import annotations

import gc
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from . import reading, rows
from .errors import LedgerError
from .names import Alias, names_of, present_names
from .reading import Ask
from .record import Kind, Record, Run

if TYPE_CHECKING:
    from typing_extensions import Self

_NEWEST: Final = re.compile(r"last(?:~(\d{1,6}))?")


class Answers(ABC):
    """A ledger, to be read. Every method raises LedgerError when the database does not do what it should."""

    def __init__(self) -> None:
        self._reader = reading.Reader()

    @property
    @abstractmethod
    def url(self) -> str:
        """Where it is, without a password."""

    @abstractmethod
    def close(self) -> None:
        """Closes all connections."""

    @abstractmethod
    def _asking(self) -> AbstractContextManager[Ask]:
        """A transaction in which the database is asked. Raises LedgerError for what the driver raises in it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _reading(self) -> Iterator[Ask]:
        collects = gc.isenabled()
        gc.disable()  # among tens of thousands of records without a cycle it would search for one again and again
        try:
            with self._asking() as ask:
                yield ask
        finally:
            if collects:
                gc.enable()

    def runs(self, kind: Kind | None = None, limit: int | None = None) -> tuple[Run, ...]:
        """Newest first."""
        with self._reading() as ask:
            return reading.runs(ask, kind, limit)

    def run(self, name: str) -> Run:
        """The run with this id, or the only one whose id begins so; ``last``, ``last~2`` (the second before it)."""
        with self._reading() as ask:
            known = reading.runs(ask)
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
        with self._reading() as ask:
            found = self._reader.records(ask, reading.in_run(rows.clean(run_id)), evidence, confirmed=True)
        return tuple(sorted(found, key=_in_order))

    def raw(self, run_id: str) -> tuple[list[Record], list[rows.Payload]]:
        """A run's judgements and their evidence, under the names of that day, in an order that only they decide."""
        with self._reading() as ask:
            found = self._reader.records(ask, reading.in_run(rows.clean(run_id)), rename=False)
            found.sort(key=lambda one: (one.claim, one.stack, one.expectation))
            return found, reading.payloads(ask, found)

    def history(self, claim: str, limit: int | None = None, evidence: bool = False) -> tuple[Record, ...]:
        """All judgements of a claim, oldest first, under all names that it ever had; the newest ``limit`` of them."""
        with self._reading() as ask:
            names = names_of(rows.clean(claim), present_names(reading.aliases(ask)))
            found = self._reader.records(ask, reading.of_claims(ask, names, limit), evidence)
        return tuple(reversed(found))

    def histories(self, claims: Iterable[str], evidence: bool = False) -> dict[str, tuple[Record, ...]]:
        """``history`` of each of these claims, all of them in one query."""
        with self._reading() as ask:
            present = present_names(reading.aliases(ask))
            called = {claim: present.get(rows.clean(claim), rows.clean(claim)) for claim in claims}
            names = set(called.values())
            names |= {old for old, new in present.items() if new in names}
            # Not renamed again: another process may have renamed a claim meanwhile.
            found = self._reader.records(ask, reading.of_claims(ask, names), evidence, rename=False)
        past: dict[str, list[Record]] = {name: [] for name in called.values()}
        for record in reversed(found):
            name = present.get(record.claim, record.claim)
            past[name].append(record if record.claim == name else replace(record, claim=name))
        return {claim: tuple(past[name]) for claim, name in called.items()}

    def before(self, run_id: str) -> tuple[Record, ...]:
        """What was known when a run started.

        For each claim, cards, stack and kind: the last deciding judgement that says whether the claim holds, of runs
        that started before. Raises LedgerError for an unknown run.
        """
        run = self.run(run_id)
        with self._reading() as ask:
            return tuple(self._reader.newest(ask, reading.last(before=run)))

    def latest(self, kind: Kind = "verified", evidence: bool = False) -> tuple[Record, ...]:
        """What is known now: as ``before``, of all runs."""
        with self._reading() as ask:
            return tuple(self._reader.newest(ask, reading.last(kind=kind), evidence))

    def latest_with(self, part: str, kind: Kind = "verified") -> tuple[Record, ...]:
        """As ``latest``, with this part of the evidence (None where there is none) and no other: all of it would fill
        the memory.
        """
        with self._reading() as ask:
            return tuple(self._reader.newest(ask, reading.last(kind=kind), only=part))

    def evaluated(self, kind: Kind = "verified") -> Mapping[str, tuple[float | None, int]]:
        """Claim → when it was last found to hold or not (epoch seconds; None: never), and how many runs since then
        found that of other claims.
        """
        with self._reading() as ask:
            present = present_names(reading.aliases(ask))
            claims = {present.get(name, name) for name in reading.claims(ask, kind)}
            found = self._reader.newest(ask, reading.last(kind=kind))
            places = {run.id: place for place, run in enumerate(reading.runs(ask, kind))}  # 0 is the newest
            told = reading.telling(ask)
        spoke = sorted(place for name, place in places.items() if name in told)
        answer: dict[str, tuple[float | None, int]] = {name: (None, len(spoke)) for name in claims}
        for record in found:
            # Another writer may have brought the claim in between.
            when, since = answer.get(record.claim, (None, len(spoke)))
            newer = bisect_left(spoke, places.get(record.run, len(places)))
            answer[record.claim] = (max(record.when, when or record.when), min(since, newer))
        return answer

    def aliases(self) -> Mapping[str, str]:
        """Old name → the present one."""
        with self._reading() as ask:
            return present_names(reading.aliases(ask))

    def renamings(self) -> tuple[Alias, ...]:
        """Every renaming that was ever told, for export."""
        with self._reading() as ask:
            return tuple(sorted(reading.aliases(ask), key=lambda one: (one.since, one.old, one.new)))

    def notes(self) -> dict[str, dict[str, Any]]:
        """What was kept by ``Store.amend``: name → JSON object."""
        with self._reading() as ask:
            return reading.notes(ask)

    def count(self) -> tuple[int, int]:
        """Runs and judgements."""
        with self._reading() as ask:
            return reading.count(ask)


def _in_order(one: Record) -> tuple[object, ...]:
    """By time, then by all that tells two of one moment apart: those of claims that were made one may share a name."""
    return (one.when, one.claim, one.stack, one.expectation, one.nodeid, one.cards, one.verdict, one.outcome, one.fact)
