"""Which flags a release knows: its own ``--help`` text, and the table of all releases.

Pure, but for ``load_releases``. It must never call a flag unknown that argparse would accept, abbreviations included.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from ..claims.layout import NEGATIVE_NUMBER
from ..diagnose.data import package_json
from ..diagnose.spellings import load_spellings

TABLE: Final = "facts/sglang_flags.json"

_ENTRY: Final = re.compile(r"^ {1,8}(?P<invocation>-\S.*)$")
_INVOCATION_END: Final = re.compile(r" {2,}(?=\S)")
_OPTION: Final = re.compile(r"-{1,2}[A-Za-z0-9][\w.-]*")
_USAGE_OPTION: Final = re.compile(r"(?<![\w{,./=-])-{1,2}[A-Za-z][\w.-]*")
_CHOICES: Final = re.compile(r"\{([^{}\n]*)\}")


@dataclass(frozen=True, slots=True)
class FlagSet:
    """The option strings that one program accepts. ``choices`` holds, for some, the values that it takes."""

    options: frozenset[str]
    takes_value: frozenset[str] = frozenset()
    choices: Mapping[str, tuple[str, ...]] | None = None

    def resolve(self, word: str) -> tuple[str, ...]:
        """What argparse takes the word for: itself, the options that it abbreviates, or nothing."""
        name = word.split("=", 1)[0]
        for exact in (word, name):
            if exact in self.options:
                return (exact,)
        if word.startswith("--"):
            return tuple(sorted(option for option in self.options if option.startswith(name)))
        # One dash: "-tp8" is -t with a value if there is an -t; "-quant" may abbreviate a longer one.
        short = {option for option in self.options if option == word[:2] or option.startswith(name)}
        return tuple(sorted(short))


@dataclass(frozen=True, slots=True)
class FlagFacts:
    """One flag over the releases: where it exists (first, last; None = still there), what it takes, its successor."""

    name: str
    ranges: tuple[tuple[str, str | None], ...]
    takes: str
    alias_of: str | None = None
    deprecated: str | None = None
    use: str | None = None
    hidden: bool = False

    def where(self) -> str:
        """The releases that know it, as people write them: ``0.4.6–0.5.18``, ``since 0.5.23``."""
        parts = []
        for first, last in self.ranges:
            parts.append(f"since {first}" if last is None else first if first == last else f"{first}–{last}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class ReleaseTable:
    """Every flag of every release in the table. Range ends name releases of the table, see ``releases``."""

    engine: str
    releases: tuple[str, ...]
    flags: Mapping[str, FlagFacts]

    def known_in(self, release: str) -> frozenset[str]:
        """The option strings of one release of the table; raises KeyError for a release that is not in it."""
        if release not in self.releases:
            raise KeyError(release)
        at = self.releases.index(release)
        return frozenset(
            name
            for name, facts in self.flags.items()
            if any(
                self.releases.index(first) <= at and (last is None or at <= self.releases.index(last))
                for first, last in facts.ranges
            )
        )


@dataclass(frozen=True, slots=True)
class FlagProblem:
    """One flag that this release does not take. ``kind``: removed (another release knows it), unknown or ambiguous.

    ``removed`` is a fact about the stack; ``unknown`` is a mistake in the claim.
    """

    flag: str
    kind: str
    message: str


@cache
def load_releases() -> ReleaseTable:
    """The table that ``tools/flags_by_release.py`` made, with the successors of ``sglang_versions.toml``."""
    data = package_json(TABLE)
    renamed = load_spellings().renamed
    flags = {
        name: FlagFacts(
            name=name,
            ranges=tuple((first, last) for first, last in entry["in"]),
            takes=entry["takes"],
            alias_of=entry.get("alias_of"),
            deprecated=entry.get("deprecated"),
            use=renamed.get(name, entry.get("use")),
            hidden=entry.get("hidden", False),
        )
        for name, entry in data["flags"].items()
    }
    return ReleaseTable(data["engine"], tuple(data["releases"]), flags)


def parse_help(text: str) -> FlagSet:
    """An argparse ``--help`` text → the option strings, their aliases and choices.

    Read from the entries; options that stand only in the usage lines are added too. Tolerant: text without options
    gives an empty set.
    """
    options: set[str] = set()
    takes: set[str] = set()
    choices: dict[str, tuple[str, ...]] = {}
    usage: list[str] = []
    in_usage = False
    for line in text.splitlines():
        if line.lower().startswith("usage:"):
            in_usage = True
        elif in_usage and line and not line[0].isspace():
            in_usage = False
        if not line.strip():
            in_usage = False
        if in_usage:
            usage.append(line)
            continue
        match = _ENTRY.match(line)
        if match is None:
            continue
        names, values = _invocation(_INVOCATION_END.split(match["invocation"], maxsplit=1)[0])
        options.update(names)
        if values:
            takes.update(names)
            found = _CHOICES.search(values)
            if found is not None:
                choices.update(dict.fromkeys(names, tuple(found[1].split(","))))
    for line in usage:
        bare = _CHOICES.sub("", line)
        options.update(option for option in _USAGE_OPTION.findall(bare))
    return FlagSet(frozenset(options), frozenset(takes), choices)


def _invocation(text: str) -> tuple[list[str], str]:
    """``-m MODEL, --model MODEL`` → the names, and what follows the last of them."""
    names: list[str] = []
    rest = text
    while True:
        match = _OPTION.match(rest)
        if match is None:
            return names, rest
        names.append(match[0])
        rest = rest[match.end() :]
        following = re.search(r", (?=-{1,2}[A-Za-z0-9])", rest)
        if following is None:
            return names, rest.strip(" =")
        rest = rest[following.end() :]


def check_flags(argv: Sequence[str], known: FlagSet, releases: ReleaseTable) -> list[FlagProblem]:
    """The flags of ``argv`` that this release does not take; an empty list when all are fine.

    Follows argparse: an exact name wins, a unique prefix is accepted, negative numbers and words with a space are
    values, and after ``--`` everything is. An exact name that another release knows is ``removed`` even where it
    would be an ambiguous prefix here, since that is what its author meant.
    """
    problems: list[FlagProblem] = []
    for word in argv:
        if word == "--":
            break
        if len(word) < 2 or not word.startswith("-"):
            continue
        found = known.resolve(word)
        name = word.split("=", 1)[0]
        if len(found) == 1:
            continue
        if not found and (NEGATIVE_NUMBER.match(word) or " " in word):
            continue
        facts = releases.flags.get(name)
        if facts is not None and facts.hidden and facts.ranges[-1][1] is None:
            continue
        if facts is not None and name not in known.options:
            problems.append(FlagProblem(name, "removed", _removed(facts, releases)))
        elif len(found) > 1:
            names = ", ".join(found[:6]) + (", …" if len(found) > 6 else "")
            problems.append(FlagProblem(name, "ambiguous", f"{name} could be any of {names}"))
        else:
            problems.append(FlagProblem(name, "unknown", _unknown(name, known, releases)))
    return problems


def _removed(facts: FlagFacts, releases: ReleaseTable) -> str:
    message = f"{facts.name} is not a flag of this release; {releases.engine} {facts.where()} knows it"
    return message + (f"; use {facts.use}" if facts.use else "")


def _unknown(name: str, known: FlagSet, releases: ReleaseTable) -> str:
    here = difflib.get_close_matches(name, sorted(known.options), n=1, cutoff=0.75)
    if not here and "_" in name:
        here = [option for option in [name.replace("_", "-")] if option in known.options]
    if here:
        return f"{name} is a flag of no release; did you mean {here[0]}?"
    elsewhere = difflib.get_close_matches(name, sorted(releases.flags), n=1, cutoff=0.75)
    if elsewhere:
        where = releases.flags[elsewhere[0]].where()
        return f"{name} is a flag of no release; {elsewhere[0]} is one of {releases.engine} {where}"
    return f"{name} is a flag of no release of {releases.engine} from {releases.releases[0]} to {releases.releases[-1]}"
