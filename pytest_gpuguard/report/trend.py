"""What was measured of a claim's loads, in this run and before: rates with intervals, and what changed between runs.

It must never join what is not alike: other cards, another stack's name, a rehearsal and a verification.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ..claims.stats import MOST, interval
from ..ledger.record import Record
from .words import number, optional, plain, stamp

#: Points of one load's history, the newest, and changes of one point.
POINTS: Final = 60
_CHANGES: Final = 12
#: Loads of one claim.
_LOADS: Final = 12
#: A larger rate is none.
_LARGEST: Final = 1e12


def rates(evidence: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each load what the payload's ``rates`` has, and the ``interval`` of the true rate (None: too few samples)."""
    found: dict[str, dict[str, Any]] = {}
    for load, one in list(mapping(evidence.get("rates")).items())[:_LOADS]:
        said = mapping(one)
        samples = _samples(said)
        baseline = mapping(said.get("baseline"))
        found[plain(load, 200)] = {
            "verdict": optional(said.get("verdict"), 60),
            "samples": samples,
            "interval": _interval(samples),
            "latencies_s": {plain(name, 40): number(value) for name, value in mapping(said.get("latencies_s")).items()},
            "baseline": (
                {"rate": number(baseline.get("rate")), "when": stamp(number(baseline.get("when")))}
                if baseline
                else None
            ),
            **{name: [plain(line, 300) for line in texts(said.get(name))] for name in ("rejected", "failed", "doubts")},
            **{name: optional(said.get(name), 300) for name in ("ours", "unmet", "how")},
            "understated": said.get("understated") is True,
        }
    return found


def history(record: Record, earlier: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Of each load that this record's claim measured: ``points``, oldest first, this one last, and ``left_out``.

    A point is ``run``, ``when``, ``center``, ``low``, ``high`` (None with too few samples), ``n``, ``verdict`` and
    ``changes``: what differs from the point before, as far as both are known.
    """
    loads = list(mapping(record.evidence.get("rates")))[:_LOADS]
    if not loads:
        return {}
    alike = _alike(record, earlier)
    found = {}
    for load in loads:
        measured = [(one, _samples(mapping(mapping(one.evidence.get("rates")).get(load)))) for one in alike]
        measured = [(one, samples) for one, samples in measured if samples]
        if not measured:
            continue
        shown = measured[-POINTS:]
        before: Record | None = measured[-POINTS - 1][0] if len(measured) > POINTS else None
        points = []
        for one, samples in shown:
            points.append(_point(one, samples, before))
            before = one
        found[plain(load, 200)] = {"points": points, "left_out": len(measured) - len(shown)}
    return found


def changes(before: Mapping[str, str | None], now: Mapping[str, str | None]) -> list[dict[str, str | None]]:
    """Components that are known on both sides and differ, the shortest first."""
    found = [
        {"component": plain(name, 80), "before": optional(before[name], 120), "now": optional(now[name], 120)}
        for name in before.keys() & now.keys()
        if before[name] != now[name]
    ]
    return sorted(found, key=lambda one: (sum(len(text or "") for text in one.values()), one["component"] or ""))


def mapping(value: Any) -> Mapping[str, Any]:
    """The value where it is a mapping, else an empty one: evidence may come from anybody's file."""
    return value if isinstance(value, Mapping) else {}


def texts(value: Any) -> Sequence[Any]:
    """The value where it is a list, else an empty one."""
    return value if isinstance(value, (list, tuple)) else ()


def _alike(record: Record, earlier: Iterable[Record]) -> list[Record]:
    """One record per run, this one last: the same claim, stack, cards and kind, and not later."""
    found: dict[str, Record] = {}
    for one in earlier:
        if (one.stack, one.cards, one.kind) != (record.stack, record.cards, record.kind) or one.when > record.when:
            continue
        if one.run != record.run and (one.run not in found or one.decides):
            found[one.run] = one
    return [*sorted(found.values(), key=lambda one: one.when), record]


def _point(record: Record, samples: list[float], before: Record | None) -> dict[str, Any]:
    found = _interval(samples)
    return {
        "run": plain(record.run, 60),
        "when": stamp(record.when),
        "center": found["center"] if found else statistics.median(samples),
        "low": found["low"] if found else None,
        "high": found["high"] if found else None,
        "n": len(samples),
        "verdict": plain(record.verdict, 60),
        "changes": changes(before.components, record.components)[:_CHANGES] if before is not None else [],
    }


def _samples(said: Mapping[str, Any]) -> list[float]:
    # Neither NaN nor infinity is within, nor is a truth value a number.
    values = texts(said.get("samples"))[:MOST]
    return [float(one) for one in values if type(one) in (float, int) and 0 < one < _LARGEST]


def _interval(samples: Sequence[float]) -> dict[str, float | int] | None:
    found = interval(samples)
    if found is None:
        return None
    places = 1 if found.center >= 1000 else 2 if found.center >= 10 else 4
    return {
        "low": round(found.low, places),
        "center": round(found.center, places),
        "high": round(found.high, places),
        "n": found.n,
        "confidence": found.confidence,
    }
