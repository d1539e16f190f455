"""The shipped catalogue: SM numbers with their architectures, and cards with sizes that somebody recorded.

Never a source of facts about a real machine (a board of the same name may have another size: NVIDIA L20X).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """A card as recorded: ``total_mib`` is NVML's total, ``reserved_mib`` NVML v2's reserve (None: not recorded).

    ``unified`` cards (GB10) have no memory of their own: NVML says NOT_SUPPORTED and ``total_mib`` is None.
    """

    slug: str
    name: str
    sm: str
    total_mib: int | None
    reserved_mib: int | None
    nvlink: bool
    unified: bool
    power_limit_w: float | None
    sources: tuple[str, ...]

    @property
    def compute_capability(self) -> tuple[int, int]:
        """``(12, 0)`` for SM120: the last digit is the minor number."""
        return int(self.sm[:-1]), int(self.sm[-1])


@cache
def _catalogue() -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]
    text = files(__package__).joinpath("catalogue.toml").read_text(encoding="utf-8")
    parsed: Mapping[str, Any] = tomllib.loads(text)
    return parsed


def sm_architectures() -> dict[str, str]:
    """SM number → architecture, as the catalogue states it."""
    return dict(_catalogue()["sm"])


def cards() -> dict[str, Card]:
    """Every recorded card by its slug, such as "rtx-pro-6000-server"."""
    return {
        slug: Card(
            slug=slug,
            name=data["name"],
            sm=data["sm"],
            total_mib=data.get("total_mib"),
            reserved_mib=data.get("reserved_mib"),
            nvlink=data["nvlink"],
            unified=data.get("unified", False),
            power_limit_w=data.get("power_limit_w"),
            sources=tuple(data["sources"]),
        )
        for slug, data in _catalogue()["card"].items()
    }
