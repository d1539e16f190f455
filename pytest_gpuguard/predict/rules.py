"""Which release's memory rules apply: the part of the version table that the predictor reads.

Reads one packaged file. A release that nobody has read gets the rules of the nearest one, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..facts.tables import toml_table
from .releases import meant

#: The oldest and the newest release whose sources were read.
OLDEST: Final = "0.4.2"
NEWEST: Final = "0.5.23"


@dataclass(frozen=True, slots=True)
class Band:
    """Defaults of cards below ``under_mib``: prefill chunk, and the largest captured batch for few and many ranks."""

    under_mib: float
    chunk: int
    few: int
    many: int


@dataclass(frozen=True, slots=True)
class AllToAll:
    """A backend of the all-to-all between experts; ``known`` whether the release takes it.

    Every one sets ep to tp. ``whole``: every rank holds the shared experts whole; ``replicas``: attention has to be
    replicated on every rank; ``runners``: the only expert kernels (none: any).
    """

    name: str
    known: bool
    whole: bool
    replicas: bool
    runners: tuple[str, ...]
    since: str


@dataclass(frozen=True, slots=True)
class Rules:
    """The memory rules of ``release``. ``fraction`` is the entry of the table; ``pools`` the features it has."""

    release: str
    fraction: Mapping[str, Any]
    bands: tuple[Band, ...]
    pools: frozenset[str]
    all_to_all: Mapping[str, AllToAll]
    note: str | None = None

    def since(self, release: str) -> bool:
        """Whether these are the rules of this release or a later one."""
        return Version(self.release) >= Version(release)

    def band(self, card_mib: float) -> Band:
        """The band that a card of this size is in."""
        return next(band for band in self.bands if card_mib < band.under_mib)


def rules_for(version: str | None) -> Rules:
    """The rules of a release; of the nearest one where nobody knows it, which ``note`` says."""
    release, note = _nearest(version)
    return _rules(release, note)


def _nearest(version: str | None) -> tuple[str, str | None]:
    if version is None:
        return NEWEST, f"no release is given: the rules of sglang {NEWEST} are used"
    named, note = meant(version, "sglang", NEWEST)
    asked = Version(named)
    if asked > Version(NEWEST) and asked.release > Version(NEWEST).release:
        return NEWEST, f"sglang {named} is newer than what is known: the rules of {NEWEST} are used"
    if asked < Version(OLDEST):
        return OLDEST, f"sglang {named} is older than what is known: the rules of {OLDEST} are used"
    return ".".join(map(str, asked.release)), note


@cache
def _rules(release: str, note: str | None) -> Rules:
    table = toml_table("facts/sglang_versions.toml")

    def entry(name: str) -> Mapping[str, Any]:
        return next(one for one in table[name] if release in SpecifierSet(one["versions"]))

    pools = {
        name for name, window in table["pools"].items() if name != "source" and release in SpecifierSet(str(window))
    }
    bands = tuple(Band(*map(int, row)) for row in entry("band")["bands"])
    asked = Version(release)
    backends = {
        one["name"]: AllToAll(
            one["name"],
            asked >= Version(one["since"]),
            asked >= Version(one["whole"]),
            "replicas" in one and asked >= Version(one["replicas"]),
            tuple(name for name, since in one.get("runners", {}).items() if asked >= Version(since)),
            one["since"],
        )
        for one in table["a2a"]
    }
    return Rules(release, entry("fraction"), bands, frozenset(pools), backends, note)
