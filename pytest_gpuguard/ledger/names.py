"""What a claim is called now, after it was renamed or moved. Pure; it must never forget a name that was ever used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alias:
    """``old`` is called ``new``, said at ``since`` (epoch seconds)."""

    old: str
    new: str
    since: float


def present_names(aliases: Iterable[Alias]) -> dict[str, str]:
    """Old name → the name in use, through chains. Where aliases make a ring (a claim that was moved back), the
    latest wins, whatever the order in which they came into the ledger.
    """
    links: dict[str, str] = {}
    for alias in sorted(aliases, key=lambda one: (one.since, one.old, one.new)):
        links.pop(alias.old, None)
        if alias.old == alias.new:  # its own name again
            continue
        if _end(alias.new, links) == alias.old:
            del links[alias.new]
        links[alias.old] = alias.new
    return {old: _end(old, links) for old in links}


def _end(name: str, links: Mapping[str, str]) -> str:
    while name in links:
        name = links[name]
    return name


def names_of(claim: str, present: Mapping[str, str]) -> set[str]:
    """All names under which this claim was ever recorded, whichever of them is given."""
    now = present.get(claim, claim)
    return {now, *(old for old, new in present.items() if new == now)}
