"""Where a stack is to be found, before anything was asked of it."""

from __future__ import annotations

from dataclasses import dataclass

from ..names import is_container
from .choice import SIMULATED


@dataclass(frozen=True, slots=True)
class StackRef:
    """A stack's name and its python. ``build`` is the command that makes it, told when the python is absent.

    ``python`` may be an image, such as "docker:lmsysorg/sglang:v0.5.9-cu130", or a simulated stack, such as
    "sim:sglang==0.5.7", which a simulated rig alone can run.
    """

    name: str
    python: str
    build: str | None = None
    explicit: bool = True

    @property
    def simulated(self) -> bool:
        """Whether this is a simulated stack."""
        return self.python.startswith(SIMULATED)

    @property
    def container(self) -> bool:
        """Whether this is an image."""
        return is_container(self.python)
