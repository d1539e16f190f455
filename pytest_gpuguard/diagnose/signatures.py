"""Failure signatures as data: ``signatures/*.toml``, checked when they are loaded.

A signature describes a kind of failure, never a case. What it must never do is match advice: every one needs a literal
that only the failure itself prints, and public reports or the program's source to show for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from ..claims.outcome import OUTCOMES, PHASES
from .data import PatternError, compile_bounded, package_text, parse_toml

FILES: Final = ("sglang", "vllm", "common")

#: How much a match says. ``cause`` names the failure; ``symptom`` is how several causes surface; ``collective`` is a
#: failed collective, which a dead peer also gives; ``consequence`` says only that something else died; ``last`` is
#: believed only when there is nothing else at all.
TIERS: Final = ("cause", "symptom", "collective", "consequence", "last")

#: Where a signature may match: the text of an exception or of an error-level line; any line that is no warning; a
#: warning, which explains a failure but is none itself.
PLACES: Final = ("exception", "line", "warning")

#: The outcome is completed with the phase in which it happened (``oom.weights``, …; unknown where that is not clear).
BY_PHASE: Final = "oom.@phase"

_KEYS: Final = frozenset(
    "id versions where tier any pattern exclude frame outcome phase why sources fatal".split()  # noqa: SIM905
)
_SOURCE_FILE: Final = re.compile(r"[\w/+-]+\.(?:py|cpp|cu|cuh|h|hpp|cc|c|rs)\b")
_REPORT: Final = re.compile(r"[\w.-]+/[\w.-]+#\d+|https://")


class SignatureError(ValueError):
    """A signature file is wrong; the message names the file, the line and the signature's id."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One kind of failure. ``fatal``: the engine does not survive it, wherever the text stands."""

    id: str
    outcome: str
    why: str
    any: tuple[str, ...]
    sources: tuple[str, ...]
    where: str = "exception"
    tier: str = "cause"
    pattern: re.Pattern[str] | None = None
    exclude: tuple[str, ...] = ()
    frame: re.Pattern[str] | None = None
    phase: str | None = None
    versions: SpecifierSet | None = None
    fatal: bool = False

    def matches(self, text: str, frames: str = "") -> bool:
        """Whether the text is this failure; the cheap literals are asked first."""
        for literal in self.any:
            if literal in text:
                break
        else:
            return False
        if any(word in text for word in self.exclude):
            return False
        if self.pattern is not None and self.pattern.search(text) is None:
            return False
        return self.frame is None or self.frame.search(frames) is not None

    def covers(self, version: Version | None) -> bool:
        """Whether the signature applies to this release of the engine; an unknown release is covered."""
        return version is None or self.versions is None or self.versions.contains(version, prereleases=True)


@dataclass(frozen=True, slots=True)
class Wrapper:
    """Text that an engine puts in front of any exception: never a cause, but it tells the phase."""

    pattern: re.Pattern[str]
    phase: str | None


@dataclass(frozen=True, slots=True)
class SignatureSet:
    """The signatures of one engine and the common ones, with the words that steer the reading.

    ``deaths``: an exception announced with one of these ends the engine. ``advice``: from here on, help for people.
    ``dumps``: a line that begins so lists arguments. ``stops``: the engine was asked to end. ``ignored``: exceptions
    that are no failure. ``ready``: lines that mean ready, for engines without a spellings table. ``frames``: what a
    stack frame tells about the phase. ``probes``: exception types that are usually caught.
    """

    exceptions: tuple[Signature, ...]
    lines: tuple[Signature, ...]
    warnings: tuple[Signature, ...]
    wrappers: tuple[Wrapper, ...]
    frames: tuple[tuple[str, re.Pattern[str]], ...]
    deaths: tuple[str, ...]
    advice: tuple[str, ...]
    dumps: tuple[str, ...]
    stops: tuple[str, ...]
    ignored: tuple[str, ...]
    ready: tuple[str, ...]
    probes: tuple[str, ...]
    phases: tuple[tuple[str, str], ...]

    def all(self) -> tuple[Signature, ...]:
        """Every signature of the set."""
        return self.exceptions + self.lines + self.warnings


@cache
def load_signatures(engine: str | None = None, version: str | None = None) -> SignatureSet:
    """The signatures for an engine ("sglang", "vllm"; None: all of them) and, if known, its release.

    A release is compared as its base release, so ``0.5.15.dev1`` counts as 0.5.15. Raises SignatureError.
    """
    wanted = [name for name in FILES if name == "common" or engine is None or name == engine]
    texts = {f"{name}.toml": package_text(f"diagnose/signatures/{name}.toml") for name in wanted}
    return parse_signatures(texts, version)


def parse_signatures(texts: Mapping[str, str], version: str | None = None) -> SignatureSet:
    """Signature files by name → one set, in order; raises SignatureError naming file, line and id."""
    release = _release(version)
    found: list[Signature] = []
    words: dict[str, list[str]] = {}
    wrappers: list[Wrapper] = []
    frames: list[tuple[str, re.Pattern[str]]] = []
    phases: list[tuple[str, str]] = []
    seen: set[str] = set()
    for name, text in texts.items():
        try:
            data = parse_toml(text)
        except ValueError as error:
            raise SignatureError(f"{name}: {error}") from None
        for entry in data.get("signature", ()):
            signature = _signature(entry, name, text)
            if signature.id in seen:
                raise _error(name, text, signature.id, "the id is used twice")
            seen.add(signature.id)
            if signature.covers(release):
                found.append(signature)
        for entry in data.get("wrapper", ()):
            wrappers.append(Wrapper(_pattern(entry["pattern"], name, text, "wrapper"), entry.get("phase")))
        for entry in data.get("frames", ()):
            frames.append((entry["phase"], _pattern(entry["pattern"], name, text, "frames")))
        for entry in data.get("phases", ()):
            phases.append((entry["literal"], entry["phase"]))
        for key, value in data.get("words", {}).items():
            words.setdefault(key, []).extend(value)
    return SignatureSet(
        exceptions=tuple(s for s in found if s.where == "exception"),
        lines=tuple(s for s in found if s.where == "line"),
        warnings=tuple(s for s in found if s.where == "warning"),
        wrappers=tuple(wrappers),
        frames=tuple(frames),
        phases=tuple(phases),
        **{
            key: tuple(words.get(key, ()))
            for key in ("deaths", "advice", "dumps", "stops", "ignored", "ready", "probes")
        },
    )


def _signature(entry: dict[str, Any], name: str, text: str) -> Signature:
    identity = entry.get("id")
    if not isinstance(identity, str) or not identity:
        raise SignatureError(f"{name}: a signature without id (outcome {entry.get('outcome')!r})")

    def fail(problem: str) -> SignatureError:
        return _error(name, text, identity, problem)

    unknown = set(entry) - _KEYS
    if unknown:
        raise fail(f"unknown keys {sorted(unknown)}")
    for key in ("outcome", "why"):
        if not isinstance(entry.get(key), str) or not entry[key]:
            raise fail(f"no {key}")
    outcome, where, tier = entry["outcome"], entry.get("where", "exception"), entry.get("tier", "cause")
    if outcome != BY_PHASE and outcome not in OUTCOMES:
        raise fail(f"{outcome!r} is not an outcome")
    if where not in PLACES or tier not in TIERS:
        raise fail(f"where is one of {PLACES} and tier one of {TIERS}")
    if entry.get("phase") is not None and entry["phase"] not in PHASES:
        raise fail(f"{entry['phase']!r} is not a phase")
    literals = _strings(entry.get("any"))
    if not literals or any(len(literal) < 2 for literal in literals):
        raise fail("`any` must list literals of at least 2 characters, one of which the text holds")
    sources = _strings(entry.get("sources"))
    reports = {source for source in sources if _REPORT.search(source)}
    if len(reports) < 2 and not any(_SOURCE_FILE.search(source) for source in sources):
        raise fail("`sources` must name two independent public reports, or the program's source file")
    versions = None
    if entry.get("versions"):
        try:
            versions = SpecifierSet(entry["versions"])
        except InvalidSpecifier:
            raise fail(f"{entry['versions']!r} is not a version window") from None
    return Signature(
        id=identity,
        outcome=outcome,
        why=entry["why"],
        any=literals,
        sources=sources,
        where=where,
        tier=tier,
        pattern=_pattern(entry["pattern"], name, text, identity) if "pattern" in entry else None,
        exclude=_strings(entry.get("exclude")),
        frame=_pattern(entry["frame"], name, text, identity) if "frame" in entry else None,
        phase=entry.get("phase"),
        versions=versions,
        fatal=bool(entry.get("fatal", False)),
    )


def _pattern(pattern: str, name: str, text: str, identity: str) -> re.Pattern[str]:
    try:
        return compile_bounded(pattern)
    except PatternError as error:
        raise _error(name, text, identity, str(error)) from None


def _error(name: str, text: str, identity: str, problem: str) -> SignatureError:
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(rf"\s*id\s*=\s*[\"']{re.escape(identity)}[\"']", line):
            return SignatureError(f"{name}:{number}: signature {identity}: {problem}")
    return SignatureError(f"{name}: {identity}: {problem}")


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
