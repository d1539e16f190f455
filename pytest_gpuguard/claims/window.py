"""Windows of versions, ``when="sglang>=0.5.15,<0.6 and cuda>=13"``: on which stacks an expectation is stated.

Versions are compared by their release number: a dev, rc, post or local build counts as its release, because PEP 440
alone would put ``0.5.15.dev1`` outside ``>=0.5.15``, and nightly builds are what people test upgrades with. Only a
range that names such a build itself (``>=0.6.7.post2``) is compared exactly: its author meant that build.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from .errors import ClaimError

if TYPE_CHECKING:
    from packaging.specifiers import Specifier, SpecifierSet

_TERM = re.compile(r"^\s*([A-Za-z][A-Za-z0-9._-]*?)\s*((?:===|==|~=|!=|<=|>=|<|>).*)$")
_AND = re.compile(r"\s+and\s+|\s*;\s*")

#: Asks the facts for a version: ``"sglang"`` → ``"0.5.23"`` or None. ``driver`` and ``cuda`` are asked the same way.
VersionOf = Callable[[str], "str | None"]


def canonical(name: str) -> str:
    """A distribution's name as PEP 503 spells it: ``Flashinfer_Python`` → ``flashinfer-python``."""
    return re.sub(r"[-_.]+", "-", name).lower()


@lru_cache(maxsize=512)
def release_of(version: str) -> str | None:
    """The release part of a version: ``0.5.15.dev1+g1`` → ``0.5.15``; None when it is no version at all."""
    from packaging.version import InvalidVersion, Version

    try:
        parsed = Version(version)
    except InvalidVersion:
        found = re.match(r"\s*v?(\d+(?:\.\d+)*)", version)
        if found is None:
            return None
        parsed = Version(found[1])
    return ".".join(map(str, parsed.release))


@lru_cache(maxsize=512)
def is_build(version: str) -> bool:
    """Whether this is a dev, rc, post or local build, which windows compare as its release: ``0.5.15.dev1``."""
    from packaging.version import InvalidVersion, Version

    try:
        parsed = Version(version)
    except InvalidVersion:
        return False
    return parsed.is_prerelease or parsed.is_postrelease or parsed.local is not None


@lru_cache(maxsize=512)
def specifiers(text: str) -> SpecifierSet:
    """``">=0.5.6,<0.5.8"`` → a SpecifierSet. Raises ClaimError."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        found = SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ClaimError(f"{text!r} is not a version range: write ranges such as '>=0.5.6,<0.5.8'") from error
    if not len(found):
        raise ClaimError(f"{text!r} is not a version range: write ranges such as '>=0.5.6,<0.5.8'")
    for one in found:
        if one.operator == "===" or "!" in one.version:
            raise ClaimError(f"{text!r}: {one} cannot be compared by release; use ==, !=, ~=, <, <=, > or >=")
    return found


def satisfies(version: str, spec: str) -> bool:
    """Whether a version's release lies in the range; where the range names a build, the version itself."""
    release = release_of(version)
    return release is not None and all(_contains(one, version, release) for one in specifiers(spec))


def _contains(one: Specifier, version: str, release: str) -> bool:
    exact = _names_build(one) and is_build(version)
    return one.contains(version if exact else release, prereleases=True)


def _names_build(one: Specifier) -> bool:
    return is_build(one.version.removesuffix(".*"))


@dataclass(frozen=True, slots=True)
class Window:
    """The parsed ``when=``: every term must match. ``terms`` pairs a name with its version range."""

    text: str
    terms: tuple[tuple[str, str], ...]

    def matches(self, version_of: VersionOf) -> bool:
        """Whether this stack is inside. A package that is not installed matches no range of it."""
        for name, spec in self.terms:
            version = version_of(name)
            if version is None or not satisfies(version, spec):
                return False
        return True

    def overlaps(self, other: Window) -> bool:
        """Whether some stack could be inside both. A name that only one of them limits is free in the other."""
        mine, theirs = dict(self.terms), dict(other.terms)
        return all(_ranges_meet(mine[name], theirs[name]) for name in mine.keys() & theirs.keys())

    def inexact(self, version_of: VersionOf) -> tuple[str, ...]:
        """How this stack's builds were compared, such as ``sglang 0.5.15.dev1 compared as 0.5.15``, to be told."""
        found = []
        for name, spec in self.terms:
            version = version_of(name)
            if version is not None and is_build(version) and not all(map(_names_build, specifiers(spec))):
                found.append(f"{name} {version} compared as {release_of(version)}")
        return tuple(found)

    def __str__(self) -> str:
        return self.text


def parse_window(text: str) -> Window:
    """``"sglang>=0.5.15 and cuda>=13"`` → a Window. Raises ClaimError."""
    if not isinstance(text, str) or not text.strip():
        raise ClaimError(f'when={text!r} is not a window: write when="sglang>=0.5.15"')
    return _parse(text)


@lru_cache(maxsize=512)
def _parse(text: str) -> Window:
    terms: dict[str, str] = {}
    for part in _AND.split(text.strip()):
        match = _TERM.match(part)
        if match is None:
            raise ClaimError(
                f'when={text!r}: {part!r} is not a term; write when="sglang>=0.5.15,<0.6", joined by " and "'
            )
        name, spec = canonical(match[1]), match[2].strip()
        specifiers(spec)
        terms[name] = f"{terms[name]},{spec}" if name in terms else spec
    return Window(text.strip(), tuple(sorted(terms.items())))


def _ranges_meet(first: str, second: str) -> bool:
    """Whether two version ranges share a version, by trying every place where a version can begin to lie in both.

    That is zero, each boundary, just above it (nearer than any other boundary), and the next of its last number.
    """
    boundaries = [one.version.removesuffix(".*") for text in (first, second) for one in specifiers(text)]
    releases = [str(release_of(one)) for one in boundaries]
    nearest = ".0" * max(one.count(".") for one in releases) + ".1"
    points = {"0", *boundaries, *releases, *(one + nearest for one in releases)}
    points |= {re.sub(r"\d+$", lambda last: str(int(last[0]) + 1), one) for one in boundaries}
    return any(satisfies(point, first) and satisfies(point, second) for point in points)
