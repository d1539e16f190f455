"""Which hardware gates of a release a boot meets: flags, variables and model against cards, links, ranks and packages.

Pure. What the table does not state does not happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .release import GateRule, Release


@dataclass(frozen=True, slots=True)
class Scene:
    """What a gate looks at. ``given`` holds every flag with its value ("" without one), by its canonical spelling.

    ``major`` is the compute capability's, None for a card without one; ``linked``: every pair of the GPUs has NVLink.
    ``tp`` counts the ranks that reduce together; ``packages`` are those that the stack names.
    """

    given: Mapping[str, str]
    env: Mapping[str, str]
    model: str
    major: int | None
    linked: bool
    tp: int
    packages: frozenset[str]


@dataclass(frozen=True, slots=True)
class Fired:
    """A gate that was met. ``value`` is what was asked for; ``what`` names the flag or variable, None for a default."""

    rule: GateRule
    what: str | None
    value: str


def fired(release: Release, scene: Scene) -> tuple[Fired, ...]:
    """Every gate that this boot meets, in the order of the table."""
    return tuple(found for rule in release.gates if (found := _fires(rule, scene)) is not None)


def _fires(rule: GateRule, scene: Scene) -> Fired | None:
    what = value = None
    if rule.flags or rule.env or rule.models:
        for table, given in ((rule.flags, scene.given), (rule.env, scene.env)):
            for name, values in table.items():
                if what is None and _has(given, name, values):
                    what, value = name, given[name]
        if what is None and scene.model not in rule.models:
            return None
    if any(_on(scene.given, name) for name in rule.unless):
        return None
    if (rule.majors and scene.major not in rule.majors) or (rule.not_majors and scene.major in rule.not_majors):
        return None
    if scene.major is None and (rule.majors or rule.not_majors or rule.links):
        return None  # nobody said what this card is: the gate cannot be told
    if scene.tp < rule.ranks or (rule.most_ranks is not None and scene.tp > rule.most_ranks):
        return None
    if rule.ranks_in and scene.tp not in rule.ranks_in:
        return None
    if rule.links is not None and (rule.links == "nvlink") != scene.linked:
        return None
    if set(rule.packages) - scene.packages or set(rule.lacks) & scene.packages:
        return None
    return Fired(rule, what, value or "")


def _has(given: Mapping[str, str], name: str, values: Sequence[str]) -> bool:
    return name in given and (not values or given[name] in values)


def _on(given: Mapping[str, str], name: str) -> bool:
    """Whether a flag was given that is not the word for nothing."""
    return name in given and given[name] != "none"
