"""The same flags in another release's words, for claims that say ``portable=True``. Pure, but for the table's loading.

It must never change what is asked for: only spellings that the table calls one and the same are exchanged, and only
where this release does not know the given one. Everything else stays as it was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

from ..claims.layout import NEGATIVE_NUMBER

if TYPE_CHECKING:
    from ..claims.claim import Serves
    from .base import Engine
    from .flags import FlagSet, ReleaseTable

TABLE: Final = "facts/sglang_versions.toml"
_ONE: Final = "{}"
_ALL: Final = "{*}"


@dataclass(frozen=True, slots=True)
class Part:
    """One flag of a spelling: ``takes`` is None, "{}" (one value), "{*}" (all that follow) or the value itself."""

    flag: str
    takes: str | None = None


#: One spelling of a setting: all of its parts, in the order in which they are written.
Form = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Same:
    """Two spellings of exactly the same setting, and where that was read."""

    forms: tuple[Form, Form]
    source: str


@dataclass(frozen=True, slots=True)
class Translation:
    """What was given, and what is booted in its place."""

    given: str
    becomes: str

    def __str__(self) -> str:
        return f"{self.given} -> {self.becomes}"


def boot_flags(serves: Serves, engine: Engine, help_text: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The flags to boot a server with, those of its layout added, and what a portable claim exchanged as "old -> new".

    Without ``portable`` they are the claim's own, word for word. Raises ClaimError for a layout that the engine cannot
    express.
    """
    flags = serves.flags
    if serves.layout is not None:
        known = frozenset(word for word in (help_text or "").replace(",", " ").split() if word.startswith("--"))
        flags = (*flags, *engine.layout_flags(serves.layout, flags, known))
    if not serves.portable or help_text is None:
        return flags, ()
    flags, changes = engine.translate(flags, help_text)
    return flags, tuple(map(str, changes))


@cache
def load_same() -> tuple[Same, ...]:
    """The ``[[same]]`` entries of the table; raises ValueError for one that is not two forms of equal values."""
    from ..diagnose.data import package_toml

    found = []
    for entry in package_toml(TABLE).get("same", ()):
        old, new = (_form(text) for text in entry["forms"])
        if _values(old) != _values(new):
            raise ValueError(f"{TABLE}: {entry['forms']}: both forms must carry the same values")
        found.append(Same((old, new), entry["source"]))
    return tuple(found)


def _form(text: str) -> Form:
    parts: list[Part] = []
    for word in text.split():
        if word.startswith("-"):
            parts.append(Part(word))
        else:
            parts[-1] = Part(parts[-1].flag, word)
    return tuple(parts)


def _values(form: Form) -> list[str]:
    return [part.takes for part in form if part.takes in (_ONE, _ALL)]


def translate(
    argv: Sequence[str], known: FlagSet, same: Sequence[Same] | None = None, releases: ReleaseTable | None = None
) -> tuple[tuple[str, ...], tuple[Translation, ...]]:
    """``argv`` in the words of a release that accepts the flags ``known``, and each change that this took.

    ``same`` and ``releases`` default to the package's tables. Flags whose other spelling is unknown here too, or is
    given already, stay: the release will refuse them, as it does without ``portable``.
    """
    from .flags import load_releases

    same = load_same() if same is None else same
    names = _canonical(load_releases() if releases is None else releases)
    words, done = list(argv), []
    for one in same:
        for have, want in (one.forms, one.forms[::-1]):
            change = _exchange(words, have, want, known, names)
            if change is not None:
                words, translation = change
                done.append(translation)
                break
    for position, word in enumerate(_before_rest(words)):
        name, equals, value = word.partition("=")
        usual = names.get(name, name)
        if usual != name and not known.resolve(name) and usual in known.options:
            words[position] = usual + equals + value
            done.append(Translation(name, usual))
    return tuple(words), tuple(done)


def _exchange(
    words: list[str], have: Form, want: Form, known: FlagSet, names: Mapping[str, str]
) -> tuple[list[str], Translation] | None:
    """The words with one spelling in place of the other; None where that is not called for."""
    found = [_find(words, part, names) for part in have]
    if any(one is None for one in found):
        return None
    spans = [one for one in found if one is not None]
    accepted = all(_accepts(known, words[start].partition("=")[0], want) for start, _, _ in spans)
    expressible = all(part.flag in known.options for part in want)
    present = {names.get(name, name) for name in (word.partition("=")[0] for word in _before_rest(words))}
    given = any(part.flag in present for part in want if part.flag not in {one.flag for one in have})
    if accepted or not expressible or given:
        return None
    values = iter([value for (_, _, value), part in zip(spans, have, strict=True) if part.takes in (_ONE, _ALL)])
    new: list[str] = []
    for part in want:
        new.append(part.flag)
        if part.takes in (_ONE, _ALL):
            new += next(values)
        elif part.takes is not None:
            new.append(part.takes)
    removed = {position for start, end, _ in spans for position in range(start, end)}
    first = min(start for start, _, _ in spans)
    old = " ".join(words[position] for position in sorted(removed))
    kept = [word for position, word in enumerate(words) if position > first and position not in removed]
    return [*words[:first], *new, *kept], Translation(old, " ".join(new))


def _find(words: Sequence[str], part: Part, names: Mapping[str, str]) -> tuple[int, int, list[str]] | None:
    """Where a flag stands, as (first word, word after it, its values); None if it is absent or has another value.

    Of a flag that is given twice the last one counts, as in argparse; then nothing is exchanged, because both would
    have to be.
    """
    places = []
    for position, word in enumerate(_before_rest(words)):
        name, equals, value = word.partition("=")
        if names.get(name, name) == part.flag:
            places.append((position, bool(equals), value))
    if len(places) != 1:
        return None
    start, inline, value = places[0]
    if part.takes is None:
        return None if inline else (start, start + 1, [])
    values = [value] if inline else list(_following(words, start + 1, part.takes == _ALL))
    if part.takes not in (_ONE, _ALL) and values != [part.takes]:
        return None
    if not values and part.takes != _ALL:
        return None
    return start, start + 1 + (0 if inline else len(values)), values


def _following(words: Sequence[str], start: int, every: bool) -> Iterator[str]:
    for word in words[start:] if every else words[start : start + 1]:
        if word.startswith("-") and not NEGATIVE_NUMBER.match(word) and " " not in word:
            return
        yield word


def _before_rest(words: Sequence[str]) -> Sequence[str]:
    """The words that argparse reads as flags: those before a bare ``--``."""
    return words[: words.index("--")] if "--" in words else words


def _accepts(known: FlagSet, name: str, want: Form) -> bool:
    """Whether this release takes a name for what is meant: itself, or an abbreviation of the other spelling."""
    found = known.resolve(name)
    return found == (name,) or (len(found) == 1 and found[0] in {part.flag for part in want})


@cache
def _aliases(pairs: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    return dict(pairs)


def _canonical(releases: ReleaseTable) -> Mapping[str, str]:
    """Aliases of one release's parser → the name that they stand for."""
    return _aliases(tuple((name, facts.alias_of) for name, facts in releases.flags.items() if facts.alias_of))
