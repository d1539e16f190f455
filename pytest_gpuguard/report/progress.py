"""What a person sees while a server boots: one living line on a terminal, one line per phase when piped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from ..options import is_simulated

if TYPE_CHECKING:
    from ..engines.boot import Progress


class ProgressLine:
    """Writes through pytest's terminal reporter, past its capturing. Silent under ``-q`` and in xdist workers."""

    def __init__(self, config: pytest.Config) -> None:
        reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        self._reporter = reporter
        self._capture: Any = config.pluginmanager.get_plugin("capturemanager")
        self._on = reporter is not None and config.option.verbose >= 0 and not hasattr(config, "workerinput")
        self._live = self._on and bool(reporter.isatty)
        self._rehearses = is_simulated(config)
        self._open = False
        self._phase: tuple[str, str] | None = None

    def of(self, nodeid: str) -> Callable[[Progress], None]:
        """A callback for one test's boot."""

        def show(progress: Progress) -> None:
            if not self._on:
                return
            if self._live:
                self._rewrite(f"{_name(nodeid)}: {line(progress)}")
            elif (nodeid, progress.phase) != self._phase and not self._rehearses:  # its boots take a second
                self._phase = (nodeid, progress.phase)
                self._write(f"gpuguard: {_name(nodeid)}: {line(progress)}")

        return show

    def waiting(self, nodeid: str) -> Callable[[str], None]:
        """A callback for a test that waits for its lease."""

        def show(text: str) -> None:
            if self._live:
                self._rewrite(f"{_name(nodeid)}: {text}")
            elif self._on:
                self._write(f"gpuguard: {_name(nodeid)}: {text}")

        return show

    def clear(self) -> None:
        """Remove the living line."""
        self._phase = None
        if self._open:
            self._open = False
            with self._uncaptured():
                self._reporter.rewrite("", erase=True)
                self._reporter.rewrite("")  # back to the first column

    def _rewrite(self, text: str) -> None:
        with self._uncaptured():
            if not self._open:
                self._reporter.ensure_newline()
                self._open = True
            width = self._reporter._tw.fullwidth - 1
            self._reporter.rewrite(text if len(text) <= width else text[: width - 1] + "…", erase=True)
            self._reporter.flush()

    def _write(self, text: str) -> None:
        with self._uncaptured():
            self._reporter.ensure_newline()
            self._reporter.write_line(text)
            self._reporter.flush()

    def _uncaptured(self) -> AbstractContextManager[None]:
        """Pytest captures what is written during a test; this is for the person in front of it."""
        if self._capture is None:
            return nullcontext()
        found: AbstractContextManager[None] = self._capture.global_and_fixture_disabled()
        return found


def line(progress: Progress) -> str:
    """``loading weights 12/36, 1m05s of 20m``."""
    shards = f" {progress.done}/{progress.total}" if progress.total else ""
    return f"{progress.phase}{shards}, {span(progress.elapsed_s)} of {span(progress.timeout_s)}"


def span(seconds: float) -> str:
    """``12s``, ``1m05s``, ``20m``, ``1h05m``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if rest else f"{minutes}m"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def _name(nodeid: str) -> str:
    return nodeid.rpartition("::")[2]
