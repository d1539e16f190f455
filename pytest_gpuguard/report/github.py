"""Annotations of a GitHub job: workflow commands on standard output, flips first.

It must never let what a log says end a command or begin another one.
"""

# Not with annotations of __future__: that name is the function's.
from collections.abc import Mapping
from typing import Any, Final

from ..claims.verdict import Verdict
from ..names import labelled
from .words import plain

#: GitHub shows so many annotations of each kind and step.
MOST: Final = 10
_FACT: Final = 1000

_FLIPS: Final = {"worse": "error", "changed": "error", "better": "error", "flaky": "warning", "recovered": "notice"}
_VERDICTS: Final = {
    Verdict.INFRA.value: "error",
    Verdict.WORSE.value: "error",
    Verdict.CHANGED.value: "error",
    Verdict.BETTER.value: "error",
    Verdict.INCONCLUSIVE.value: "warning",
    Verdict.UNSTATED.value: "warning",
}


def annotations(document: Mapping[str, Any], lines: Mapping[str, int] | None = None, prefix: str = "") -> list[str]:
    """One workflow command per line: errors, warnings, notices, at most ten of each, of which the last counts the rest.

    ``lines`` are the lines of tests in their files by node id, counted from 1, where the document does not have them;
    ``prefix`` is pytest's root within the repository ("ci/gpu"), for files are named from there. Hearsay is never an
    error, nor is a rehearsal.
    """
    found: dict[str, list[str]] = {"error": [], "warning": [], "notice": []}
    told = set()
    for flip in document["flips"]:
        told.add((flip["claim"], flip["stack"], flip["nodeid"]))
        now, before = flip["now"], flip["before"]
        title = labelled(flip["label"], f"{flip['sort']}: {flip['claim']} [{flip['stack']}]")
        was = f"was {before['verdict']} on {(before['when'] or '?')[:10]}, now {now['verdict']}, {now['outcome']}"
        _put(
            found,
            _FLIPS.get(flip["sort"], "warning"),
            flip,
            title,
            f"{was}: {now['fact']}{_changed(flip)}",
            lines,
            prefix,
        )
    for claim in document["claims"]:
        kind = _VERDICTS.get(claim["verdict"])
        if kind is None or (claim["claim"], claim["stack"], claim["nodeid"]) in told:
            continue
        title = labelled(claim["label"], f"{claim['verdict']}: {claim['claim']} [{claim['stack']}]")
        _put(found, kind, claim, title, claim["fact"], lines, prefix)
    return [one for kind, commands in found.items() for one in _fitted(kind, commands)]


def command(kind: str, message: str, **properties: str | int | None) -> str:
    """``::error file=a.py,line=3,title=…::message``, escaped as GitHub's runner reads it."""
    said = ",".join(f"{name}={_property(value)}" for name, value in properties.items() if value is not None)
    return f"::{kind}{' ' if said else ''}{said}::{_data(plain(message, _FACT))}"


def _put(
    found: Mapping[str, list[str]],
    kind: str,
    one: Mapping[str, Any],
    title: str,
    message: str,
    lines: Mapping[str, int] | None,
    prefix: str,
) -> None:
    if kind == "error" and (one["hearsay"] or one["label"]):
        kind = "notice" if one["hearsay"] else "warning"
    path = one["nodeid"].partition("::")[0]
    file = f"{prefix.rstrip('/')}/{path}" if prefix else path
    line = one.get("line") or (lines or {}).get(one["nodeid"])
    found[kind].append(command(kind, message, file=file, line=line, title=plain(title, 200)))


def _changed(flip: Mapping[str, Any]) -> str:
    said = [
        f"{one['component']} {one['before'] or 'absent'} -> {one['now'] or 'absent'}" for one in flip["suspects"][:4]
    ]
    more = f" and {len(flip['suspects']) - 4} more" if len(flip["suspects"]) > 4 else ""
    return f"; changed: {', '.join(said)}{more}" if said else ""


def _fitted(kind: str, commands: list[str]) -> list[str]:
    if len(commands) <= MOST:
        return commands
    rest = len(commands) - MOST + 1
    return [*commands[: MOST - 1], command(kind, f"and {rest} more: see the report of this run", title="gpuguard")]


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str | int) -> str:
    return _data(plain(value)).replace(":", "%3A").replace(",", "%2C")
