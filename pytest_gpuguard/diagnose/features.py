"""What shows what a server really runs, as data: settings, features, and the log lines that are evidence of them.

SGLang's are in ``facts/sglang_versions.toml``, vLLM's in ``signatures/vllm_features.toml``; both are checked when they
are loaded. An entry must never make silence evidence: a line or a resolved value says something, or nothing is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from ..claims.resolved import Term, Vocabulary, normal
from .data import PatternError, compile_bounded, package_text, parse_toml

TABLES: Final[Mapping[str, str]] = MappingProxyType(
    {"sglang": "facts/sglang_versions.toml", "vllm": "diagnose/signatures/vllm_features.toml"}
)
#: How two values of a setting are compared: as words, as numbers, or as tokens (less by under a page is no difference).
COMPARE: Final = ("text", "number", "tokens")
#: So many characters of a line's beginning choose the few entries that may apply to it.
HEAD: Final = 4

_SETTING: Final = frozenset("name aliases flags keys unresolved values same compare most source".split())  # noqa: SIM905
_FEATURE: Final = frozenset("name aliases ask refuse ask_env on off every allreduce source".split())  # noqa: SIM905
_EVIDENCE: Final = frozenset(
    "feature on setting value starts contains pattern keep final requested versions majors source example".split()  # noqa: SIM905
)
_DUMP: Final = frozenset("starts contains after versions source example".split())  # noqa: SIM905


class FeatureError(ValueError):
    """A table of features is wrong; the message names the table and the entry."""


@dataclass(frozen=True, slots=True)
class SettingRule:
    """A setting: the flags that ask for it, and where a server keeps what it became (dotted keys go into dicts).

    ``unresolved`` values say nothing of what runs. ``most``: of several keys the largest number counts.
    """

    name: str
    flags: tuple[str, ...]
    keys: tuple[str, ...]
    unresolved: frozenset[str]
    compare: str
    most: bool


@dataclass(frozen=True, slots=True)
class FeatureRule:
    """A feature: flags and variables that ask for it, flags that refuse it, and resolved values that show it on or off.

    ``on``, ``off``: (key, value) pairs; with ``every``, all keys that are there must have such a value. ``allreduce``:
    it is a way of summing over GPUs.
    """

    name: str
    ask: tuple[str, ...]
    refuse: tuple[str, ...]
    ask_env: tuple[str, ...]
    on: tuple[tuple[str, str], ...]
    off: tuple[tuple[str, str], ...]
    every: bool
    allreduce: bool


@dataclass(frozen=True, slots=True)
class LineRule:
    """A line that is evidence of a feature, or names what a setting became (``pattern``'s group, or ``value``).

    ``final``: what was said before no longer counts. ``keep``: ``last`` or ``first`` of several picks.
    """

    feature: str | None
    on: bool
    setting: str | None
    value: str | None
    starts: str
    contains: str
    pattern: re.Pattern[str] | None
    keep: str
    final: bool
    requested: bool
    versions: SpecifierSet | None
    majors: frozenset[int]
    example: str

    def covers(self, version: Version | None, majors: frozenset[int]) -> bool:
        """Whether it applies to this release (an unknown one is covered) and to these GPUs (unknown ones are not)."""
        if version is not None and self.versions is not None and not self.versions.contains(version, prereleases=True):
            return False
        return not self.majors or bool(majors and majors <= self.majors)


@dataclass(frozen=True, slots=True)
class DumpRule:
    """A line that lists the resolved arguments; they begin behind ``after``."""

    starts: str
    contains: str
    after: str
    example: str


@dataclass(frozen=True, slots=True)
class FeatureTable:
    """Everything of one engine, and the names that claims may use."""

    settings: tuple[SettingRule, ...]
    features: tuple[FeatureRule, ...]
    lines: tuple[LineRule, ...]
    dumps: tuple[DumpRule, ...]
    vocabulary: Vocabulary

    @property
    def keys(self) -> frozenset[str]:
        """Every key that is looked for in dumped arguments, the parts of dotted ones cut off."""
        found = [key for rule in self.settings for key in rule.keys] + ["page_size"]
        found += [key for rule in self.features for key, _ in (*rule.on, *rule.off)]
        return frozenset(key.partition(".")[0] for key in found)


EMPTY: Final = FeatureTable((), (), (), (), Vocabulary())


@cache
def load_features(engine: str | None) -> FeatureTable:
    """The table of an engine; an engine that has none has an empty one. Raises FeatureError."""
    path = TABLES.get(engine or "")
    return parse_features(package_text(path), path) if path is not None else EMPTY


def parse_features(text: str, name: str) -> FeatureTable:
    """The entries ``resolved``, ``feature``, ``evidence`` and ``dump`` of a TOML text. Raises FeatureError."""
    data = parse_toml(text)
    settings = tuple(_setting(entry, name) for entry in data.get("resolved", ()))
    features = tuple(_feature(entry, name) for entry in data.get("feature", ()))
    known = {rule.name for rule in settings}, {rule.name for rule in features}
    lines = tuple(_line(entry, name, *known) for entry in data.get("evidence", ()))
    dumps = tuple(_dump(entry, name) for entry in data.get("dump", ()))
    vocabulary = _vocabulary(data.get("resolved", ()), data.get("feature", ()), name)
    return FeatureTable(settings, features, lines, dumps, vocabulary)


def release(version: str | None) -> Version | None:
    """A release as rules compare it: ``0.5.15.dev1`` counts as 0.5.15; None where it cannot be read."""
    try:
        return Version(Version(version).base_version) if version is not None else None
    except InvalidVersion:
        return None


def _setting(entry: dict[str, Any], name: str) -> SettingRule:
    _check(entry, _SETTING, name, "resolved", ("name", "source"))
    if entry.get("compare", "text") not in COMPARE:
        raise FeatureError(f"{name}: resolved {entry['name']}: compare is one of {COMPARE}")
    return SettingRule(
        entry["name"],
        tuple(entry.get("flags", ())),
        tuple(entry.get("keys", ())),
        frozenset({"", "None", *entry.get("unresolved", ())}),
        entry.get("compare", "text"),
        bool(entry.get("most", False)),
    )


def _feature(entry: dict[str, Any], name: str) -> FeatureRule:
    _check(entry, _FEATURE, name, "feature", ("name", "source"))

    def pairs(which: str) -> tuple[tuple[str, str], ...]:
        return tuple((key, value) for key, values in entry.get(which, {}).items() for value in values)

    return FeatureRule(
        entry["name"],
        tuple(entry.get("ask", ())),
        tuple(entry.get("refuse", ())),
        tuple(entry.get("ask_env", ())),
        pairs("on"),
        pairs("off"),
        bool(entry.get("every", False)),
        bool(entry.get("allreduce", False)),
    )


def _line(entry: dict[str, Any], name: str, settings: set[str], features: set[str]) -> LineRule:
    _check(entry, _EVIDENCE, name, "evidence", ("starts", "source", "example"))
    where = f"{name}: evidence {entry['starts']!r}"
    feature, setting = entry.get("feature"), entry.get("setting")
    if (feature is None) == (setting is None):
        raise FeatureError(f"{where}: names either a feature or a setting")
    if (feature is not None and feature not in features) or (setting is not None and setting not in settings):
        raise FeatureError(f"{where}: {feature or setting} is not in this table")
    if feature is not None and not isinstance(entry.get("on"), bool):
        raise FeatureError(f"{where}: `on` is true or false")
    if setting is not None and ("value" in entry) == ("pattern" in entry):
        raise FeatureError(f"{where}: a setting takes its value from `value` or from the group of `pattern`")
    if len(entry["starts"]) < HEAD:
        raise FeatureError(f"{where}: `starts` has at least {HEAD} characters")
    if entry.get("keep", "last") not in ("first", "last"):
        raise FeatureError(f"{where}: keep is first or last")
    try:
        pattern = compile_bounded(entry["pattern"]) if "pattern" in entry else None
        versions = SpecifierSet(entry["versions"]) if "versions" in entry else None
    except (PatternError, InvalidSpecifier) as error:
        raise FeatureError(f"{where}: {error}") from None
    if setting is not None and pattern is not None and pattern.groups != 1:
        raise FeatureError(f"{where}: the pattern of a setting has one group")
    return LineRule(
        feature=feature,
        on=bool(entry.get("on", False)),
        setting=setting,
        value=entry.get("value"),
        starts=entry["starts"],
        contains=entry.get("contains", ""),
        pattern=pattern,
        keep=entry.get("keep", "last"),
        final=bool(entry.get("final", False)),
        requested=bool(entry.get("requested", False)),
        versions=versions,
        majors=frozenset(entry.get("majors", ())),
        example=entry["example"],
    )


def _dump(entry: dict[str, Any], name: str) -> DumpRule:
    _check(entry, _DUMP, name, "dump", ("starts", "after", "source", "example"))
    if len(entry["starts"]) < HEAD:
        raise FeatureError(f"{name}: dump {entry['starts']!r}: `starts` has at least {HEAD} characters")
    return DumpRule(entry["starts"], entry.get("contains", ""), entry["after"], entry["example"])


def _check(entry: dict[str, Any], keys: frozenset[str], name: str, kind: str, needed: Iterable[str]) -> None:
    called = entry.get("name") or entry.get("starts") or "without a name"
    unknown = set(entry) - keys
    if unknown:
        raise FeatureError(f"{name}: {kind} {called}: unknown keys {sorted(unknown)}")
    for key in needed:
        if not isinstance(entry.get(key), str) or not entry[key]:
            raise FeatureError(f"{name}: {kind} {called}: no {key}")


def _vocabulary(settings: Iterable[dict[str, Any]], features: Iterable[dict[str, Any]], name: str) -> Vocabulary:
    terms: dict[str, Term] = {}
    values: dict[str, dict[str, str]] = {}
    same: dict[tuple[str, str], str] = {}

    def learn(word: str, term: Term, flag: bool = False) -> None:
        known = terms.setdefault(normal(word), term)
        # A flag that both asks for a feature and gives a setting its value is the setting's.
        if known != term and not (flag and known.kind == "setting"):
            raise FeatureError(f"{name}: {word!r} means both {known.name} and {term.name}")

    for entry in settings:
        term = Term("setting", entry["name"])
        for word in (entry["name"], *entry.get("aliases", ()), *entry.get("flags", ())):
            learn(word, term)
        for value in entry.get("values", ()):
            values.setdefault(normal(value), {}).setdefault(entry["name"], value)
        for spelling, usual in entry.get("same", {}).items():
            same[entry["name"], normal(spelling)] = usual
    for entry in features:
        learn(entry["name"], Term("feature", entry["name"]))
        for word in entry.get("aliases", ()):
            learn(word, Term("feature", entry["name"]))
        for word in (*entry.get("ask", ()), *entry.get("ask_env", ())):
            learn(word, Term("feature", entry["name"]), flag=True)
        for word in entry.get("refuse", ()):
            learn(word, Term("feature", entry["name"], want=False), flag=True)
    names = [entry["name"] for entry in features] + [f"{entry['name']}=…" for entry in settings]
    return Vocabulary(
        MappingProxyType(terms),
        MappingProxyType({value: tuple(owners.items()) for value, owners in values.items()}),
        MappingProxyType(same),
        tuple(sorted(names)),
    )
