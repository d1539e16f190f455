"""A rig and a stack that are not there, made of the catalogue and of what the user says of them.

No device and no python is asked; what nobody recorded stays unknown, and everything says that it is simulated.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from .catalogue import MIB, Card, cards
from .choice import SIMULATED, RigChoice, parse_rig
from .gpu import Gpu, GpuMemory, Rig
from .tables import json_table

if TYPE_CHECKING:
    from .stack import Stack

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)gib")
_FACT: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*==\s*(\S+)")
STACK_FORM: Final = "sim:sglang==0.5.7, with further facts after commas: sim:sglang==0.5.7,cuda==12.9"
#: UUIDs of simulated GPUs begin so: no real one does.
UUID: Final = "GPU-sim-"


class SimulationError(ValueError):
    """A card or a stack that cannot be simulated; the message says what can be."""


def simulated_rig(choice: RigChoice | str) -> Rig:
    """The rig of ``sim:<card>:<n>``. Raises SimulationError for a card that nobody recorded, naming close ones."""
    if isinstance(choice, str):
        choice = parse_rig(choice)
    if choice.kind != "simulated" or choice.card is None or choice.count is None:
        raise SimulationError(f"{choice} is no simulated rig: write sim:<card>:<n>")
    card = _card(choice.card, choice.count)
    gpus = tuple(_gpu(card, index) for index in range(choice.count))
    topology: dict[tuple[str, str], str] = {}
    nvlink: dict[tuple[str, str], int] = {}
    for one in gpus:
        for other in gpus:
            if one.index == other.index:
                continue
            pair = one.uuid, other.uuid
            if max(one.index, other.index) < len(card.topology):
                topology[pair] = card.topology[one.index][other.index]
            if card.nvlinks:
                nvlink[pair] = card.nvlinks
    return Rig(gpus=gpus, driver=card.driver, topology=topology, nvlink=nvlink, kind="simulated")


def simulated_stack(name: str, text: str) -> Stack:
    """The stack of ``sim:sglang==0.5.7,cuda==12.9``. Raises SimulationError that names the form.

    ``cuda`` is the CUDA that its torch was built for; everything else is an installed package.
    """
    from .stack import Stack

    packages = simulated_packages(text)
    cuda = packages.pop("cuda", None)
    torch = {"version": packages.get("torch"), "cuda": cuda, "hip": None, "build": "cuda" if cuda else "unknown"}
    return Stack(name, text, {"packages": packages, "torch": torch if cuda or torch["version"] else None})


def simulated_packages(text: str) -> dict[str, str]:
    """What a simulated stack says of itself: canonical name → version, ``cuda`` among them. Raises SimulationError."""
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion, Version

    packages: dict[str, str] = {}
    for part in text.removeprefix(SIMULATED).split(","):
        match = _FACT.fullmatch(part.strip())
        if match is None:
            raise SimulationError(f"{text!r}: {part.strip()!r} is no PACKAGE==VERSION; write {STACK_FORM}")
        try:
            Version(match[2])
        except InvalidVersion:
            raise SimulationError(f"{text!r}: {match[2]!r} is no version; write {STACK_FORM}") from None
        if packages.setdefault(canonicalize_name(match[1]), match[2]) != match[2]:
            raise SimulationError(f"{text!r} names {match[1]} twice")
    if "sglang" not in packages:
        raise SimulationError(f"{text!r} names no engine that can be simulated; write {STACK_FORM}")
    return packages


def default_stack() -> str:
    """The stack of a simulated rig when none is named: the newest release whose flags are known."""
    return f"{SIMULATED}sglang=={json_table('facts/sglang_flags.json')['releases'][-1]}"


def beyond_what_is_known(version: str | None) -> str | None:
    """Which release's rules stand in for one that is newer or older than all that were read; None for one between."""
    from packaging.version import Version

    if version is None:
        return None
    first, *_, last = json_table("facts/sglang_flags.json")["releases"]
    release = Version(Version(version).base_version)
    if release > Version(last):
        return f"newer than what is known: the flags and rules of {last} are used"
    if release < Version(first):
        return f"older than what is known: the flags of {first} are used"
    return None


def _card(slug: str, count: int) -> Card:
    size = _SIZE.fullmatch(slug)
    if size is not None:
        mib = round(float(size[1]) * 1024)
        if mib < 1:
            raise SimulationError(f"sim:{slug}:{count}: a card without memory cannot be simulated")
        return Card(slug, f"a card of {size[1]} GiB", None, mib, None, False, False, None, ("the command line",))
    known: Mapping[str, Card] = cards()
    card = known.get(slug)
    if card is None:
        near = difflib.get_close_matches(slug, known, n=3, cutoff=0.5) or [one for one in known if slug in one]
        hint = f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(sorted(known))}."
        raise SimulationError(f"{slug!r} is no card of the catalogue; {hint} Any size goes too: sim:23.65GiB:{count}")
    if card.total_mib is None:
        raise SimulationError(f"{card.name} has no memory of its own: give the size, such as sim:119GiB:{count}")
    return card


def _gpu(card: Card, index: int) -> Gpu:
    assert card.total_mib is not None
    reserved = card.reserved_mib * MIB if card.reserved_mib is not None else None
    total = card.total_mib * MIB
    return Gpu(
        index=index,
        uuid=f"{UUID}{card.slug}-{index:04d}",
        name=card.name,
        bus_id="",
        compute_capability=card.compute_capability,
        sm=card.sm or "",
        memory=GpuMemory(total=total, used=0, free=total - (reserved or 0), reserved=reserved, version=2),
        numa=card.numa[index] if index < len(card.numa) else None,
        power_limit_w=card.power_limit_w,
        nvlinks=card.nvlinks,
    )
