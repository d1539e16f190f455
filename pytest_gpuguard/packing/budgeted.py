"""The budget of one run: what was selected, the clock, who is left out, and the line that tells of it.

It must never stop a claim that has begun, nor hide a fault of the host: what cannot be evaluated anyway costs nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from ..files import read_json
from ..xdist import STOPPED

if TYPE_CHECKING:
    from ..options import Config
    from ..run import Runner
    from .budget import Candidate, Selection

#: In an xdist worker's input: when the controller began, on the clock that all processes of this machine share.
_BEGAN: Final = "gpuguard_began"
#: In the folder that xdist workers share: what the first of them selected, for all.
_SHARED: Final = "budget"
#: A claim that was selected is begun although it would end so little late, as a part of the budget: starting up took
#: time too, and no estimate is as good as that.
_SLACK: Final = 0.05


class Budgeted:
    """Registered when there is a budget: in the process that reports, and in every worker."""

    def __init__(self, config: pytest.Config, settings: Config) -> None:
        assert settings.budget_s is not None
        self._budget_s = settings.budget_s
        self._rehearses = settings.simulated
        self._config = config
        self._worker = hasattr(config, "workerinput")
        self._began: float = getattr(config, "workerinput", {}).get(_BEGAN) or time.monotonic()
        self._share: Path | None = None
        self._selection: Selection | None = None
        self._problem: str | None = None
        self._begun: set[str] = set()
        self._freed = False  # once a test that was selected has been refused
        self._filled: set[str] = set()
        self._took: dict[str, float | None] = {}  # in seconds, call and teardown; None when it skipped itself

    # ------------------------------------------------------------------------------------------------------ selection

    @pytest.hookimpl(optionalhook=True, trylast=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker when the run began; last, so that the shared folder is named already."""
        node.workerinput[_BEGAN] = self._began
        self._share = Path(node.workerinput["gpuguard_share"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Select, after deselection; under xdist one worker does so for all. Asks rig and stacks."""
        if not any(map(concerns, session.items)):
            return
        from ..plugin import runner_of

        runner = runner_of(session.config)
        self._take(runner.session.shared(_SHARED, lambda: self._decide(runner, session.items)))
        self._order(runner, session.items)

    def _decide(self, runner: Runner, items: Sequence[pytest.Item]) -> dict[str, Any]:
        from ..facts.faults import HostFault
        from .budget import select

        found = []
        for index, item in enumerate(items):
            if concerns(item):
                try:
                    found.append(self._candidate(runner, index, item))
                except Exception:  # a hook of a conftest: the test itself will tell
                    continue
        try:
            gpus = [gpu.uuid for gpu in runner.session.rig.leasable]
        except HostFault:
            gpus = []  # told by the claims that need one
        workers = int(getattr(runner.config, "workerinput", {}).get("workercount", 1))
        # No more is chosen than the clock will let begin.
        left = self._budget_s * (1 + _SLACK) - self.elapsed_s
        selection = select([one for one in found if one is not None], self._budget_s, gpus, workers, left)
        return {**selection.to_dict(), "problem": runner.memory.history.problem}

    def _order(self, runner: Runner, items: list[pytest.Item]) -> None:
        """The most valuable first; the same in all workers."""
        from ..collect import CLAIM
        from .budget import by_value

        assert self._selection is not None
        servers = [runner.evaluation(item).share_key() if CLAIM in item.stash else None for item in items]
        order = by_value([item.nodeid for item in items], servers, self._selection)
        items[:] = [items[index] for index in order]

    @staticmethod
    def _candidate(runner: Runner, index: int, item: pytest.Item) -> Candidate | None:
        """One test that wants a share; None for what is not evaluated anyway, or fails at once by a fault."""
        from ..collect import CLAIM
        from .budget import Candidate, value_of
        from .facts import is_skipped, work_of

        evaluation = runner.evaluation(item)
        if is_skipped(item) or evaluation.unmet() or evaluation.fault() is not None:
            return None
        memory = runner.memory
        seen, attempts = memory.history.last(memory.key(item)), memory.history.attempts(memory.key(item))
        parts = memory.parts(item) if seen is not None else {}
        value = value_of(seen, attempts, parts, time.time(), CLAIM in item.stash)
        return Candidate(work_of(runner, index, item), memory.expected(item), value)

    def _take(self, data: Mapping[str, Any]) -> None:
        from .budget import Selection

        self._selection = Selection.from_dict(data)
        self._problem = data["problem"]

    # ----------------------------------------------------------------------------------------------------------- guard

    def left_out(self, nodeid: str) -> str | None:
        """Why a test was not selected; None for one that was, and for what the budget is not for."""
        found = self._selection.left_out.get(nodeid) if self._selection is not None else None
        return found.fact if found is not None else None

    def refusal(self, nodeid: str, booted: bool) -> str | None:
        """Why a test must not begin now. ``booted``: its server is up, so that its boot is paid for.

        Without workers, what is worth more and still to come has the first claim on what is left; and once a test was
        refused, those that were not selected get what it would have taken.
        """
        from ..names import OUT_OF_BUDGET
        from .budget import has_room
        from .history import span

        self._begun.add(nodeid)
        if self._selection is None:
            return None
        chosen, left_out = self._selection.chosen.get(nodeid), self._selection.left_out.get(nodeid)
        test = chosen or (left_out.test if left_out is not None else None)
        if test is None:
            return None
        left = self._budget_s - self.elapsed_s
        coming = {} if self._worker else {n: one for n, one in self._selection.chosen.items() if n not in self._begun}
        up = test.server if booted else None
        if left_out is not None:
            if not self._freed or not has_room(test, list(coming.values()), left, up):
                return left_out.fact
            self._filled.add(nodeid)
            return None
        left_late = left + _SLACK * self._budget_s
        needs = test.beside_boot if booted else test.seconds
        if needs > left_late:
            said = f"needs {span(needs)}"
        elif not has_room(test, [one for one in coming.values() if one.rank < test.rank], left_late, up):
            said = f"needs {span(needs)}, and what is worth more is still to come"
        else:
            return None
        self._freed = not self._worker
        return f"{OUT_OF_BUDGET}: {f'{span(left)} left' if left > 0 else 'nothing left'}, {said}"

    def urgency(self, nodeid: str) -> int:
        """The class of a test's value, for a plan: smaller goes first."""
        from .budget import LAST

        found = self._selection.chosen.get(nodeid) if self._selection is not None else None
        return found.rank[0] if found is not None else LAST

    @property
    def left_s(self) -> float:
        """What is left of the budget, in seconds; less than nothing when it is over."""
        return self._budget_s - self.elapsed_s

    @property
    def elapsed_s(self) -> float:
        """How long the run has taken so far, in seconds."""
        return time.monotonic() - self._began

    # --------------------------------------------------------------------------------------------------------- summary

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Time the tests that are run, and note those that skip themselves."""
        if report.skipped and report.when in ("setup", "call") and STOPPED not in str(report.longrepr):
            self._took[report.nodeid] = None
        elif report.when == "call":
            self._took[report.nodeid] = report.duration
        elif report.when == "teardown":
            so_far = self._took.get(report.nodeid)
            if so_far is not None:
                self._took[report.nodeid] = so_far + report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Note how long tests without a claim took, or that they were tried: of claims the recorder notes that."""
        if self._worker or self._rehearses or not self._selected():
            return
        from .history_file import history_file, write_history

        chosen, results = self.chosen, self._payloads()
        tests = {name: took for name, took in self._took.items() if name in chosen and name not in results}
        said = write_history(history_file(self._config.rootpath), (), {}, time.time(), tests)
        self._problem = self._problem or said

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """What came of it: nothing when there was nothing to select from."""
        if config.option.verbose >= 0 and self._selected():
            terminalreporter.write_line(self.line(self._payloads()))
            recorder: Any = config.pluginmanager.get_plugin("gpuguard-recorder")
            if self._problem is not None and (recorder is None or recorder.problem is None):
                terminalreporter.write_line(f"gpuguard: {self._problem}", yellow=True)

    @property
    def chosen(self) -> Collection[str]:
        """The node ids that were selected, and those that got what others left."""
        return {*self._selection.chosen, *self._filled} if self._selected() and self._selection is not None else ()

    def _selected(self) -> bool:
        """Whether there is a selection; under xdist it was made in a worker."""
        if self._selection is None and self._share is not None:
            data = read_json(self._share / f"{_SHARED}.json")
            if data is not None:
                self._take(data)
        return self._selection is not None and bool(self._selection.chosen or self._selection.left_out)

    def _payloads(self) -> Mapping[str, Mapping[str, Any]]:
        from ..plugin import MANAGER

        manager = self._config.stash[MANAGER]
        return manager.summary.results if manager.has_results else {}

    def line(self, results: Mapping[str, Mapping[str, Any]]) -> str:
        """What came of it, by the payloads of all claims."""
        from ..claims.judgement import Verdict
        from ..report import progress
        from .history import span

        assert self._selection is not None
        selection, skipped = self._selection, Verdict.NOT_EVALUATED.value
        took = (name for name, seconds in self._took.items() if seconds is not None)
        tried = {*took, *(name for name, one in results.items() if one["verdict"] != skipped)}
        evaluated = len(tried & {*selection.chosen, *selection.left_out})
        every = len(selection.chosen) + len(selection.left_out)
        kinds = {name: one.kind for name, one in selection.chosen.items()}
        kinds |= {name: one.test.kind for name, one in selection.left_out.items()}
        refused = [name for name, one in results.items() if one["reason"] == "budget" and name in kinds]
        out = ", ".join(f"{number} {kind}" for kind, number in Counter(kinds[one] for one in refused).most_common())
        of = f"{evaluated} of {every} claim{'s' if every != 1 else ''} evaluated"
        times = f"{span(selection.expected_s)} expected, {span(self.elapsed_s)} taken"
        return f"budget {progress.span(self._budget_s)}: {of}, {times}" + (f"; left out: {out}" if out else "")


def concerns(item: pytest.Item) -> bool:
    """Whether the budget is for a test: it is a claim, or takes GPUs or a server."""
    from ..collect import CLAIM
    from .facts import leases

    return CLAIM in item.stash or leases(item)
