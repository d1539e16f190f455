"""What a failure signature is: values only, which read no file and check nothing.

A signature describes a kind of failure, never a case.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from packaging.specifiers import SpecifierSet
from packaging.version import Version

#: How much a match says. ``cause`` names the failure; ``symptom`` is how several causes surface; ``collective`` is a
#: failed collective, which a dead peer also gives; ``consequence`` says only that something else died; ``last`` is
#: believed only when there is nothing else at all, ``silent`` tells that something ended, and not why.
TIERS: Final = ("cause", "symptom", "collective", "consequence", "last", "silent")

#: Where a signature may match: the text of an exception or of an error-level line; any line that is no warning; a
#: warning, which explains a failure but is none itself.
PLACES: Final = ("exception", "line", "warning")

#: The outcome is completed with the phase in which it happened (``oom.weights``, …; unknown where that is not clear).
BY_PHASE: Final = "oom.@phase"


@dataclass(frozen=True, slots=True)
class SignatureFile:
    """A file of signatures: what it is called in messages, and its text."""

    name: str
    text: str


#: A text up to this length is looked at as a whole; of a longer one, so much before and behind a literal.
_WHOLE: Final = 4000
_BEFORE: Final = 1000
_BEHIND: Final = 3000


@dataclass(frozen=True, slots=True)
class Signature:
    """One kind of failure.

    ``fatal``: the engine does not survive it, wherever the text stands. ``hard``: only the failure itself prints these
    words, so they count on any line, unless the engine goes on after it.
    """

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
    hard: bool = False
    #: What a person can do about it, if that is always the same.
    cure: str | None = None

    def matches(self, text: str, frames: str = "") -> bool:
        """Whether the text is this failure; the cheap literals are asked first."""
        at = 0
        for literal in self.any:
            at = text.find(literal)
            if at >= 0:
                break
        if at < 0:
            return False
        begin, end = 0, len(text)
        if end > _WHOLE:
            begin, end = max(0, at - _BEFORE), at + _BEHIND
        if any(text.find(word, begin, end) >= 0 for word in self.exclude):
            return False
        if self.pattern is not None and self.pattern.search(text, begin, end) is None:
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
class PhaseLine:
    """A line that tells how far the boot is; ``take`` are the numbers in it, by the name of the value (GiB, tokens)."""

    literal: str
    phase: str | None
    take: tuple[tuple[str, re.Pattern[str]], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """How an exception shows that only one client's request failed: by its words, and by where it was raised."""

    any: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    frame: re.Pattern[str] | None = None

    def matches(self, text: str, frames: str) -> bool:
        """Whether the engine goes on after this exception."""
        if not any(literal in text for literal in self.any) or any(word in text for word in self.exclude):
            return False
        return self.frame is None or self.frame.search(frames) is not None


@dataclass(frozen=True, slots=True, eq=False)
class SignatureSet:
    """The signatures of one engine and the common ones, with the words that steer the reading.

    ``deaths``: an exception announced with one of these ends the engine. ``advice``: from here on, help for people.
    ``dumps``: a line that begins so lists arguments. ``stops``: the engine was asked to end. ``ignored``: exceptions
    that are no failure. ``ready``: lines that mean ready, for engines without a spellings table. ``frames``: what a
    stack frame tells about the phase. ``probes``: exception types that are usually caught. ``plain`` are the signatures
    of exceptions that also count on a line that nobody marked as an error; ``mild``: words of lines that never do;
    ``around``: nor do these, not even on a line logged as an error, since the program got around it.
    ``told``: what the words of a failure tell about the phase. ``requests``: exceptions of one client's request.
    """

    exceptions: tuple[Signature, ...]
    plain: tuple[Signature, ...]
    lines: tuple[Signature, ...]
    warnings: tuple[Signature, ...]
    wrappers: tuple[Wrapper, ...]
    frames: tuple[tuple[str, re.Pattern[str]], ...]
    told: tuple[tuple[str, re.Pattern[str]], ...]
    requests: tuple[Request, ...]
    deaths: tuple[str, ...]
    advice: tuple[str, ...]
    dumps: tuple[str, ...]
    stops: tuple[str, ...]
    ignored: tuple[str, ...]
    ready: tuple[str, ...]
    probes: tuple[str, ...]
    mild: tuple[str, ...]
    around: tuple[str, ...]
    phases: tuple[PhaseLine, ...]

    def all(self) -> tuple[Signature, ...]:
        """Every signature of the set."""
        return self.exceptions + self.lines + self.warnings
