"""Failure signatures as data: ``signatures/*.toml``, checked when they are loaded.

A signature describes a kind of failure, never a case. What it must never do is match advice: every one needs a literal
that only the failure itself prints, and public reports or the program's source to show for it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from ..claims.outcome import OUTCOMES, PHASES
from .data import PatternError, compile_bounded, package_text, parse_toml
from .signature import (
    BY_PHASE,
    PLACES,
    TIERS,
    PhaseLine,
    Request,
    Signature,
    SignatureFile,
    SignatureSet,
    Wrapper,
)

#: The signature files, in the order in which they are asked: those of one engine, then those for all.
ENGINES: Final = ("sglang", "vllm")
FILES: Final = (*ENGINES, "other", "common", "host", "arch", "jit", "machine", "files", "config", "comm", "gpu")

_KEYS: Final = frozenset(
    "id engine versions where tier any pattern exclude frame outcome phase why sources fatal hard cure".split()  # noqa: SIM905
)
_SOURCE_FILE: Final = re.compile(r"[\w/+-]+\.(?:py|cpp|cu|cuh|h|hpp|cc|c|rs|go)\b")
_REPORT: Final = re.compile(r"[\w.-]+/[\w.-]+#\d+|https://")


class SignatureError(ValueError):
    """A signature file is wrong; the message names the file, the line and the signature's id."""


@cache
def load_signatures(
    engine: str | None = None, version: str | None = None, extra: tuple[SignatureFile, ...] = ()
) -> SignatureSet:
    """The signatures for an engine ("sglang", "vllm"; None: all of them) and, if known, its release.

    ``extra`` are files of the user's (``read_signature_files``); of equally good matches theirs win. A release is
    compared as its base release, so ``0.5.15.dev1`` counts as 0.5.15. Raises SignatureError.
    """
    wanted = [name for name in FILES if name not in ENGINES or engine in (None, name)]
    files = [SignatureFile(f"{name}.toml", package_text(f"diagnose/signatures/{name}.toml")) for name in wanted]
    return _parse([*extra, *files], version, engine, frozenset(extra))


def read_signature_files(paths: Iterable[str | Path]) -> tuple[SignatureFile, ...]:
    """Signature files of the user's, checked. Raises SignatureError that names the file, and the line if there is one.

    A user's signature needs ``id``, ``outcome`` and ``any`` (literals) or ``pattern``; everything else is optional,
    ``engine`` among it ("sglang" or "vllm"; without it, any).
    """
    found = []
    for path in dict.fromkeys(str(path) for path in paths):
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise SignatureError(f"{path}: {reason}") from None
        found.append(SignatureFile(path, text))
    files = tuple(found)
    known = {signature.id for signature in load_signatures().all()}
    for signature in _parse(files, None, None, frozenset(files)).all():
        if signature.id in known:
            holder = next(file for file in files if _find(file.text, signature.id) is not None)
            raise _error(holder.name, holder.text, signature.id, "the id is one of the built-in signatures'")
    return files


def parse_signatures(texts: Mapping[str, str], version: str | None = None) -> SignatureSet:
    """Signature files by name → one set, in order; raises SignatureError naming file, line and id."""
    return _parse([SignatureFile(name, text) for name, text in texts.items()], version, None, frozenset())


def _parse(
    files: Iterable[SignatureFile], version: str | None, engine: str | None, users: frozenset[SignatureFile]
) -> SignatureSet:
    release = _release(version)
    found: list[Signature] = []
    words: dict[str, list[str]] = {}
    wrappers: list[Wrapper] = []
    frames: list[tuple[str, re.Pattern[str]]] = []
    told: list[tuple[str, re.Pattern[str]]] = []
    requests: list[Request] = []
    phases: list[PhaseLine] = []
    seen: set[str] = set()
    for file in files:
        name, text = file.name, file.text
        try:
            data = parse_toml(text)
        except ValueError as error:
            raise SignatureError(f"{name}: {error}") from None
        users_own = file in users
        if users_own:
            _only_signatures(data, name)
        for entry in data.get("signature", ()):
            signature = _signature(entry, name, text, users_own)
            if signature.id in seen:
                raise _error(name, text, signature.id, "the id is used twice")
            seen.add(signature.id)
            if signature.covers(release) and engine in (None, entry.get("engine", engine)):
                found.append(signature)
        for entry in data.get("wrapper", ()):
            wrappers.append(Wrapper(_pattern(entry["pattern"], name, text, "wrapper"), entry.get("phase")))
        for entry in data.get("frames", ()):
            frames.append((entry["phase"], _pattern(entry["pattern"], name, text, "frames")))
        for entry in data.get("told", ()):
            told.append((entry["phase"], _pattern(entry["pattern"], name, text, "told")))
        for entry in data.get("request", ()):
            frame = _pattern(entry["frame"], name, text, "request") if "frame" in entry else None
            requests.append(Request(_strings(entry["any"]), _strings(entry.get("exclude")), frame))
        for entry in data.get("phases", ()):
            takes = entry.get("take", {}).items()
            found_numbers = tuple((value, _pattern(pattern, name, text, "phases")) for value, pattern in takes)
            phases.append(PhaseLine(entry["literal"], entry.get("phase"), found_numbers))
        for key, value in data.get("words", {}).items():
            words.setdefault(key, []).extend(value)
    return SignatureSet(
        exceptions=tuple(s for s in found if s.where == "exception"),
        plain=tuple(s for s in found if s.where != "warning" and s.hard),
        lines=tuple(s for s in found if s.where == "line"),
        warnings=tuple(s for s in found if s.where == "warning"),
        wrappers=tuple(wrappers),
        frames=tuple(frames),
        told=tuple(told),
        requests=tuple(requests),
        phases=tuple(phases),
        **{
            key: tuple(words.get(key, ()))
            for key in ("deaths", "advice", "dumps", "stops", "ignored", "ready", "probes", "mild", "around")
        },
    )


def _only_signatures(data: Mapping[str, Any], name: str) -> None:
    entries = data.get("signature", ())
    if set(data) - {"signature"} or not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise SignatureError(f"{name}: a signature file holds [[signature]] tables and nothing else")


def _signature(entry: dict[str, Any], name: str, text: str, users: bool) -> Signature:
    identity = entry.get("id")
    if not isinstance(identity, str) or not identity:
        raise SignatureError(f"{name}: a signature without id (outcome {entry.get('outcome')!r})")

    def fail(problem: str, key: str = "id") -> SignatureError:
        return _error(name, text, identity, problem, key)

    for key in entry:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            raise fail(f"unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""), key)
    for key in ("outcome",) if users else ("outcome", "why"):
        if not isinstance(entry.get(key), str) or not entry[key]:
            raise fail(f"no {key}")
    for key in ("engine", "why", "phase", "versions", "pattern", "frame", "cure"):
        if not isinstance(entry.get(key, ""), str):
            raise fail(f"{key} is a string", key)
    if entry.get("engine", "sglang") not in ENGINES:
        raise fail(f"engine is sglang or vllm, not {entry['engine']!r}", "engine")
    outcome, where, tier = entry["outcome"], entry.get("where", "exception"), entry.get("tier", "cause")
    if outcome != BY_PHASE and outcome not in OUTCOMES:
        near = difflib.get_close_matches(outcome, OUTCOMES, n=1)
        raise fail(f"{outcome!r} is not an outcome" + (f"; did you mean {near[0]!r}?" if near else ""), "outcome")
    if where not in PLACES:
        raise fail(f"where is one of {', '.join(PLACES)}", "where")
    if tier not in TIERS:
        raise fail(f"tier is one of {', '.join(TIERS)}", "tier")
    if entry.get("phase") is not None and entry["phase"] not in PHASES:
        raise fail(f"{entry['phase']!r} is not a phase ({', '.join(PHASES)})", "phase")
    literals = _strings(entry.get("any"))
    if any(len(literal) < 2 for literal in literals) or not (literals or (users and "pattern" in entry)):
        wanted = "`any` must list literals of at least 2 characters, one of which the text holds"
        raise fail(wanted + ("; or give a `pattern`" if users and not literals else ""), "any")
    sources = _strings(entry.get("sources"))
    reports = {source for source in sources if _REPORT.search(source)}
    if not users and len(reports) < 2 and not any(_SOURCE_FILE.search(source) for source in sources):
        raise fail("`sources` must name two independent public reports, or the program's source file", "sources")
    versions = None
    if entry.get("versions"):
        try:
            versions = SpecifierSet(entry["versions"])
        except InvalidSpecifier:
            raise fail(f"{entry['versions']!r} is not a version window", "versions") from None
    return Signature(
        id=identity,
        outcome=outcome,
        why=entry.get("why") or f"signature {identity}",
        any=literals,
        sources=sources,
        where=where,
        tier=tier,
        pattern=_pattern(entry["pattern"], name, text, identity, "pattern") if "pattern" in entry else None,
        exclude=_strings(entry.get("exclude")),
        frame=_pattern(entry["frame"], name, text, identity, "frame") if "frame" in entry else None,
        phase=entry.get("phase"),
        versions=versions,
        fatal=bool(entry.get("fatal", False)),
        hard=bool(entry.get("hard", False)),
        cure=entry.get("cure"),
    )


def _pattern(pattern: str, name: str, text: str, identity: str, key: str = "pattern") -> re.Pattern[str]:
    try:
        return compile_bounded(pattern)
    except PatternError as error:
        raise _error(name, text, identity, str(error), key) from None


def _find(text: str, identity: str) -> int | None:
    """The number of the line that gives this id."""
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(rf"\s*id\s*=\s*[\"']{re.escape(identity)}[\"']", line):
            return number
    return None


def _error(name: str, text: str, identity: str, problem: str, key: str = "id") -> SignatureError:
    """An error that names the line of the key in the signature's table, or at least of its id."""
    at = _find(text, identity)
    if at is None:
        return SignatureError(f"{name}: {identity}: {problem}")
    lines = text.splitlines()
    first = next((n for n in range(at - 1, -1, -1) if lines[n].lstrip().startswith("[")), 0)
    last = next((n for n in range(at, len(lines)) if lines[n].lstrip().startswith("[[")), len(lines))
    for number in range(first, last):
        if re.match(rf"\s*{re.escape(key)}\s*=", lines[number]):
            at = number + 1
    return SignatureError(f"{name}:{at}: signature {identity}: {problem}")


def _strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return ()
    return tuple(item for item in value if isinstance(item, str))


def _release(version: str | None) -> Version | None:
    if version is None:
        return None
    try:
        return Version(Version(version).base_version)
    except InvalidVersion:
        return None
