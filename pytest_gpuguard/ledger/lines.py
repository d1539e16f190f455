"""The ledger as JSON Lines: for runners without a database, for keeping, for merging. It must never import a database.

One object per line; its only key says what it is: ``format``, ``run``, ``record``, ``evidence``, ``finish``, ``alias``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any, Final

from . import rows
from .errors import LedgerError
from .names import Alias
from .record import Record, Run

if TYPE_CHECKING:
    from .store import Store

FORMAT: Final = 1

#: Lines that go into the ledger together.
_BATCH: Final = 2000


def header() -> str:
    """The first line: by it, a version that knows less refuses the file."""
    return rows.compact({"format": FORMAT})


def run_line(run: Run) -> str:
    """A run, begun or finished."""
    return rows.compact({"run": run.to_dict()})


def record_lines(records: Iterable[Record], payloads: Iterable[rows.Payload] | None = None) -> Iterator[str]:
    """Judgements, then their evidence, once each. None: what the records carry."""
    records = list(records)
    for record in records:
        one = record.to_dict()
        del one["evidence"]
        one["components"] = dict(sorted(one["components"].items()))
        yield rows.compact({"record": one})
    for payload in rows.payloads_of(records) if payloads is None else payloads:
        yield rows.compact({"evidence": {**_plain(payload), "evidence": payload.evidence}})


def _plain(payload: rows.Payload) -> dict[str, Any]:
    return {"run": payload.run, "claim": payload.claim, "stack": payload.stack, "when": payload.when}


def finish_line(run_id: str, ended: float) -> str:
    """The end of a run whose own line is elsewhere."""
    return rows.compact({"finish": {"run": run_id, "ended": ended}})


def export(store: Store, out: IO[str], runs: Sequence[str] | None = None) -> tuple[int, int]:
    """Writes runs (ids, ``last``, …; None: all of them, and what claims are called now), oldest first.

    Equal ledgers give equal text. Returns the number of runs and of judgements. Raises LedgerError for an unknown run.
    """
    chosen = store.runs() if runs is None else tuple({store.run(name) for name in runs})
    out.write(header() + "\n")
    judgements = 0
    for run in sorted(chosen, key=lambda one: (one.started, one.id)):
        out.write(run_line(run) + "\n")
        records, payloads = store.raw(run.id)
        judgements += len(records)
        out.writelines(line + "\n" for line in record_lines(records, payloads))
    if runs is None:
        out.writelines(rows.compact({"alias": asdict(alias)}) + "\n" for alias in store.renamings())
    return len(chosen), judgements


@dataclass(frozen=True, slots=True)
class Imported:
    """What lines held: how many runs and judgements, now all in the ledger, and what is wrong, by line from 1."""

    runs: int
    records: int
    problems: list[tuple[int, str]]


def import_lines(store: Store, lines: Iterable[str | bytes]) -> Imported:
    """Takes in what ``export`` or a ``Spool`` wrote. Twice is once, and the order of several files is of no account.

    A broken line is told, and the others are taken. Raises LedgerError for lines of a newer version (nothing is taken
    from there on), and when the ledger fails.
    """
    reader = _Reader(store)
    for number, line in enumerate(lines, 1):
        reader.take(number, line)
    return reader.done()


def _alias(data: Mapping[str, Any]) -> Alias:
    return Alias(str(data["old"]), str(data["new"]), float(data["since"]))


def _finish(data: Mapping[str, Any]) -> tuple[str, float]:
    return str(data["run"]), float(data["ended"])


def _record(data: Mapping[str, Any]) -> Record:
    return Record.from_dict({"evidence": {}, **data})


_KINDS: Final[Mapping[str, Callable[[Mapping[str, Any]], Any]]] = {
    "run": Run.from_dict,
    "record": _record,
    "evidence": rows.Payload.from_dict,
    "finish": _finish,
    "alias": _alias,
}


@dataclass(slots=True)
class _Reader:
    store: Store
    problems: list[tuple[int, str]] = field(default_factory=list)
    batch: list[Any] = field(default_factory=list)
    records: int = 0
    #: Runs that have a line of their own, and the first line of the records of the others.
    runs: set[str] = field(default_factory=set)
    orphans: dict[str, int] = field(default_factory=dict)
    finished: list[tuple[int, str, float]] = field(default_factory=list)

    def take(self, number: int, line: str | bytes) -> None:
        try:
            one = _read(line)
        except _Broken as broken:
            self.problems.append((number, str(broken)))
            return
        if isinstance(one, tuple):
            self.finished.append((number, *one))
        elif one is not None:
            self._count(number, one)
            self.batch.append(one)
            if len(self.batch) >= _BATCH:
                self._flush()

    def _count(self, number: int, one: Any) -> None:
        if isinstance(one, Run):
            self.runs.add(rows.clean(one.id))
        elif isinstance(one, Record):
            self.records += 1
            self.orphans.setdefault(rows.clean(one.run), number)

    def _flush(self) -> None:
        kinds: dict[type, list[Any]] = {Run: [], Record: [], rows.Payload: [], Alias: []}
        for one in self.batch:
            kinds[type(one)].append(one)
        self.store.merge(kinds[Run], kinds[Record], kinds[rows.Payload], kinds[Alias])
        self.batch.clear()

    def done(self) -> Imported:
        self._flush()
        known = {run.id: run for run in self.store.runs()}
        ends = []
        for number, name, ended in self.finished:
            run = known.get(rows.clean(name))
            if run is None:
                self.problems.append((number, f"run {name[:60]!r} ends, and nothing else is known of it"))
            else:
                ends.append(replace(run, ended=max(ended, run.ended or ended)))
        self.store.merge(runs=ends)
        for name, number in self.orphans.items():
            if name not in self.runs and not known[name].tool:
                told = f"run {name[:60]!r} has no line of its own: it is made up from its records"
                self.problems.append((number, told))
        return Imported(len(self.runs | self.orphans.keys()), self.records, sorted(self.problems))


class _Broken(Exception):
    """What is wrong with one line."""


def _read(line: str | bytes) -> Any:
    """What a line says, with times and ids that the ledger takes; None for an empty one and the header."""
    try:
        text = line.decode() if isinstance(line, bytes) else line
        text = text.lstrip("\ufeff").strip()
        if not text:
            return None
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Broken(f"no JSON ({error})") from None
    if not isinstance(data, dict) or len(data) != 1:
        raise _Broken("no line of a ledger: one object with one key is expected")
    ((kind, value),) = data.items()
    if kind == "format":
        if value != FORMAT:
            raise LedgerError(
                f"these lines have format {value!r}; this pytest-gpuguard reads format {FORMAT}: install a newer one"
            )
        return None
    if kind not in _KINDS:
        raise _Broken(f"no line of a ledger: {kind[:40]!r} is not known")
    try:
        one = _KINDS[kind](value)
        _check(one)
    except KeyError as error:
        raise _Broken(f"this {kind} lacks {error}") from None
    except (TypeError, ValueError, AttributeError, OverflowError, LedgerError) as error:
        raise _Broken(f"this {kind} cannot be read ({error})") from None
    return one


def _check(one: Any) -> None:
    if isinstance(one, Run):
        rows.run_row(one)
    elif isinstance(one, Alias):
        rows.check("alias", one.since)
    elif isinstance(one, tuple):
        rows.check(*one)
    else:
        rows.check(one.run, one.when)
