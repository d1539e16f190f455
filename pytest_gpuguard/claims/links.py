"""How near the GPUs of a rig are to each other, and which of them a claim's ``link=`` lets be together.

Pure: it reads the tables that somebody else filled. What they do not say counts as far, never as near.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Final

from .gpuset import GpuChoice, pair

if TYPE_CHECKING:
    from .needs import GpuFacts, RigFacts

#: Each level costs as much as two of the one before: one pair across sockets is worse than two on one switch are good.
_LEVELS: Final = {"INTERNAL": 2, "PIX": 4, "PXB": 8, "PHB": 16, "NODE": 32, "SYS": 64}
#: ``SYS`` between GPUs of one NUMA node: virtual machines say so of all pairs.
_SYS_ON_ONE_NODE: Final = 48
#: So many GPUs that all reach each other are joined by switches; one of their kind that reaches none lost its links.
_SWITCHED: Final = 3


def gpu_choice(gpus: Sequence[GpuFacts], link: str | None, count: int, rig: RigFacts) -> GpuChoice:
    """The choice among these GPUs, in their order; with a ``link``, only those in some set of ``count`` that has it."""
    distance: dict[tuple[str, str], int] = {}
    apart: set[tuple[str, str]] = set()
    for a, b in combinations(gpus, 2):
        key = pair(a.uuid, b.uuid)
        far = _distance(a, b, rig)
        if far is not None:
            distance[key] = far
        if link is not None and not _joined(link, a.uuid, b.uuid, rig):
            apart.add(key)
    last = _without_links(gpus, rig) | {gpu.uuid for gpu in gpus if getattr(gpu, "mig", None)}
    choice = GpuChoice(tuple(gpu.uuid for gpu in gpus), frozenset(apart), distance, frozenset(last))
    if link is None:
        return choice
    if link == "nvlink" and count == 1:  # joined means that there is another one
        joined = {uuid for one in combinations(choice.uuids, 2) if _nvlinks(*one, rig) for uuid in one}
        return choice.without(set(choice.uuids) - joined)
    return choice.possible(count)


def _distance(a: GpuFacts, b: GpuFacts, rig: RigFacts) -> int | None:
    """Smaller is nearer; None where nothing is known."""
    nodes = [getattr(gpu, "numa", None) for gpu in (a, b)]
    known = None not in nodes
    one_node = known and nodes[0] == nodes[1]
    if _nvlinks(a.uuid, b.uuid, rig):
        return 1 if known and not one_node else 0  # of equals, those that their server's CPUs are near to
    level = _level(a.uuid, b.uuid, rig)
    if level is None:
        return _LEVELS["NODE" if one_node else "SYS"] if known else None
    return _SYS_ON_ONE_NODE if level == "SYS" and one_node else _LEVELS[level]


def _joined(link: str, a: str, b: str, rig: RigFacts) -> bool:
    if link == "pix":
        level = _level(a, b, rig)
        return level is not None and _LEVELS[level] <= _LEVELS["PIX"]
    return (_nvlinks(a, b, rig) > 0) is (link == "nvlink")


def _nvlinks(a: str, b: str, rig: RigFacts) -> int:
    return rig.nvlink.get((a, b), 0)


def _level(a: str, b: str, rig: RigFacts) -> str | None:
    level = rig.topology.get((a, b))
    return level if level in _LEVELS else None


def _without_links(gpus: Sequence[GpuFacts], rig: RigFacts) -> set[str]:
    """GPUs whose NVLinks are down: all others of their kind reach each other.

    A machine with bridges for some pairs is none such: there, a GPU without one is the first to take for one alone.
    """
    kinds: dict[tuple[str, str], list[str]] = {}
    for gpu in rig.usable:
        kinds.setdefault((getattr(gpu, "name", ""), gpu.sm), []).append(gpu.uuid)
    down: set[str] = set()
    for uuids in kinds.values():
        joined = {uuid for one in combinations(uuids, 2) if _nvlinks(*one, rig) for uuid in one}
        if len(joined) >= _SWITCHED and all(_nvlinks(a, b, rig) for a, b in combinations(uuids, 2) if {a, b} <= joined):
            down |= set(uuids) - joined
    return down & {gpu.uuid for gpu in gpus}
