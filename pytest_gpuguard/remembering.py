"""The run's side of the ledger, in the process that reports: verdicts go in, flips and what else changed come out.

It must never keep a run from its end: what is wrong with the ledger is told in a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from .claims.series import Baseline
    from .ledger.flips import Flip, Index
    from .ledger.record import Record, Run
    from .ledger.store import Store
    from .ledger.writer import LedgerWriter
    from .options import Config
    from .packing.ledger_times import Times

#: A claim that so many runs in a row could not decide, on the same stack, fails.
UNDECIDED_RUNS: Final = 3
_NAME: Final = "gpuguard-remembering"


class Remembering:
    """Registered in the process that reports. Nothing is opened before the first verdict."""

    def __init__(self, config: pytest.Config, settings: Config) -> None:
        self._config, self._settings = config, settings
        self._writer: LedgerWriter | None = None
        self._finished = False
        self.flips: tuple[Flip, ...] = ()
        self.differences: tuple[Flip, ...] = ()
        #: What was collected, as ``covered.noted`` says it.
        self.collected: dict[str, Any] | None = None
        self.coverage: dict[str, list[str]] = {}

    @property
    def writer(self) -> LedgerWriter | None:
        """The ledger of this run; None where none is kept."""
        url = self._settings.ledger
        if self._writer is None and url is not None:
            from .ledger.writer import LedgerWriter

            rig = self._settings.rig if self._settings.simulated else ""
            names = [name for name, _ in self._settings.stacks]
            self._writer = LedgerWriter(url, self._config.rootpath, self._settings.kind, names, rig)
        return self._writer

    def before(self) -> Index:
        """What was verified before this run, in this process."""
        from .confirm import known_before
        from .ledger.errors import LedgerError
        from .ledger.flips import index

        writer = self.writer
        if writer is None or writer.store is None:
            return {}
        own = writer.run.id if writer.run is not None else None
        try:
            return index(known_before(writer.store, own, writer.kind))
        except LedgerError:
            return {}

    def rates(self, claim: str) -> Mapping[str, Baseline]:
        """What rates of a claim the ledger has verified, by load and cards."""
        return self.writer.rates(claim) if self.writer is not None else {}

    def share_rates(self, folder: Path, claims: Iterable[str]) -> None:
        """The same of these claims, for xdist's workers."""
        from .confirm import write_rates

        write_rates({name: self.rates(name) for name in claims}, folder)

    def times(self) -> Times:
        """How long claims took where they were last verified; nothing is opened or made for it but to read."""
        from .packing.ledger_times import times_in

        return times_in(self._settings.ledger)

    def share_times(self, folder: Path) -> None:
        """The same, for xdist's workers, where they are to plan by it."""
        from .packing.ledger_times import write_times

        if not self._settings.simulated and (self._settings.budget_s is not None or self._settings.pack):
            write_times(self.times(), folder)

    def share_before(self, folder: Path) -> None:
        """What was verified before this run, for xdist's workers."""
        from .confirm import write_before
        from .ledger.errors import LedgerError

        writer = self.writer
        if writer is not None and writer.store is not None and self._settings.confirm:
            try:
                write_before(writer.store, None, writer.kind, folder)
            except (LedgerError, OSError) as error:
                writer.problem = str(error)

    # ----------------------------------------------------------------------------------------------------------- hooks

    def take(self, report: Any) -> None:
        """A report with a verdict, before anybody counts it: a claim that is undecided once too often fails."""
        from .claims.judgement import Verdict
        from .report.payload import spoken

        data: dict[str, Any] = report.gpuguard
        if self.writer is None or data["verdict"] != Verdict.INCONCLUSIVE.value or data["hearsay"]:
            return
        runs = self.writer.undecided(data) + 1 if report.skipped else 0
        if runs >= UNDECIDED_RUNS:
            fact = f"{data['fact']}; {runs} runs in a row decided nothing on this stack"
            for one in data["judgements"]:
                if all(one[key] == data[key] for key in ("expectation", "verdict", "fact")):
                    one["fact"] = fact
            data["fact"] = fact
            report.outcome = "failed"
            report.longrepr = f"{spoken(data)}: {data['expectation']}: {fact}"

    def keep(self, data: Mapping[str, Any]) -> None:
        """What a claim came to so far: of several workers that judged it, the worst."""
        if self.writer is not None:
            self.writer.add(data)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """All reports have come in."""
        self.finish()

    def finish(self) -> None:
        """End the run in the ledger, and see what flipped."""
        writer = self._writer
        if writer is None or writer.run is None or self._finished:
            return
        from dataclasses import replace

        from .ledger.errors import LedgerError
        from .ledger.flips import differences, flips

        self._finished = True
        writer.finish()
        self.differences = differences(writer.run, writer.records)
        store = writer.store
        if store is not None:
            try:
                present = store.aliases()  # a claim may still run under its old name
                now = [replace(one, claim=present.get(one.claim, one.claim)) for one in writer.records]
                self.flips = flips(writer.run, now, store.before(writer.run.id), store.histories)
                self._cover(writer, store, writer.run)
            except LedgerError as error:
                writer.problem = str(error)
        writer.close()

    def _cover(self, writer: LedgerWriter, store: Store, run: Run) -> None:
        """See which claims nobody looks at, and keep it beside the run."""
        from .covered import lines_of

        if self.collected is not None:
            self.coverage = lines_of(store, run, writer.records, self.collected, writer.evaluated)
            store.amend([f"coverage {run.id}"], lambda name, old: self.coverage)

    def lines(self, width: int) -> list[str]:
        """What flipped, for the terminal; then what differs between the stacks of this run and is no flip already."""
        from .report.flips import lines

        found = lines(self.flips, width)
        told = {_same(one.now) for one in self.flips}
        others = [one for one in self.differences if _same(one.now) not in told]
        if others:
            found += ["between stacks:", *lines(others, width)]
        return found

    def write(self, reporter: Any, verbosity: int) -> None:
        """The sections of what flipped and of what nobody looks at, where there is something, and not under ``-q``;
        what was wrong with the ledger, in a line.
        """
        from .covered import shown

        found = self.lines(reporter._tw.fullwidth) if verbosity >= 0 else []
        if found:
            reporter.write_sep("=", "flips")
            for line in found:
                reporter.write_line(line)
        coverage = shown(self.coverage) if verbosity >= 0 else []
        if coverage:
            reporter.write_sep("=", "coverage")
            for line in coverage:
                reporter.write_line(line)
        problem = self._writer.told() if self._writer is not None else None
        if problem is not None:
            reporter.write_line(f"gpuguard: {problem}", yellow=True)


def _same(one: Record) -> Sequence[str]:
    return (one.claim, one.stack)


def remembering_of(config: pytest.Config) -> Remembering:
    """That of this pytest process, which must be the one that reports."""
    found: Remembering | None = config.pluginmanager.get_plugin(_NAME)
    assert found is not None
    return found


def remember(config: pytest.Config, settings: Config) -> Remembering:
    """Register it."""
    found = Remembering(config, settings)
    config.pluginmanager.register(found, _NAME)
    return found
