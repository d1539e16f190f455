"""The evidence of a log of a few lines, and what was asked joined with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_gpuguard.claims.resolved import LogEvidence, Resolved
from pytest_gpuguard.diagnose.lines import peel
from pytest_gpuguard.diagnose.resolved import Collector, resolve

STAMP = "[2026-01-02 03:04:05 TP0] "


def read(*lines: str, engine: str = "sglang", version: str | None = None, majors: Sequence[int] = ()) -> LogEvidence:
    """The evidence of a log, line 1 first."""
    collector = Collector(engine, version, majors)
    for number, line in enumerate(lines, start=1):
        collector.line(number, peel(line))
    return collector.evidence()


def join(
    *lines: str, flags: str = "", info: dict[str, Any] | None = None, version: str | None = None, **env: str
) -> Resolved:
    return resolve("sglang", flags.split(), read(*lines, version=version), info, env)


def on_off(evidence: LogEvidence) -> set[tuple[str, bool]]:
    return {(one.feature, one.on) for one in evidence.features}
