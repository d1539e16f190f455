"""The shipped catalogue: SM numbers with their architectures, and cards with sizes that somebody recorded.

Never a source of facts about a real machine (a board of the same name may have another size: NVIDIA L20X).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from .tables import toml_table

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """A card as recorded: ``total_mib`` is NVML's total, ``reserved_mib`` NVML v2's reserve (None: not recorded).

    ``unified`` cards (GB10) have no memory of their own: NVML says NOT_SUPPORTED and ``total_mib`` is None. ``sm`` is
    None for a card that has no such number (AMD). ``topology`` are the rows of a full box's PCIe levels, ``nvlinks``
    the links between any two of it, ``numa`` its GPUs' nodes, ``driver`` the driver that it had: empty, 0 or None
    where nobody recorded them.
    """

    slug: str
    name: str
    sm: str | None
    total_mib: int | None
    reserved_mib: int | None
    nvlink: bool
    unified: bool
    power_limit_w: float | None
    sources: tuple[str, ...]
    topology: tuple[tuple[str, ...], ...] = ()
    nvlinks: int = 0
    numa: tuple[int, ...] = ()
    driver: str | None = None

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """``(12, 0)`` for SM120: the last digit is the minor number. None for a card without an SM number."""
        return (int(self.sm[:-1]), int(self.sm[-1])) if self.sm else None


@cache
def _catalogue() -> Mapping[str, Any]:
    return toml_table("facts/catalogue.toml")


def sm_architectures() -> dict[str, str]:
    """SM number → architecture, as the catalogue states it."""
    return dict(_catalogue()["sm"])


def slug_of(name: str) -> str:
    """The slug of a card by NVML's name; the name itself for a card that nobody recorded."""
    return next((card.slug for card in cards().values() if card.name.lower() == name.lower()), name)


def cards() -> dict[str, Card]:
    """Every recorded card by its slug, such as "rtx-pro-6000-server"."""
    return {
        slug: Card(
            slug=slug,
            name=data["name"],
            sm=data.get("sm"),
            total_mib=data.get("total_mib"),
            reserved_mib=data.get("reserved_mib"),
            nvlink=data["nvlink"],
            unified=data.get("unified", False),
            power_limit_w=data.get("power_limit_w"),
            sources=tuple(data["sources"]),
            topology=tuple(tuple(row.split()) for row in data.get("topology", ())),
            nvlinks=data.get("nvlinks", 0),
            numa=tuple(data.get("numa", ())),
            driver=data.get("driver"),
        )
        for slug, data in _catalogue()["card"].items()
    }
