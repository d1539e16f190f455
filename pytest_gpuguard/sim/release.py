"""What a release prints, does and knows, chosen from the tables for one version. Pure but for reading the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..facts.tables import json_table, toml_table

TABLE: Final = "facts/sglang_versions.toml"
FLAGS: Final = "facts/sglang_flags.json"
EFFECTS: Final = "facts/sglang_effects.toml"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a boot: who prints it (main, each, first), and its text with {names}."""

    by: str
    text: str


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of a release: the name of its setting, and what it takes (nothing, value, list)."""

    name: str
    takes: str

    @property
    def dest(self) -> str:
        """``mem_fraction_static``."""
        return self.name.lstrip("-").replace("-", "_")


@dataclass(frozen=True, slots=True)
class GateRule:
    """A hardware gate, as the table states it; see the head of its section there."""

    id: str
    text: str
    behaviour: str
    phase: str
    says: str
    by: str = "main"
    raises: str = "RuntimeError"
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    env: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    models: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    majors: tuple[int, ...] = ()
    not_majors: tuple[int, ...] = ()
    ranks: int = 1
    most_ranks: int | None = None
    ranks_in: tuple[int, ...] = ()
    links: str | None = None
    packages: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Release:
    """One release of SGLang. ``flags_of`` is the release of the flag table that was used for it.

    ``backends`` are the attention backends that it takes by itself, by (MLA or not, capability major).
    """

    version: str
    flags_of: str
    lines: Mapping[str, Line]
    prefix: tuple[str, ...]
    ranks_always: bool
    gates: tuple[GateRule, ...]
    flags: Mapping[str, Flag]
    backends: Mapping[tuple[bool, int], str]

    def at_least(self, version: str) -> bool:
        """Whether this release is that one or a later one; a build before a release counts as the release."""
        return _release(self.version) >= Version(version)


@cache
def load_release(version: str) -> Release:
    """Everything of one version. One that no table was made from gets the newest older one's."""
    data = toml_table(TABLE)
    flags_of, flags = known_flags(version)
    lines: dict[str, Line] = {}
    for entry in data["say"]:
        if _covers(entry, version):
            lines.setdefault(entry["id"], Line(entry["by"], entry["text"]))
    shown = data["say_prefix"]
    order = next((tuple(one["ranks"]) for one in shown["order"] if _covers(one, version)), ())
    always = SpecifierSet(shown["ranks_always"]).contains(_release(version), prereleases=True)
    gates = tuple(_gate(entry) for entry in data["gate"] if "phase" in entry and _covers(entry, version))
    backends = {
        (entry["latent"], major): entry["backend"]
        for entry in data["attention_default"]
        if _covers(entry, version)
        for major in entry["majors"]
    }
    return Release(version, flags_of, MappingProxyType(lines), order, always, gates, flags, MappingProxyType(backends))


def known_flags(version: str) -> tuple[str, Mapping[str, Flag]]:
    """(the release of the table, its flags by their spelling); of the newest release that is not newer."""
    table = json_table(FLAGS)
    releases: list[str] = table["releases"]
    older = [one for one in releases if Version(one) <= _release(version)]
    chosen = older[-1] if older else releases[0]
    at = releases.index(chosen)
    flags: dict[str, Flag] = {}
    for name, entry in table["flags"].items():
        for first, last in entry["in"]:
            if releases.index(first) <= at and (last is None or at <= releases.index(last)):
                flags[name] = Flag(entry.get("alias_of", name), entry["takes"])
    return chosen, MappingProxyType(flags)


def help_text(version: str) -> str:
    """What ``--help`` of this version would list, one flag a line: enough for the check of flags."""
    _, flags = known_flags(version)
    lines = ["usage: launch_server.py [-h]", "", "options:", "  -h, --help"]
    lines += [f"  {name}{'' if flag.takes == 'nothing' else ' VALUE'}" for name, flag in flags.items()]
    return "\n".join(lines) + "\n"


def _covers(entry: Mapping[str, Any], version: str) -> bool:
    window = entry.get("versions")
    return not window or SpecifierSet(window).contains(_release(version), prereleases=True)


def _release(version: str) -> Version:
    return Version(Version(version).base_version)


def _gate(entry: Mapping[str, Any]) -> GateRule:
    return GateRule(
        id=entry["id"],
        text=entry["text"],
        behaviour=entry["behaviour"],
        phase=entry["phase"],
        says=entry.get("says", entry["text"]),
        by=entry.get("by", "main"),
        raises=entry.get("raises", "RuntimeError"),
        flags=_values(entry.get("flags", {})),
        env=_values(entry.get("env", {})),
        models=tuple(entry.get("models", ())),
        unless=tuple(entry.get("unless", ())),
        majors=tuple(entry.get("majors", ())),
        not_majors=tuple(entry.get("not_majors", ())),
        ranks=entry.get("ranks", 1),
        most_ranks=entry.get("most_ranks"),
        ranks_in=tuple(entry.get("ranks_in", ())),
        links=entry.get("links"),
        packages=tuple(entry.get("packages", ())),
        lacks=tuple(entry.get("lacks", ())),
    )


def _values(table: Mapping[str, Sequence[str]]) -> Mapping[str, tuple[str, ...]]:
    return MappingProxyType({name: tuple(values) for name, values in table.items()})
