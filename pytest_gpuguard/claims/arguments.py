"""Checks of single arguments of the decorators. Each takes anything, and raises ClaimError that says what is right."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from .errors import ClaimError, suggest
from .expect import normal_card
from .units import parse_duration, parse_gib
from .window import Window, parse_window, specifiers

T = TypeVar("T")


def window(when: Any) -> Window | None:
    """``when="sglang>=0.5.15"``; None is no window."""
    return parse_window(when) if when is not None else None


def version_range(spec: Any) -> str:
    """``">= 13"`` → ``">=13"``."""
    if not isinstance(spec, str):
        raise ClaimError(f'{spec!r} is not a version range: write ">=13"')
    specifiers(spec)
    return spec.replace(" ", "")


def choice(name: str, value: Any, known: Sequence[str]) -> None:
    """One of a few words."""
    if value not in known:
        hint = suggest(str(value), known)
        raise ClaimError(f"{name} {value!r} is not known{hint or '; it is one of ' + ', '.join(known)}")


def pattern(match: Any) -> str | None:
    """A regular expression that says something: one that an empty line satisfies would make any failure the claimed."""
    if match is None:
        return None
    try:
        empty = re.search(match, "") is not None
    except (re.error, TypeError) as error:
        raise ClaimError(f"match={match!r} is not a regular expression: {error}") from None
    if empty:
        raise ClaimError(f"match={match!r} is found in every line: name words of the message")
    return str(match)


def words(name: str, value: Any) -> list[str]:
    """Shell words."""
    if not isinstance(value, str):
        raise ClaimError(f"{name}: {value!r} is not a string")
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ClaimError(f"{name}: {value!r} cannot be split as a shell would: {error}") from None


def gib(name: str, value: Any) -> float:
    """``"75GiB"`` → 75.0."""
    return parsed(name, parse_gib, value)


def parsed(name: str, parse: Callable[[Any], T], value: Any) -> T:
    """What ``parse`` makes of it, its ValueError under the argument's name."""
    try:
        return parse(value)
    except ValueError as error:
        raise ClaimError(f"{name}={error}") from None


def boolean(name: str, value: Any) -> None:
    """True or False, and no other truth."""
    if not isinstance(value, bool):
        raise ClaimError(f"{name}={value!r} is neither True nor False")


def count(value: Any) -> bool:
    """Whether it is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def amount(value: Any) -> bool:
    """Whether it is a finite number above zero."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def text(name: str, value: Any) -> str:
    """Text that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise ClaimError(f"{name}={value!r} is not text")
    return value


def strings(name: str, value: Any) -> Mapping[str, str]:
    """Environment variables."""
    found = _mapping(name, value, '{"NAME": "value"}')
    for key, one in found.items():
        if not isinstance(key, str) or not isinstance(one, str) or "=" in key or not key:
            raise ClaimError(f"{name}={{{key!r}: {one!r}}}: names and values are strings")
    return found


def amounts(name: str, value: Any) -> Mapping[str, float]:
    """Numbers by name."""
    found = _mapping(name, value, '{"weights_gib": 77.7}')
    for key, one in found.items():
        if not isinstance(key, str) or not amount(one):
            raise ClaimError(f"{name}={{{key!r}: {one!r}}}: values are numbers above zero")
    return found


def load(concurrency: Any, input_len: Any, output_len: Any, per: Any, limit: Any) -> dict[str, Any]:
    """A load shape, as the fields of ``Rated``."""
    for name, number in (("concurrency", concurrency), ("input_len", input_len), ("output_len", output_len)):
        if not count(number):
            raise ClaimError(f"{name}={number!r} must be a whole number of at least 1")
    choice("per", per, ("total", "request"))
    seconds = parsed("limit", parse_duration, limit)
    return dict(concurrency=concurrency, input_len=input_len, output_len=output_len, per=per, limit_s=seconds)


def by_card(name: str, value: Any) -> tuple[tuple[str, float], ...]:
    """References by card, each once."""
    found = amounts(name, value)
    if not found:
        raise ClaimError(f"{name}={{}} names no card")
    names = [normal_card(card) for card in found]
    twice = next((card for card in found if names.count(normal_card(card)) > 1), None)
    if twice is not None:
        raise ClaimError(f"{name}: {twice!r} is there twice, as {', '.join(map(repr, found))}")
    return tuple(sorted(found.items()))


def _mapping(name: str, value: Any, such_as: str) -> Mapping[Any, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ClaimError(f"{name}={value!r} is not a dictionary: write {name}={such_as}")
    return MappingProxyType(dict(value or {}))
