"""Windows of versions for two statements: which component separates them, and where. Pure.

It must never invent a window: where history does not say which component it is, that is told instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from packaging.version import InvalidVersion, Version

from ..claims.expect import Expectation
from ..claims.window import VersionOf, Window, canonical, release_of, satisfies
from ..facts.stack import NAMED_PACKAGES
from ..ledger.changes import PACKAGE, shown
from ..ledger.flips import Flip
from ..ledger.suspects import HOLDS

_SUBJECTS: Final[Mapping[str, str]] = {
    "driver": "driver",
    "torch_cuda": "cuda",
    "torch": "torch",
    **{label: names[0] for label, names in NAMED_PACKAGES.items() if len(names) == 1},
}
_LABELS: Final[Mapping[str, str]] = {
    "torch": "torch",
    **{name: label for label, names in NAMED_PACKAGES.items() for name in names},
}


@dataclass(frozen=True, slots=True)
class Split:
    """Where the old statement ends and the new one begins: ``sglang``, ``<0.5.9``, ``>=0.5.9``."""

    name: str
    old: str
    new: str


def version_in(components: Mapping[str, str | None]) -> VersionOf:
    """Asks a fingerprint for versions, by the names that windows use."""

    def version(name: str) -> str | None:
        if name == "driver":
            return components.get("driver")
        if name == "cuda":
            return components.get("torch_cuda")
        name = canonical(name)
        found = components.get(_LABELS[name]) if name in _LABELS else None
        found = components.get(f"{PACKAGE}{name}") if found is None else found
        return found.partition(" (")[0] if found is not None else None

    return version


def subject_of(component: str) -> str | None:
    """The name that a window has for a component; None for what cannot stand in one."""
    if component.startswith(PACKAGE):
        return component.removeprefix(PACKAGE)
    return _SUBJECTS.get(component)


def split_of(flip: Flip | None) -> tuple[Split | None, str]:
    """What separates the two statements, and why; or None, and why not."""
    if flip is None:
        return None, "history does not say since when"
    then = flip.held or flip.before
    if then.verdict != HOLDS:
        return None, "history does not say since when: it was never seen to hold"
    first = [one for one in flip.suspects if one.rank == 1]
    if not first:
        return None, "history does not say since when: nothing that is recorded changed"
    names = ", ".join(shown(one.change.component) for one in first[:4])
    if len(first) > 1:
        return None, f"history does not say since when: it does not separate {names}{', …' if len(first) > 4 else ''}"
    if not flip.ranked and len(flip.suspects) > 1:
        return None, "history does not say since when: it does not separate what changed"
    change = first[0].change
    subject = subject_of(change.component)
    if subject is None:
        return None, f"it changed with {names}, which cannot stand in a window"
    before, now = version_in(then.components)(subject), version_in(flip.now.components)(subject)
    if before is None or now is None:
        return None, f"it changed with {change}, and a window needs two versions"
    found = _between(subject, before, now)
    if found is None:
        return None, f"it changed with {change}, which no window can tell apart"
    said = "history separates it" if flip.ranked else "nothing else that is recorded changed"
    return found, f"it changed with {change}: {said}"


def _between(name: str, before: str, now: str) -> Split | None:
    """Between two versions: what lies between them keeps the old statement, for nobody has seen otherwise."""
    for at in _spellings(now):
        for old, new in ((f"<{at}", f">={at}"), (f">{at}", f"<={at}")):
            if (
                satisfies(before, old)
                and satisfies(now, new)
                and not satisfies(before, new)
                and not satisfies(now, old)
            ):
                return Split(name, old, new)
    return None


def _spellings(version: str) -> list[str]:
    """How a bound may name a version: its release, then the build itself, without the local part."""
    if re.fullmatch(r"\d+(\.\d+)*", version):
        return [version]  # as the driver writes it, zeros and all
    try:
        found = [release_of(version), Version(version).public]
    except InvalidVersion:
        found = [release_of(version)]
    return list(dict.fromkeys(one for one in found if one is not None and "!" not in one))  # windows take no epochs


def narrowed(window: Window | None, name: str, bound: str) -> str:
    """A window's text with one more bound on a name, without the bounds that it implies."""
    terms = dict(window.terms) if window is not None else {}
    kept = [one.strip() for one in terms.get(name, "").split(",") if one.strip()]
    kept = [one for one in kept if not _implied(one, bound)]
    terms[name] = ",".join([bound, *kept] if bound.startswith(">") else [*kept, bound])
    return " and ".join(f"{one}{spec}" for one, spec in terms.items())


def _implied(one: str, bound: str) -> bool:
    """Whether a bound says nothing beside another one on the same side."""
    if one[0] != bound[0] or one[0] not in "<>":
        return False
    try:
        first, second = (Version(text.lstrip("<>=")) for text in (one, bound))
    except InvalidVersion:
        return False
    return first < second if one[0] == ">" else first > second


def window_for(stated: Sequence[Expectation], version_of: VersionOf) -> str | None:
    """A window for a stack that none of these covers, and that meets none of them; None where there is none."""
    windows = [one.when for one in stated if one.when is not None]
    for name in dict.fromkeys(name for one in windows for name, _ in one.terms):
        version = version_of(name)
        if version is None:
            continue
        for at in _spellings(version):
            for text in (f"{name}>={at}", *_below(name, at, windows), f"{name}=={at}", f"{name}<={at}"):
                new = _parsed(text)
                if new is not None and new.matches(version_of) and not any(map(new.overlaps, windows)):
                    return text
    return None


def _below(name: str, at: str, windows: Iterable[Window]) -> list[str]:
    """From a version up to each boundary above it, the widest first."""
    bounds = {
        bound.lstrip("<>=!~ ").removesuffix(".*")
        for one in windows
        for bound in dict(one.terms).get(name, "").split(",")
    }
    above = sorted((Version(one) for one in bounds if one and _above(one, at)), reverse=True)
    return [f"{name}>={at},<{one}" for one in above]


def _above(one: str, at: str) -> bool:
    try:
        return Version(one) > Version(at)
    except InvalidVersion:
        return False


def _parsed(text: str) -> Window | None:
    from ..claims.errors import ClaimError
    from ..claims.window import parse_window

    try:
        return parse_window(text)
    except ClaimError:
        return None
