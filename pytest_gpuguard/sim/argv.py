"""SGLang's own argv as a release reads it: settings by their names, and what argparse would refuse.

Pure. Values are not checked here: that is the predictor's, which knows what they are for.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..claims.layout import NEGATIVE_NUMBER
from .release import Release


@dataclass(frozen=True, slots=True)
class Given:
    """What an argv gives: ``words`` by canonical flag (lists joined by blanks, "" for none), and ``values`` by setting.

    ``error`` is what argparse would say and exit with 2.
    """

    words: Mapping[str, str]
    values: Mapping[str, Any]
    error: str | None = None


def read_argv(argv: Sequence[str], release: Release) -> Given:
    """The settings of an argv, as this release takes them."""
    words: dict[str, str] = {}
    values: dict[str, Any] = {}
    unknown: list[str] = []
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        name, equals, value = word.partition("=")
        found = _resolved(word, name, release) if word.startswith("-") and not NEGATIVE_NUMBER.match(word) else ()
        if len(found) > 1:
            return Given(words, values, f"ambiguous option: {name} could match {', '.join(found[:4])}")
        if not found:
            unknown.append(word)
            continue
        flag = release.flags[found[0]]
        following = [value] if equals else []
        while flag.takes != "nothing" and not equals and at < len(argv) and (flag.takes == "list" or not following):
            if argv[at].startswith("-") and not NEGATIVE_NUMBER.match(argv[at]) and " " not in argv[at]:
                break
            following.append(argv[at])
            at += 1
        if flag.takes == "value" and not following:
            return Given(words, values, f"argument {flag.name}: expected one argument")
        words[flag.name] = " ".join(following)
        values[flag.dest] = _value(flag.takes, following)
    if not isinstance(values.get("port", 0), int):
        return Given(words, values, f"argument --port: invalid int value: {words['--port']!r}")
    if unknown:
        return Given(words, values, f"unrecognized arguments: {' '.join(unknown)}")
    return Given(words, values)


def _resolved(word: str, name: str, release: Release) -> tuple[str, ...]:
    """The flags that argparse may take a word for: itself, or those that it abbreviates."""
    if word in release.flags or name in release.flags:
        return (word if word in release.flags else name,)
    if not word.startswith("--"):
        return ()
    found = {release.flags[flag].name: flag for flag in sorted(release.flags) if flag.startswith(name)}
    return tuple(found.values())


def _value(takes: str, following: Sequence[str]) -> Any:
    if takes == "nothing":
        return True
    found = [_plain(word) for word in following]
    if takes == "list":
        return found
    return found[0] if found else True


def _plain(word: str) -> Any:
    """A number where it is one; a path or a name that looks like Python is left as it is."""
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return word
    return value if isinstance(value, (int, float)) else word
