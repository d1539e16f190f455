"""Notes at the end of a run what its claims came to, in the process that reports.

It must never change the run's outcome: what keeps the notes from being written is told in one line.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from .history_file import history_file, write_history

if TYPE_CHECKING:
    from .budgeted import Budgeted


class Recorder:
    """Registered with the first verdict that is reported. ``results`` grow by themselves: payloads by node id."""

    def __init__(self, config: pytest.Config, results: Mapping[str, Mapping[str, Any]]) -> None:
        self._config = config
        self._file = history_file(config.rootpath)
        self._results = results
        self._stops: dict[str, float] = {}
        self.problem: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A server is stopped in the teardown of the last test that wants it: that time belongs to its boot."""
        if report.when == "teardown":
            self._stops[report.nodeid] = report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Write, after all reports have come in."""
        budget: Budgeted | None = self._config.pluginmanager.get_plugin("gpuguard-budget")
        chosen = budget.chosen if budget is not None else ()
        self.problem = write_history(self._file, self._results.values(), self._stops, time.time(), chosen=chosen)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Say what was wrong."""
        if self.problem is not None and config.option.verbose >= 0:
            terminalreporter.write_line(f"gpuguard: {self.problem}", yellow=True)
