"""How each SGLang release spells the lines of a boot: ``facts/sglang_versions.toml``, read once.

The order of ``key=value`` parts in a line is never relied on, and an unknown part is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from ..claims.outcome import PHASES
from .data import compile_bounded, package_toml

TABLE: Final = "facts/sglang_versions.toml"

#: What a rule may take from a line; all in GiB but the counts of tokens.
VALUES: Final = frozenset(
    {"avail_before", "avail_after", "weights", "kv_tokens", "kv", "graph", "avail", "max_total", "total", "utilization"}
)


@dataclass(frozen=True, slots=True)
class LogRule:
    """One spelling of one line: see the head of the table for what each field means."""

    id: str
    literal: str
    starts: str
    phase: str | None
    take: tuple[tuple[str, str], ...]
    ready: bool
    ignore: bool
    pool_done: bool
    versions: str
    source: str
    example: str

    def matches(self, message: str) -> bool:
        """Whether the rule applies to a line's message (the line without its prefix)."""
        return message.startswith(self.starts) and self.literal in message


@dataclass(frozen=True, slots=True)
class Gate:
    """What a release says, or does without saying, when a feature is not for this hardware."""

    id: str
    text: str
    behaviour: str
    versions: str
    source: str


@dataclass(frozen=True, slots=True)
class Spellings:
    """The whole table. ``renamed`` maps a flag to what replaced it.

    ``starts`` and ``anywhere`` are what some rule's line begins with or else holds: a first, cheap look.
    """

    prefix: re.Pattern[str]
    rules: tuple[LogRule, ...]
    numbers: Mapping[str, re.Pattern[str]]
    renamed: Mapping[str, str]
    gates: tuple[Gate, ...]
    starts: tuple[str, ...] = ()
    anywhere: tuple[str, ...] = ()

    def rule_for(self, message: str) -> LogRule | None:
        """The first rule that applies to a line's message, or None."""
        if not message.startswith(self.starts) and not any(literal in message for literal in self.anywhere):
            return None
        return next((rule for rule in self.rules if rule.matches(message)), None)

    def numbers_in(self, rule: LogRule, message: str) -> list[tuple[str, float]]:
        """``(value name, number)`` for each number of the rule that the line holds."""
        found: list[tuple[str, float]] = []
        for number, value in rule.take:
            match = self.numbers[number].search(message)
            if match is not None:
                found.append((value, float(match[1])))
        return found


@cache
def load_spellings() -> Spellings:
    """The table, checked; raises ValueError naming the rule that is wrong."""
    data = package_toml(TABLE)
    numbers = {name: compile_bounded(pattern) for name, pattern in data["numbers"].items()}
    rules = tuple(_rule(entry, numbers) for entry in data["log"])
    return Spellings(
        prefix=compile_bounded(data["prefix"]["pattern"], anchored=True),
        rules=rules,
        starts=tuple({rule.starts for rule in rules if rule.starts}),
        anywhere=tuple({rule.literal for rule in rules if not rule.starts}),
        numbers=numbers,
        renamed={entry["flag"]: entry["use"] for entry in data.get("renamed", ())},
        gates=tuple(
            Gate(gate["id"], gate["text"], gate["behaviour"], gate.get("versions", ""), gate["source"])
            for gate in data.get("gate", ())
        ),
    )


def _rule(entry: dict[str, Any], numbers: Mapping[str, re.Pattern[str]]) -> LogRule:
    name = entry["id"]
    phase = entry.get("phase")
    take = tuple(entry.get("take", {}).items())
    if phase is not None and phase not in PHASES:
        raise ValueError(f"{TABLE}: rule {name}: {phase!r} is not a phase ({', '.join(PHASES)})")
    for number, value in take:
        if number not in numbers or value not in VALUES:
            raise ValueError(f"{TABLE}: rule {name}: cannot take {number!r} as {value!r}")
    return LogRule(
        id=name,
        literal=entry["literal"],
        starts=entry.get("starts", entry["literal"]),
        phase=phase,
        take=take,
        ready=entry.get("ready", False),
        ignore=entry.get("ignore", False),
        pool_done=entry.get("pool_done", False),
        versions=entry.get("versions", ""),
        source=entry["source"],
        example=entry["example"],
    )
