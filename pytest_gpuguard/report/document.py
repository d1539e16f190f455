"""One run as one plain JSON document: what the JSON report prints, and the only thing that the other reports render.

It must never leave a claim uncounted, nor let a rehearsal or a replay look like a verification. Keys are only added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from ..claims.verdict import Verdict
from ..ledger.flips import Flip
from ..ledger.record import Record, Run
from .flips import MEANING, decisive, ordered, suspects_of
from .trend import changes, history, mapping, rates, texts
from .words import label_of, number, optional, plain, stamp

#: Counts up when a reader of the document must know that something is otherwise.
FORMAT: Final = 1
#: Lines of one expectation's details, of remedies and the like, and arguments of a command.
_DETAILS: Final = 16
_ARGUMENTS: Final = 400
_NOTICES: Final = {
    "rehearsed": "a rehearsal on a simulated rig: it shows what these claims do, and verifies nothing",
    "replayed": "replayed from recorded evidence: nothing was run, and nothing is verified",
}
#: The kinds of coverage in the order in which they are told.
COVERAGE: Final = ("vanished", "renamed", "new", "never_evaluated", "unstated", "overdue")
_SEVERITY: Final = {one.value: one.severity for one in Verdict}
_Key = tuple[str, str, str]


def document(
    run: Run,
    records: Sequence[Record],
    flips: Sequence[Flip] = (),
    differences: Sequence[Flip] = (),
    history: Callable[[str], Sequence[Record]] = lambda claim: (),
    coverage: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """The document of ``run``, whose records come with their evidence; JSON-able, texts cut and without secrets.

    ``flips`` are against the ledger, ``differences`` between this run's stacks (before: the first stack).
    ``history`` gives a claim's records of all runs with their evidence; it is asked only for claims that measured a
    rate. ``coverage`` are lines by kind. docs/reports.md lists the keys. Times are UTC, sizes GiB.
    """
    grouped: dict[_Key, list[Record]] = {}
    for one in records:
        grouped.setdefault(_key(one), []).append(one)
    flipped = {_key(one.now): one.sort for one in flips}
    claims = [_claim(group, flipped.get(key), history) for key, group in grouped.items()]
    claims.sort(key=_rank)
    label = label_of(run.kind)
    return {
        "format": FORMAT,
        "label": label,
        "notice": f"{label}: {_NOTICES[run.kind]}" if label else None,
        "run": _run(run),
        "counts": _counts(claims),
        "flips": [_flip(one) for one in ordered(flips)],
        "differences": [_flip(one) for one in ordered(differences)],
        "stacks": _stacks(run, records),
        "side_by_side": _side_by_side(run, claims),
        "claims": claims,
        "coverage": _coverage(coverage or {}),
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "id": plain(run.id, 80),
        "kind": run.kind,
        "started": stamp(run.started),
        "ended": stamp(run.ended),
        "seconds": round(run.ended - run.started, 1) if run.ended is not None else None,
        "host": plain(run.host, 200),
        "rig": plain(run.rig, 600),
        "tool": plain(run.tool, 80),
        "suite": optional(run.suite, 80),
        "stacks": [plain(one, 80) for one in run.stacks],
    }


def _counts(claims: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    verdicts = Counter(one["verdict"] for one in claims)
    reasons: dict[str, dict[str, Any]] = {}
    for one in claims:
        if one["verdict"] == Verdict.NOT_EVALUATED.value:
            entry = reasons.setdefault(one["reason"] or "other", {"claims": 0, "example": one["fact"]})
            entry["claims"] += 1
    return {
        "claims": len(claims),
        "hearsay": sum(one["hearsay"] for one in claims),
        "verdicts": dict(sorted(verdicts.items(), key=lambda item: _severity(item[0]))),
        "reasons": reasons,
    }


def _flip(flip: Flip) -> dict[str, Any]:
    suspects = [
        {
            "rank": one.rank if flip.ranked else None,
            **_change(one.change.component, one.change.before, one.change.now),
            "for": [plain(line, 300) for line in one.pro],
            "against": [plain(line, 300) for line in one.contra],
        }
        for one in suspects_of(flip)
    ]
    changed = [_change(one.change.component, one.change.before, one.change.now) for one in flip.suspects]
    return {
        "sort": flip.sort,
        "meaning": MEANING[flip.sort],
        "claim": plain(flip.now.claim, 500),
        "nodeid": plain(flip.now.nodeid, 500),
        "line": _at(flip.now),
        "title": optional(flip.now.evidence.get("title"), 300),
        "stack": plain(flip.now.stack, 80),
        "label": label_of(flip.now.kind),
        "hearsay": flip.now.hearsay,
        "before": _side(flip.before),
        "held": _side(flip.held) if flip.held is not None else None,
        "now": _side(flip.now),
        "changed": sorted(changed, key=lambda one: sum(len(text or "") for text in one.values())),
        "ranked": flip.ranked,
        "suspects": suspects,
    }


def _change(component: str, before: str | None, now: str | None) -> dict[str, str | None]:
    return {"component": plain(component, 80), "before": optional(before, 120), "now": optional(now, 120)}


def _side(record: Record) -> dict[str, Any]:
    return {
        "verdict": plain(record.verdict, 60),
        "label": label_of(record.kind),
        "outcome": plain(record.outcome, 60),
        "expectation": plain(record.expectation, 300),
        "fact": plain(record.fact),
        "decisive": decisive(record),
        "run": plain(record.run, 80),
        "when": stamp(record.when),
        "stack": plain(record.stack, 80),
    }


def _claim(group: Sequence[Record], flip: str | None, earlier: Callable[[str], Sequence[Record]]) -> dict[str, Any]:
    decides = next((one for one in group if one.decides), group[0])
    data = decides.evidence
    measured = bool(mapping(data.get("rates")))
    line = mapping(data.get("decisive")).get("line")
    return {
        "claim": plain(decides.claim, 500),
        "title": optional(data.get("title"), 300),
        "nodeid": plain(decides.nodeid, 500),
        "line": _at(decides),
        "stack": plain(decides.stack, 80),
        "label": label_of(decides.kind),
        "hearsay": decides.hearsay,
        "verdict": plain(decides.verdict, 60),
        "outcome": plain(decides.outcome, 60),
        "expectation": plain(decides.expectation, 300),
        "fact": plain(decides.fact),
        "reason": optional(decides.reason, 60),
        "when": stamp(decides.when),
        "flip": flip,
        "judgements": [_judgement(one, data) for one in group],
        "decisive": (
            {"line": line if isinstance(line, int) else 0, "text": text} if (text := decisive(decides)) else None
        ),
        "memory": {plain(name, 60): number(value) for name, value in mapping(data.get("memory")).items()},
        "peak_gib": number(data.get("peak_gib")),
        "peak_phases": {
            plain(name, 60): gib
            for name, value in mapping(data.get("peak_phases")).items()
            if (gib := number(value)) is not None
        },
        "rates": rates(data),
        "history": history(decides, earlier(decides.claim)) if measured else {},
        "differs": [
            f"{plain(one.get('name'), 80)}: asked {value(one.get('asked'))}, runs {value(one.get('runs'))}"
            for one in map(mapping, texts(mapping(data.get("resolved")).get("settings")))
            if one.get("differs")
        ][:_DETAILS],
        **{name: _lines(data.get(name)) for name in ("remedies", "warnings", "translated")},
        "argv": [plain(one, 1000) for one in texts(data.get("argv"))[:_ARGUMENTS]],
        "log": optional(data.get("log"), 1000),
        **{name: optional(data.get(name), 80) for name in ("phase", "engine", "engine_version")},
        "elapsed_s": number(data.get("elapsed_s")),
        "cards": [plain(one, 120) for one in decides.cards],
        "gpus": [plain(one, 80) for one in texts(data.get("gpus"))],
        "components": {plain(name, 80): optional(one, 120) for name, one in decides.components.items()},
    }


def _at(record: Record) -> int | None:
    """The test's line in its file."""
    line = record.evidence.get("line")
    return line if type(line) is int and 0 < line < 10**9 else None


def value(one: Any) -> str:
    """A resolved setting's value; None is nothing."""
    return "nothing" if one is None else plain(one, 120)


def _judgement(record: Record, data: Mapping[str, Any]) -> dict[str, Any]:
    said = next(
        (one for one in map(mapping, texts(data.get("judgements"))) if one.get("expectation") == record.expectation), {}
    )
    return {
        "expectation": plain(record.expectation, 300),
        "verdict": plain(record.verdict, 60),
        "outcome": plain(record.outcome, 60),
        "fact": plain(record.fact),
        "reason": optional(record.reason, 60),
        "details": _lines(said.get("details")),
    }


def _lines(value: Any) -> list[str]:
    return [plain(one, 1000) for one in texts(value)[:_DETAILS]]


def _stacks(run: Run, records: Iterable[Record]) -> list[dict[str, Any]]:
    """Each stack with its components: of all its records, the newest that knows one."""
    found: dict[str, dict[str, str | None]] = {name: {} for name in run.stacks}
    for one in sorted(records, key=lambda one: one.when):
        found.setdefault(one.stack, {}).update(one.components)
    first = next(iter(found.values()), {})
    return [
        {
            "name": plain(name, 80),
            "components": {plain(one, 80): optional(two, 120) for one, two in sorted(components.items())},
            "changes": changes(first, components),
        }
        for name, components in found.items()
    ]


def _side_by_side(run: Run, claims: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per claim with what came out on each stack, those that differ first; empty with one stack."""
    if len({one["stack"] for one in claims} | set(run.stacks)) < 2:
        return []
    rows: dict[str, dict[str, Any]] = {}
    for one in claims:  # the worst first, which is what a cell shows
        row = rows.setdefault(one["claim"], {"claim": one["claim"], "title": one["title"], "cells": {}})
        row["cells"].setdefault(one["stack"], {name: one[name] for name in ("verdict", "label", "outcome", "fact")})
    for row in rows.values():
        row["differs"] = len({(one["verdict"], one["outcome"]) for one in row["cells"].values()}) > 1
    return sorted(rows.values(), key=lambda row: (not row["differs"], row["claim"]))


def _coverage(coverage: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    known = {name: coverage.get(name, ()) for name in COVERAGE} | dict(coverage)
    return {plain(name, 60): [plain(line, 500) for line in found] for name, found in known.items()}


def _key(record: Record) -> _Key:
    return (record.claim, record.stack, record.nodeid)


def _severity(verdict: str) -> int:
    return _SEVERITY.get(verdict, -1)


def _rank(claim: Mapping[str, Any]) -> tuple[bool, bool, int, str, str]:
    unstated = claim["verdict"] == Verdict.UNSTATED.value
    return (claim["flip"] is None, not unstated, _severity(claim["verdict"]), claim["claim"], claim["stack"])
