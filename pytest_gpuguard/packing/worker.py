"""A worker of a packed run: it holds one placeholder on deck, and so starts any unit the moment that it is sent.

A worker of xdist starts a test only when it knows the next one; the placeholder is always the next one. It must never
be reported, counted or run, and must never start a test after the run was stopped elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from ..xdist import STOP

NAME: Final = "gpuguard-placeholder"


class Placeholder(pytest.Item):
    """Stands behind the last test of a unit, so that its fixtures are torn down and its server is stopped."""

    #: The test that a report is about: xdist sends only those of the test that is on.
    speaks_for: pytest.Item | None = None

    @property
    def nodeid(self) -> str:
        """Its own, or that of the test that it speaks for."""
        return self.speaks_for.nodeid if self.speaks_for is not None else str(super().nodeid)

    def runtest(self) -> None:
        """Never called."""
        raise AssertionError("a placeholder is no test")

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Somewhere, for those that ask every item."""
        return self.path, None, NAME


class Announcer:
    """Describes the tests before xdist tells the controller that they are collected, and after a budget chose some.

    Its hook is called before xdist's because it is registered later.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write the file that the planner reads."""
        from ..plugin import runner_of
        from .facts import is_known, write_works

        if any(is_known(item) for item in session.items):
            write_works(self._folder, runner_of(session.config), session.items)


class PackedWorker:
    """The other hooks of a packed run's worker."""

    def __init__(self, folder: Path) -> None:
        self._stop = folder / STOP
        self._last: pytest.Item | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Append the placeholder, after xdist told the controller what was collected."""
        if session.items:
            session.items.append(Placeholder.from_parent(session, name=NAME))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Pass over the placeholder, and over what is left of a unit once the run was stopped."""
        if isinstance(item, Placeholder):
            if nextitem is None:
                self._tear_down(item)
            return True
        if self._stop.exists():
            item.session.shouldstop = "the run was stopped elsewhere"
            return True
        self._last = item
        return None

    def _tear_down(self, placeholder: Placeholder) -> None:
        """What the last test of a run does for fixtures of the whole session: an error there is that test's."""
        last, session = self._last, placeholder.session
        if last is None:
            return
        state: Any = session._setupstate
        call = pytest.CallInfo.from_call(
            lambda: state.teardown_exact(None), when="teardown", reraise=(pytest.exit.Exception, KeyboardInterrupt)
        )
        if call.excinfo is None:
            return
        placeholder.speaks_for = last
        report = last.ihook.pytest_runtest_makereport(item=last, call=call)
        last.ihook.pytest_runtest_logreport(report=report)
