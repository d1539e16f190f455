"""Torch's report of a full GPU, and sizes as people read them: what was asked, what was free, what was missing.

It never guesses a number that the text does not hold; all sizes are GiB.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_SIZE: Final = r"(\d{1,9}(?:\.\d{1,6})?) (bytes|KiB|MiB|GiB)"
_TRIED: Final = re.compile(rf"Tried to allocate {_SIZE}")
_TOTAL: Final = re.compile(rf"total capac\w{{0,3}}ty of {_SIZE}|{_SIZE} total capacity")
_FREE: Final = re.compile(rf"of which {_SIZE} is free|{_SIZE} free")
_UNIT: Final = {"bytes": 1 / (1 << 30), "KiB": 1 / (1 << 20), "MiB": 1 / 1024, "GiB": 1.0}


@dataclass(frozen=True, slots=True)
class Allocation:
    """What torch says of a refused allocation, in GiB: what was asked, what was free, what the card has."""

    tried_gib: float | None = None
    free_gib: float | None = None
    total_gib: float | None = None

    @property
    def short_gib(self) -> float | None:
        """At least so much was missing."""
        if self.tried_gib is None or self.free_gib is None or self.tried_gib <= self.free_gib:
            return None
        return self.tried_gib - self.free_gib


def allocation(text: str) -> Allocation:
    """The numbers in torch's report of a full GPU, old or new spelling; empty when the text is none."""
    return Allocation(_size(_TRIED, text), _size(_FREE, text), _size(_TOTAL, text))


def size(gib: float) -> str:
    """A size in the unit that shows it: ``535 MiB``, ``1.2 GiB``."""
    if gib >= 1:
        return f"{gib:.1f} GiB"
    return f"{gib * 1024:.0f} MiB" if gib * 1024 >= 1 else f"{gib * (1 << 20):.0f} KiB"


def _size(pattern: re.Pattern[str], text: str) -> float | None:
    match = pattern.search(text)
    if match is None:
        return None
    number, unit = (part for part in match.groups() if part is not None)
    return float(number) * _UNIT[unit]
