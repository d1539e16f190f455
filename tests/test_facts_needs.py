"""The tests' own way to skip: counted here, and a failure in CI."""

from __future__ import annotations

import pytest

from tests.needs import need, need_tool


def test_a_need_that_is_met_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    need(True, "never said")
    monkeypatch.setenv("CI", "true")
    need(True, "never said")


def test_a_need_that_is_not_met_skips_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-tool is not installed"):
        need_tool("no-such-tool")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no-such-tool is not installed"):
        need_tool("no-such-tool")
