"""Which rig and which stacks the user asks for, as the command line spells them. Pure: nothing is looked up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ..names import SIMULATED

__all__ = ["MOST_GPUS", "RIG_FORMS", "SIMULATED", "STACK_FORMS", "RigChoice", "parse_rig", "parse_stack"]

RIG_FORMS: Final = "auto, sim:<card>:<n> (such as sim:rtx-pro-6000-server:8), sim:<size>GiB:<n> or replay:DIR"
STACK_FORMS: Final = "NAME=PYTHON, docker:IMAGE or podman:IMAGE after NAME="
#: One machine has no more; also what keeps a typing error from making millions of pairs.
MOST_GPUS: Final = 64
_SIMULATED = re.compile(r"sim:([a-z0-9][a-z0-9.-]*):(\d{1,9})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RigChoice:
    """``kind`` is "real", "simulated" (then ``card`` and ``count``) or "replayed".

    ``card`` is a slug of the catalogue, or a size such as "23.65gib", in lower case.
    """

    kind: str
    card: str | None = None
    count: int | None = None
    folder: str | None = None

    def __str__(self) -> str:
        if self.kind == "simulated":
            return f"sim:{self.card}:{self.count}"
        return f"replay:{self.folder}" if self.kind == "replayed" else "auto"


def parse_rig(text: str) -> RigChoice:
    """``"auto"``, ``"sim:h200:8"``, ``"replay:DIR"`` → RigChoice. Raises ValueError that names the forms."""
    if text == "auto":
        return RigChoice("real")
    match = _SIMULATED.fullmatch(text)
    if match is not None:
        count = int(match[2])
        if not 1 <= count <= MOST_GPUS:
            raise ValueError(f"{text}: a rig with {count} GPUs cannot be simulated; n is 1 to {MOST_GPUS}")
        return RigChoice("simulated", card=match[1].lower(), count=count)
    if text.startswith("replay:") and text != "replay:":
        return RigChoice("replayed", folder=text.removeprefix("replay:"))
    raise ValueError(f"{text!r} is no rig: write {RIG_FORMS}")


def parse_stack(text: str) -> tuple[str, str]:
    """``"new=/opt/new/bin/python"`` → ("new", "/opt/new/bin/python"). Raises ValueError that names the forms."""
    name, separator, python = text.partition("=")
    if not separator or not name.strip() or not python.strip():
        raise ValueError(f"{text!r} is no stack: write {STACK_FORMS}")
    return name.strip(), python.strip()
