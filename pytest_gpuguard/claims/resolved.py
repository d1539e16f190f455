"""What was asked of a server against what runs, and the evidence of features being on or off, as frozen values.

Positive evidence only: what nobody said is absent, never False. Nothing here reads a log or decides a verdict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

_SEPARATORS: Final = re.compile(r"[\s_.,/:-]+")


def normal(text: str) -> str:
    """One spelling of a name: ``"--Custom all-reduce"`` and ``custom_allreduce`` are the same."""
    return _SEPARATORS.sub("", text).lower()


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: what the command line asked (None: nothing) and what runs (None: nobody said).

    ``evidence`` says where ``runs`` comes from (``server_info attention_backend``, ``line 41: …``). ``differs`` only
    where both are known and do not mean the same. ``echo``: ``runs`` is only the argument that was asked, handed back
    among the server's arguments, which shows nothing.
    """

    name: str
    asked: str | None = None
    runs: str | None = None
    evidence: str = ""
    differs: bool = False
    echo: bool = False

    def __str__(self) -> str:
        asked = f"asked {self.asked}, " if self.asked is not None else ""
        return f"{asked}runs {self.runs} ({self.evidence})"

    def as_dict(self) -> dict[str, Any]:
        """With stable keys, for JSON."""
        names = ("name", "asked", "runs", "evidence", "differs")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class FeatureEvidence:
    """Something the server said that shows a feature on or off; ``text`` quotes it.

    ``requested``: it is off because the user said so, or never asked for it, which is no fall-back. ``echo``: it only
    repeats what was asked, as ``Setting.echo``.
    """

    feature: str
    on: bool
    text: str
    requested: bool = False
    echo: bool = False

    def as_dict(self) -> dict[str, Any]:
        """With stable keys, for JSON."""
        return {"feature": self.feature, "on": self.on, "evidence": self.text}


@dataclass(frozen=True, slots=True)
class Pick:
    """A line of the log that names what a setting became."""

    setting: str
    value: str
    text: str


@dataclass(frozen=True, slots=True)
class LogEvidence:
    """What a log alone says: picks, features, and the fields wanted of the arguments that were dumped at ``line``."""

    picks: tuple[Pick, ...] = ()
    features: tuple[FeatureEvidence, ...] = ()
    dump: tuple[tuple[str, str], ...] = ()
    line: int = 0


@dataclass(frozen=True, slots=True)
class Term:
    """What the words of a claim mean: a feature (``want`` False for a flag that turns it off), or a setting's value."""

    kind: str
    name: str
    value: str | None = None
    want: bool = True


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The names that claims may use for one engine. Keys are normal (``normal``); see ``find``.

    ``values``: a value → the settings that can have it. ``same``: (setting, value) → the value's usual spelling.
    """

    terms: Mapping[str, Term] = field(default_factory=lambda: MappingProxyType({}))
    values: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=lambda: MappingProxyType({}))
    same: Mapping[tuple[str, str], str] = field(default_factory=lambda: MappingProxyType({}))
    names: tuple[str, ...] = ()

    def find(self, text: str) -> Term | str:
        """The term that a claim's words name, or a sentence that says why they name none."""
        head, equals, value = text.partition("=")
        if not equals and text.startswith("-"):
            head, _, value = text.strip().partition(" ")
        term = self.terms.get(normal(head))
        if value.strip():
            if term is None:
                return self._unknown(head)
            value = value.strip().strip("'\"")
            return Term(term.kind, term.name, value, term.want) if term.kind == "setting" else term
        if term is not None:
            return term
        return self._value(text)

    def usual(self, setting: str, value: str) -> str:
        """The usual spelling of a setting's value: ``torch.bfloat16`` → ``bfloat16``."""
        return self.same.get((setting, normal(value)), value)

    def _value(self, text: str) -> Term | str:
        """``fa3``, ``trtllm_mla attention backend``."""
        short = normal(text)
        for name, term in self.terms.items():
            if term.kind == "setting" and short.endswith(name) and len(short) > len(name):
                found = [value for setting, value in self.values.get(short[: -len(name)], ()) if setting == term.name]
                if found:
                    return Term("setting", term.name, found[0])
        owners = self.values.get(short) or self.values.get(short.removesuffix("backend"), ())
        if len(owners) == 1:
            return Term("setting", *owners[0])
        if owners:
            choices = " or ".join(f"{setting}={value}" for setting, value in owners)
            return f"{text!r} is ambiguous: write {choices}"
        return self._unknown(text)

    def _unknown(self, text: str) -> str:
        known = ", ".join(self.names) or "none for this engine"
        return f"{text!r} is no feature that evidence is known of (known: {known})"


@dataclass(frozen=True, slots=True)
class Resolved:
    """Asked against running, of one boot: settings, evidence of features, and the names that claims may use."""

    settings: tuple[Setting, ...] = ()
    features: tuple[FeatureEvidence, ...] = ()
    vocabulary: Vocabulary = field(default_factory=Vocabulary, repr=False, compare=False)

    def setting(self, name: str) -> Setting:
        """A setting by name; one of which nothing is known is empty."""
        return next((one for one in self.settings if one.name == name), Setting(name))

    def differences(self) -> tuple[Setting, ...]:
        """Settings that run otherwise than asked."""
        return tuple(one for one in self.settings if one.differs)

    def evidence(self, feature: str, on: bool) -> tuple[FeatureEvidence, ...]:
        """What shows the feature on, or off."""
        return tuple(one for one in self.features if one.feature == feature and one.on is on)

    def as_dict(self) -> dict[str, Any]:
        """With stable keys, for JSON: ``settings``, and ``features`` without those that nobody asked for."""
        return {
            "settings": [one.as_dict() for one in self.settings],
            "features": [one.as_dict() for one in self.features if not one.requested],
        }
