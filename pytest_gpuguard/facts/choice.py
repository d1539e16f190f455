"""Which rig and which stacks the user asks for, as the command line spells them. Pure: nothing is looked up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

RIG_FORMS: Final = "auto, sim:<card>:<n> (such as sim:rtx-pro-6000-server:8) or replay:DIR"
STACK_FORMS: Final = "NAME=PYTHON, docker:IMAGE or podman:IMAGE after NAME="
_SIMULATED = re.compile(r"sim:([a-z0-9][a-z0-9-]*):(\d+)")


@dataclass(frozen=True, slots=True)
class RigChoice:
    """``kind`` is "real", "simulated" (then ``card``, a slug of the catalogue, and ``count``) or "replayed"."""

    kind: str
    card: str | None = None
    count: int | None = None
    folder: str | None = None


def parse_rig(text: str) -> RigChoice:
    """``"auto"``, ``"sim:h200:8"``, ``"replay:DIR"`` → RigChoice. Raises ValueError that names the forms."""
    if text == "auto":
        return RigChoice("real")
    if (match := _SIMULATED.fullmatch(text)) and int(match[2]) > 0:
        return RigChoice("simulated", card=match[1], count=int(match[2]))
    if text.startswith("replay:") and text != "replay:":
        return RigChoice("replayed", folder=text.removeprefix("replay:"))
    raise ValueError(f"{text!r} is no rig: write {RIG_FORMS}")


def parse_stack(text: str) -> tuple[str, str]:
    """``"new=/opt/new/bin/python"`` → ("new", "/opt/new/bin/python"). Raises ValueError that names the forms."""
    name, separator, python = text.partition("=")
    if not separator or not name.strip() or not python.strip():
        raise ValueError(f"{text!r} is no stack: write {STACK_FORMS}")
    return name.strip(), python.strip()
