"""What a ledger's record says was observed, as the judge wants it. It must never make up what was not recorded."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, TypeGuard

from ..claims.account import short
from ..claims.measurement import Peak
from ..claims.observation import Decisive, MemoryTable, Observation
from ..claims.outcome import READY
from ..claims.series import Baseline, Series
from ..ledger.record import Record

_FREE: Final = re.compile(r"\b(\d+(?:\.\d+)?) GiB free\b")
_TABLE: Final = frozenset(one.name for one in fields(MemoryTable))


def observation_of(record: Record) -> Observation:
    """The observation that a judgement rests on, as far as the ledger has it. Sizes in GiB.

    The free memory after the probe is in the judgement's own words only, with two places.
    """
    evidence = record.evidence
    table: dict[str, Any] = {name: value for name, value in _mapping(evidence.get("memory")).items() if _number(value)}
    peak = evidence.get("peak_gib")
    free = _FREE.search(record.fact) if record.outcome == READY else None
    return Observation(
        engine=str(evidence.get("engine") or "engine"),
        outcome=record.outcome,
        phase=str(evidence.get("phase") or "start"),
        engine_version=evidence.get("engine_version"),
        decisive=_decisive(record),
        memory=MemoryTable(**{name: value for name, value in table.items() if name in _TABLE}),
        series={name: series_of(evidence, name) for name in _mapping(evidence.get("rates"))},
        peak=Peak(float(peak), "") if _number(peak) else None,
        free_gib=float(free[1]) if free is not None else table.get("free_gib"),
        cards=record.cards,
    )


def series_of(evidence: Mapping[str, Any], subject: str) -> Series:
    """What was measured under this subject. Samples that are none (a ledger may be imported) leave it empty."""
    data = _mapping(_mapping(evidence.get("rates")).get(subject))
    samples = list(data.get("samples") or ())
    known = _mapping(data.get("baseline"))
    rate = known.get("rate")
    return Series(
        samples=tuple(map(float, samples)) if all(_number(one) and one > 0 for one in samples) else (),
        rejected=tuple(map(str, data.get("rejected") or ())),
        failed=tuple(map(str, data.get("failed") or ())),
        ours=data.get("ours"),
        baseline=Baseline(float(rate), 0.0) if _number(rate) else None,
        understated=bool(data.get("understated")),
    )


def _decisive(record: Record) -> Decisive | None:
    """The line that decided this outcome: a payload has that of the last boot, which may be another one."""
    found = record.evidence.get("decisive")
    if not isinstance(found, Mapping):
        return None
    text = str(found.get("text", "")).strip()
    told = f"{record.outcome}: {short(text)}"
    if not text or not (record.fact.startswith(told) or f": {told}" in record.fact):  # the latter where UNSTATED
        return None
    line = found.get("line")
    return Decisive(line if isinstance(line, int) else 0, text)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
