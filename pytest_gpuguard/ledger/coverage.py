"""Which claims nobody looks at: gone, renamed, new, long not evaluated, without an opinion, due for another look.

It must never call a claim gone after a run of part of the suite.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timezone
from typing import Final

from ..claims.account import printable
from ..claims.judgement import Verdict
from .record import Kind, Record
from .suspects import COUNTING, expected_in

#: Flags with a value that says nothing of what is served.
_OF_THE_BOOT: Final = frozenset({"--port", "--host", "--nccl-port", "--dist-init-addr"})


@dataclass(frozen=True, slots=True)
class Unevaluated:
    """A claim without an answer. ``when`` it last had one (epoch seconds; None: never), and ``runs`` since then."""

    claim: str
    when: float | None
    runs: int

    def __str__(self) -> str:
        """``test_a.py::test_fits: not evaluated for 5 runs, last on 2026-01-30``, in UTC."""
        runs = f"{self.runs} run{'' if self.runs == 1 else 's'}"
        if self.when is None:
            return f"{printable(self.claim)}: never evaluated" + (f", in {runs}" if self.runs else "")
        return f"{printable(self.claim)}: not evaluated for {runs}, last on {_day(self.when)}"


@dataclass(frozen=True, slots=True)
class Renamed:
    """A claim that is gone and a new one that is like it: a guess."""

    old: str
    new: str

    def __str__(self) -> str:
        """With the command that records it."""
        return f"perhaps renamed: gpuguard ledger alias {_quoted(self.old)} {_quoted(self.new)}"


@dataclass(frozen=True, slots=True)
class Overdue:
    """A claim past its ``claim(recheck=…)``, by so many days."""

    claim: str
    recheck: date
    days: int

    def __str__(self) -> str:
        """``test_a.py::test_fits: recheck was due on 2027-03-01, 4 days ago``."""
        days = f"{self.days} day{'' if self.days == 1 else 's'}"
        return f"{printable(self.claim)}: recheck was due on {self.recheck.isoformat()}, {days} ago"


@dataclass(frozen=True, slots=True)
class Coverage:
    """Claims by what is missing of them, sorted by name; the unevaluated with the longest first.

    ``complete``: the whole suite was collected; else nothing is known of ``vanished`` and ``renamed``.
    """

    complete: bool
    vanished: tuple[str, ...] = ()
    renamed: tuple[Renamed, ...] = ()
    new: tuple[str, ...] = ()
    never_evaluated: tuple[Unevaluated, ...] = ()
    unstated: tuple[str, ...] = ()
    overdue: tuple[Overdue, ...] = ()


def coverage(
    collected: Collection[str] | None,
    now: Sequence[Record],
    evaluated: Mapping[str, tuple[float | None, int]],
    aliases: Mapping[str, str],
    rechecks: Mapping[str, str],
    today: date,
    runs: int = 3,
    before: Sequence[Record] = (),
    kind: Kind = "verified",
) -> Coverage:
    """What the ledger and a run leave unsaid.

    ``collected``: every claim of the suite, or None when only part of it was collected or selected. ``evaluated``:
    ``Store.evaluated(kind)`` as it was before this run; its claims are those that are known. ``aliases``: old name →
    new. ``rechecks``: claim → date, as ``claim(recheck=…)`` says it. A claim is unevaluated when no run of ``kind``
    ever answered it, this one neither, or none of the last ``runs``. ``before``: the last records of the ledger, with
    evidence, to guess at renamed claims by (``Store.latest()``). Raises ValueError for a recheck that is no date.
    """
    known = {_last_name(one, aliases) for one in (*evaluated, *(one.claim for one in before if one.kind == kind))}
    here = {one.claim for one in now} if collected is None else set(collected)
    vanished = sorted(known - here) if collected is not None else []
    new = sorted(here - known)
    return Coverage(
        collected is not None,
        tuple(vanished),
        tuple(sorted(_renamed(vanished, new, before, now), key=lambda one: (one.old, one.new))),
        tuple(new),
        tuple(_unevaluated(here, now, evaluated, aliases, runs, kind)),
        tuple(sorted({one.claim for one in now if one.verdict == Verdict.UNSTATED.value})),
        tuple(_overdue(rechecks, today)),
    )


def _last_name(claim: str, aliases: Mapping[str, str]) -> str:
    """What a claim is called now. Aliases that run in a circle end at the name where they close it."""
    seen = {claim}
    while (newer := aliases.get(claim)) is not None and newer not in seen:
        seen.add(newer)
        claim = newer
    return claim


def _unevaluated(
    here: Collection[str],
    now: Sequence[Record],
    evaluated: Mapping[str, tuple[float | None, int]],
    aliases: Mapping[str, str],
    runs: int,
    kind: Kind,
) -> list[Unevaluated]:
    answered = {one.claim for one in now if one.verdict in COUNTING and one.kind == kind}
    last: dict[str, tuple[float | None, int]] = {}
    for claim, (when, since) in evaluated.items():
        name = _last_name(claim, aliases)
        other = last.get(name)
        if other is None or (when is not None and (other[0] is None or when > other[0])):
            last[name] = when, since
    found = [
        Unevaluated(claim, when, since)
        for claim, (when, since) in last.items()
        if claim in here and claim not in answered and (when is None or since >= runs)
    ]
    return sorted(found, key=lambda one: (one.when is not None, -one.runs, one.when or 0.0, one.claim))


def _overdue(rechecks: Mapping[str, str], today: date) -> Iterable[Overdue]:
    for claim, text in sorted(rechecks.items()):
        try:
            due = date.fromisoformat(text)
        except ValueError:
            raise ValueError(f'{claim}: recheck={text!r} is not a date: write "2027-03-01"') from None
        if due < today:
            yield Overdue(claim, due, (today - due).days)


@dataclass(frozen=True, slots=True)
class _Likeness:
    """What two names of one claim would share. ``server`` is None where it did not boot."""

    expectations: frozenset[str]
    server: tuple[str, ...] | None
    test: str


def _renamed(
    vanished: Sequence[str], new: Sequence[str], before: Sequence[Record], now: Sequence[Record]
) -> Iterable[Renamed]:
    """Pairs that expect the same of the same server, or of one that is not known if the test's name is the same.

    What has two such partners gets none.
    """
    old, fresh = _likenesses(before, set(vanished)), _likenesses(now, set(new))
    keys: tuple[Callable[[_Likeness], Hashable], ...] = (
        lambda one: (one.expectations, one.server, one.test) if one.server else None,
        lambda one: (one.expectations, one.server) if one.server else None,
        lambda one: (one.expectations, one.test),
    )
    for key in keys:
        gone, came = _only(old, key), _only(fresh, key)
        for like in gone.keys() & came.keys():
            name, other = gone[like], came[like]
            if None in (old[name].server, fresh[other].server) or old[name].server == fresh[other].server:
                yield Renamed(name, other)
                del old[name], fresh[other]


def _only(claims: Mapping[str, _Likeness], key: Callable[[_Likeness], Hashable]) -> dict[Hashable, str]:
    """The claims that share their key with no other one."""
    found: dict[Hashable, list[str]] = {}
    for name, one in claims.items():
        if (like := key(one)) is not None:
            found.setdefault(like, []).append(name)
    return {like: names[0] for like, names in found.items() if len(names) == 1}


def _likenesses(records: Sequence[Record], claims: Collection[str]) -> dict[str, _Likeness]:
    """By the last record of each of these claims."""
    last: dict[str, Record] = {}
    expectations: dict[tuple[str, str], set[str]] = {}
    for one in records:
        if one.claim in claims:
            expectations.setdefault((one.run, one.claim), set()).update(expected_in(one))
            if one.claim not in last or last[one.claim].when <= one.when:
                last[one.claim] = one
    return {
        claim: _Likeness(frozenset(expectations[one.run, claim]), _server(one), _test(one.nodeid))
        for claim, one in last.items()
    }


def _server(record: Record) -> tuple[str, ...] | None:
    """Its command line from the first flag on, without what every boot gets anew."""
    given = record.evidence.get("argv")
    argv = [str(one) for one in given] if isinstance(given, list | tuple) else []
    argv = argv[argv.index("--") + 1 :] if "--" in argv else argv  # what stands before is a simulator's own
    start = next((at for at, one in enumerate(argv) if one.startswith("--")), len(argv))
    kept: list[str] = []
    skip = False
    for one in argv[start:]:
        if not skip and one.partition("=")[0] not in _OF_THE_BOOT:
            kept.append(one)
        skip = one in _OF_THE_BOOT
    return tuple(kept) or None


def _test(nodeid: str) -> str:
    """The test's name with its parameters, without its file and class."""
    path, _, parameters = nodeid.partition("[")
    return path.rpartition("::")[2] + parameters


def _quoted(claim: str) -> str:
    return shlex.quote(printable(claim))


def _day(when: float) -> str:
    return datetime.fromtimestamp(when, timezone.utc).date().isoformat()
