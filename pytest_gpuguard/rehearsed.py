"""Labels tests that are no claims and asked a simulated rig all the same: what they found is rehearsed too.

Claims carry their label in their payload. It must never change an outcome.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, Final

import pytest

from .collect import CLAIM, GATE
from .report.header import notice
from .report.payload import labelled
from .run import EVALUATION

if TYPE_CHECKING:
    from .options import Config

#: The attribute of a TestReport that carries the label of a test without a claim.
LABEL_KEY: Final = "gpuguard_label"
#: Our fixtures: whoever takes one asks the rig or a stack. The short names stand on these, and may be somebody else's.
_FIXTURES: Final = frozenset(
    f"gpuguard_{name}" for name in ("command_server", "gpus", "probe", "rig", "server", "sglang_server", "stack")
)


class Rehearsed:
    """Registered on a simulated rig only, in workers as in the process that reports."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self._label = settings.label or ""

    def notice(self, items: Iterable[pytest.Item]) -> list[str]:
        """The first line of a run without claims, some test of which will ask the simulated rig."""
        return [notice(self._settings)] if any(map(_asks, items)) else []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the label on the report, into JUnit, and beside what failed."""
        report = yield
        if CLAIM in item.stash or not (_asks(item) or EVALUATION in item.stash):
            return report
        setattr(report, LABEL_KEY, self._label)
        if (LABEL_KEY, self._label) not in item.user_properties:
            item.user_properties.append((LABEL_KEY, self._label))
        report.user_properties = list(item.user_properties)
        if report.failed:
            said = f"{self._settings.rig} is simulated: this says nothing about real GPUs"
            report.sections.append((self._label, said))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
        """``rehearsed`` in place of ``passed``; failures keep their category, with the label before the word."""
        label = getattr(report, LABEL_KEY, None)
        if label is None:
            return None
        if report.failed:
            if report.when != "call":
                return "error", "E", (labelled(label, "ERROR"), {"red": True})
            return "failed", "F", (labelled(label, "FAILED"), {"red": True})
        if report.passed and report.when == "call":
            return label.lower(), "r", (label, {"green": True})
        return None


def _asks(item: pytest.Item) -> bool:
    """Whether a test is held against the simulated rig, or takes a fixture that asks it."""
    return GATE in item.stash or bool(_FIXTURES & set(getattr(item, "fixturenames", ())))
