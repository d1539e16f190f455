"""The closing table on terminals of any width: a claim, its id and what decided it are there to be read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpuguard.claims.claim import About, Claim
from pytest_gpuguard.claims.judgement import Judgement, Verdict
from pytest_gpuguard.claims.needs import Needs
from pytest_gpuguard.report.payload import REPORT_KEY, payload
from pytest_gpuguard.report.terminal import Summary

NAME = "suites/blackwell/test_kv_budget.py::test_without_ep_the_default_leaves_one_gib"
FACT = "ready in 1 s, 13767 KV tokens, with a second half that is longer than any terminal has room for " + "x" * 200


class Reporter:
    """pytest's, as far as the summary asks it: a terminal of so many columns, or a pipe."""

    def __init__(self, columns: int | None) -> None:
        self.isatty = columns is not None
        self._tw = SimpleNamespace(fullwidth=columns or 80)
        self.text = ""

    def write(self, text: str, **_: bool) -> None:
        self.text += text

    def write_line(self, text: str, **_: bool) -> None:
        self.text += text + "\n"

    def write_sep(self, *_: Any) -> None: ...


def told(columns: int | None) -> list[str]:
    claim = Claim(Needs(), None, (), About(id="F8.without-ep"))
    data = payload(NAME, claim, "old", [Judgement("fits", Verdict.HOLDS, "ready", FACT)], [], label="REHEARSED")
    summary = Summary(())
    summary.add(SimpleNamespace(**{REPORT_KEY: data}))
    reporter = Reporter(columns)
    summary.write(reporter, 0)
    return reporter.text.splitlines()


@pytest.mark.parametrize("columns", [80, 120, 130])
def test_a_narrow_terminal_has_the_fact_on_a_line_of_its_own(columns: int) -> None:
    first, second, _ = told(columns)
    assert first == f"REHEARSED HOLDS  {NAME} [F8.without-ep]"
    assert second.startswith("    ready in 1 s, 13767 KV tokens")
    assert len(second) == columns
    assert second.endswith("…")


def test_a_wide_terminal_has_one_line_and_cuts_its_end() -> None:
    line, _ = told(180)
    assert line.startswith(f"REHEARSED HOLDS  {NAME} [F8.without-ep]  ready in 1 s, 13767 KV tokens")
    assert len(line) == 180


def test_a_pipe_has_one_whole_line() -> None:
    line, _ = told(None)
    assert line == f"REHEARSED HOLDS  {NAME} [F8.without-ep]  {FACT}"
