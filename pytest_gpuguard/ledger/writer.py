"""Writes a run's verdicts into the ledger as they are reported, in the process that reports.

It must never change the run's outcome: a ledger that fails makes the run go on into a spool file, and says so.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..claims.drift import raised
from ..claims.judgement import Verdict
from ..claims.series import Baseline
from .changes import changes
from .errors import LedgerError
from .record import Kind, Record, Run

if TYPE_CHECKING:
    from .spool import Spool
    from .store import Store

_GIT_S: Final = 10.0


class LedgerWriter:
    """The ledger of one run. ``url`` is the ledger's; ``root`` pytest's root folder; ``stacks`` their names in order.

    Nothing is opened, and SQLAlchemy not imported, before the first verdict.
    """

    def __init__(self, url: str, root: Path, kind: Kind, stacks: Sequence[str], rig: str = "") -> None:
        self.url, self.kind, self._root, self._stacks = url, kind, root, tuple(stacks)
        #: A line for a person; empty: what the verdicts say of it.
        self.rig = rig
        self.run: Run | None = None
        self.problem: str | None = None
        self._store: Store | None = None
        self._spool: Spool | None = None
        self._broken = False
        self._lost: str | None = None  # why the spool cannot be written either
        self._records: dict[tuple[str, str, str], Record] = {}
        #: What ``Store.evaluated`` said before this run.
        self.evaluated: Mapping[str, tuple[float | None, int]] = {}

    @property
    def records(self) -> tuple[Record, ...]:
        """All judgements so far."""
        return tuple(self._records.values())

    @property
    def store(self) -> Store | None:
        """The ledger, if it could be opened and has not failed since."""
        if self._store is None and not self._broken:
            try:
                from .store import open_ledger

                self._store = open_ledger(self.url)
            except LedgerError as error:
                self._fail(error)
            except ModuleNotFoundError as error:  # a checkout that was not installed: its verdicts are what counts
                cure = "pip install sqlalchemy, or take --gpuguard-ledger none"
                self._fail(LedgerError(f"it cannot be opened without the Python package {error.name}: {cure}"))
        return self._store

    def add(self, data: Mapping[str, Any]) -> None:
        """Remember one claim's verdict."""
        now = time.time()
        if self.run is None:
            self.run = self._begin(now)
        found = list(records_of(data, self.run, now))
        for one in found:
            self._records[one.claim, one.stack, one.expectation] = one
        store = self.store
        if store is not None:
            try:
                store.add(found)
                return
            except LedgerError as error:
                self._fail(error)
        self._spooled(found)

    def rates(self, claim: str) -> dict[str, Baseline]:
        """What rates of a claim were surely reached in earlier runs of this kind, by load and cards."""
        own = self.run.id if self.run is not None else None
        found: dict[str, Baseline] = {}
        try:
            past = self.store.history(claim, evidence=True) if self.store is not None else ()
        except LedgerError:
            return {}
        for one in past:
            if one.decides and one.kind == self.kind and one.run != own:
                found = raised(found, one.evidence.get("rates") or {}, one.cards, one.when)
        return found

    def undecided(self, data: Mapping[str, Any]) -> int:
        """The runs in a row before this one that could not decide the claim, on the same stack and rig.

        None of a rehearsal: what a stand-in cannot show it will not show the third time either.
        """
        if self.kind == "rehearsed":
            return 0
        own = self.run.id if self.run is not None else None
        try:
            past = self.store.history(data["key"]) if self.store is not None else ()
        except LedgerError:
            return 0
        cards, runs = tuple(data["cards"]), set()
        for one in reversed(past):
            alike = (one.stack, one.cards, one.kind) == (data["stack"], cards, self.kind)
            if one.run == own or not one.decides or not alike:
                continue
            if one.verdict != Verdict.INCONCLUSIVE.value or changes(one.components, data["components"]):
                break
            runs.add(one.run)
        return len(runs)

    def finish(self) -> None:
        """The run is over."""
        if self.run is None:
            return
        ended = time.time()
        self.run = replace(self.run, rig=self.rig or _rig_of(self.records), ended=ended)
        if self._store is not None:
            try:
                self._store.begin(self.run)
            except LedgerError as error:
                self._fail(error)
        if self._spool is not None:
            try:
                self._spool.finish(self.run.id, ended)
            except LedgerError as error:
                self._lost = str(error)

    def close(self) -> None:
        """Let go of the database."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _begin(self, now: float) -> Run:
        from .. import __version__

        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
        run = Run(
            id=f"{stamp}-{secrets.token_hex(3)}",
            started=now,
            host=socket.gethostname(),
            kind=self.kind,
            rig=self.rig,
            tool=__version__,
            suite=revision(self._root),
            stacks=self._stacks,
        )
        store = self.store
        if store is not None:
            try:
                self.evaluated = store.evaluated(self.kind)
                store.begin(run)
            except LedgerError as error:
                self._fail(error)
        return run

    def _fail(self, error: LedgerError) -> None:
        """From here on the run goes to a spool file, with what the ledger may not have."""
        self._broken = True
        self.problem = str(error)
        self.close()
        assert self.run is not None or not self._records
        if self.run is not None:
            self._spooled(self.records)

    def _spooled(self, records: Sequence[Record]) -> None:
        if self.run is None or not records:
            return
        from .spool import Spool

        try:
            if self._spool is None:
                self._spool = Spool(self._root / ".gpuguard" / f"spool-{self.run.id}.jsonl")
                self._spool.begin(self.run)
            self._spool.add(records)
        except LedgerError as error:
            self._lost = str(error)

    def told(self) -> str | None:
        """What was wrong, in one line for a person."""
        if self.problem is None:
            return None
        if not self._broken:
            return f"the ledger has this run, but could not be asked: {self.problem}"
        if self._lost is not None:
            return f"this run is not remembered, or not whole: {self.problem}; {self._lost}"
        if self._spool is None:
            return f"this run is not in the ledger: {self.problem}"
        return f"the ledger failed: {self.problem}; this run is in {self._spool.path}: gpuguard ledger import takes it"


def records_of(data: Mapping[str, Any], run: Run, now: float) -> Iterator[Record]:
    """The records of one claim's payload. Equal expectations are numbered: each has a row of its own."""
    seen: dict[str, int] = {}
    decided = False
    for one in data["judgements"]:
        number = seen[one["expectation"]] = seen.get(one["expectation"], 0) + 1
        name = one["expectation"] if number == 1 else f"{one['expectation']} #{number}"
        decides = not decided and all(one[key] == data[key] for key in ("expectation", "verdict", "outcome", "fact"))
        decided = decided or decides
        yield Record(
            run=run.id,
            claim=data["key"],
            stack=data["stack"],
            expectation=name,
            verdict=one["verdict"],
            outcome=one["outcome"],
            fact=one["fact"],
            when=now,
            kind=run.kind,
            nodeid=data["nodeid"],
            reason=one["reason"],
            decides=decides,
            hearsay=data["hearsay"],
            cards=tuple(data["cards"]),
            components=data["components"],
            evidence={name: value for name, value in data.items() if name != "components"},
        )


def _rig_of(records: Sequence[Record]) -> str:
    """The GPUs and the driver that verdicts were true on; no GPU where none was concerned."""
    known = next((one.components for one in records if one.components.get("driver")), None)
    return f"{known.get('gpus')}, driver {known['driver']}" if known is not None else "no GPU"


def revision(folder: Path) -> str | None:
    """The git revision of a folder, with "+" where tracked files differ from it; None outside git."""
    try:
        ran = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.strip() or None if ran.returncode == 0 else None
