"""What a simulated rig has no rule for: settings whose effect on memory or gates no table knows.

Pure but for reading its table. It errs on the side of not knowing: nothing that is not listed counts as harmless.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Final

from ..facts.tables import toml_table
from ..names import STAND_IN
from .gates import Fired
from .order import Order
from .release import EFFECTS

#: How the stand-in's own lines begin: what follows is no word of SGLang's.
OWN: Final = STAND_IN
NO_RULE: Final = OWN + "no rule for "


@dataclass(frozen=True, slots=True)
class Effects:
    """The table: flags and variables whose effect is known, some with certain values or beside certain facts only."""

    flags: frozenset[str]
    values: Mapping[str, tuple[str, ...]]
    measured: Mapping[str, tuple[str, ...]]
    env: tuple[str, ...]
    env_values: Mapping[str, tuple[str, ...]]
    wrappers: frozenset[str]


@cache
def load_effects() -> Effects:
    """The shipped table."""
    data: dict[str, Any] = toml_table(EFFECTS)
    flags, env = data["flags"], data["env"]

    def table(entries: Mapping[str, list[str]]) -> Mapping[str, tuple[str, ...]]:
        return MappingProxyType({name: tuple(values) for name, values in entries.items()})

    return Effects(
        frozenset([*flags["modelled"], *flags["harmless"]]),
        table(flags["values"]),
        table(flags["measured"]),
        tuple(env["harmless"]),
        table(env["values"]),
        frozenset(data["wrappers"]["harmless"]),
    )


def without_rule(
    order: Order,
    given: Mapping[str, str],
    met: Iterable[Fired],
    assumptions: Iterable[str] = (),
    effects: Effects | None = None,
) -> list[str]:
    """The settings of this boot that have no rule, as a person wrote them: ``NCCL_ALGO=Tree``, ``--enable-mscclpp``.

    ``met`` are the gates of this boot: what fired one has a rule, even where it is that nothing happens. An assumption
    of the predictor that begins with a flag says that the flag is not followed.
    """
    table = load_effects() if effects is None else effects
    assumed = [one.partition(" ")[0] for one in assumptions]
    gated = {one.what for one in met}
    found = []
    for name, value in given.items():
        known = (
            name in table.flags
            or name in gated
            or value in table.values.get(name, ())
            or any(fact in order.measured for fact in table.measured.get(name, ()))
        )
        if not known or name in assumed:
            found.append(f"{name} {value}".strip())
    for name, value in order.env.items():
        known = (
            any(fnmatchcase(name, one) for one in table.env) or name in gated or value in table.env_values.get(name, ())
        )
        if not known:
            found.append(f"{name}={value}")
    if order.wrapper and PurePath(order.wrapper[0]).name not in table.wrappers:
        found.append(f"the wrapper {order.wrapper[0]}")
    return found
