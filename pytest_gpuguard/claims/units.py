"""Sizes, comparisons and durations as people write them in claims.

Engines print GiB and call it GB; cards are sold in GB (10⁹ bytes). The two are never mixed here: a function says
which one it takes.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

GIB: Final = 1 << 30
_DECIMAL: Final = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY: Final = {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": GIB, "TIB": 1 << 40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)\s*$", re.IGNORECASE)
_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|sec|m|min|h)?\s*$", re.IGNORECASE)
_DURATION_UNITS: Final = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_COMPARISON = re.compile(r"^\s*(>=|<=|==|>|<)\s*(\d[\d_]*(?:\.\d+)?)\s*$")
_OPERATORS: Final[dict[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


def parse_bytes(text: str) -> int:
    """``"96GB"`` → 96·10⁹ bytes; ``"75GiB"`` → 75·2³⁰ bytes.

    Raises ValueError for anything else; a bare number has no unit and is refused.
    """
    match = _SIZE.match(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f'{text!r} is not a size: write a number and a unit, such as "96GB" (10⁹ bytes) or "75GiB"')
    unit = match[2].upper()
    factor = _BINARY.get(unit) or _DECIMAL[unit]
    return round(float(match[1]) * factor)


def parse_gib(text: str) -> float:
    """``"75GiB"`` → 75.0. ``GB`` is refused: engines print GiB and say GB, so the unit would be a guess.

    Raises ValueError.
    """
    size = parse_bytes(text)
    match = _SIZE.match(text)
    assert match is not None
    if match[2].upper() in _DECIMAL:
        exact = size / GIB
        raise ValueError(
            f'{text!r}: engines print GiB and call it GB, so "GB" is ambiguous here; '
            f'write "{match[1]}GiB" for the engine\'s number, or "{exact:.2f}GiB" for {text}'
        )
    return size / GIB


def parse_duration(text: str | float) -> float:
    """``"20m"``, ``"90s"``, ``"1.5h"`` or a number of seconds → seconds. Raises ValueError."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if not 0 < text < math.inf:
            raise ValueError(f"{text!r} is not a duration: it must be a number of seconds above zero")
        return float(text)
    match = _DURATION.match(text) if isinstance(text, str) else None
    if match is None or float(match[1]) <= 0:
        raise ValueError(f'{text!r} is not a duration: write "90s", "20m" or "1.5h"')
    return float(match[1]) * _DURATION_UNITS[(match[2] or "s").lower()]


def parse_percent(text: str | float) -> float:
    """``"5%"`` or ``0.05`` → 0.05. Raises ValueError."""
    if isinstance(text, str) and text.strip().endswith("%"):
        try:
            value = float(text.strip()[:-1]) / 100
        except ValueError:
            value = -1.0
    elif isinstance(text, (int, float)) and not isinstance(text, bool):
        value = float(text)
    else:
        value = -1.0
    if not 0 < value < 1:
        raise ValueError(f'{text!r} is not a tolerance: write "5%" or 0.05')
    return value


@dataclass(frozen=True, slots=True)
class Comparison:
    """A bound such as ``>=262144``."""

    op: str
    value: float

    def holds(self, measured: float) -> bool:
        """Whether the measured number satisfies the bound."""
        return _OPERATORS[self.op](measured, self.value)

    def __str__(self) -> str:
        return f"{self.op}{self.value}" if self.value % 1 else f"{self.op}{int(self.value)}"


def parse_comparison(text: str | int) -> Comparison:
    """``">=262144"`` → a Comparison; a bare number means ``>=``. Raises ValueError."""
    if isinstance(text, (int, float)) and not isinstance(text, bool) and math.isfinite(text):
        return Comparison(">=", float(text))
    match = _COMPARISON.match(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f'{text!r} is not a bound: write ">=262144", ">2" or "<0.5"')
    return Comparison(match[1], float(match[2].replace("_", "")))
