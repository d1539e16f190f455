"""Where a stack is to be found, before anything was asked of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StackRef:
    """A stack's name and its python. ``build`` is the command that makes it, told when the python is absent."""

    name: str
    python: str
    build: str | None = None
    explicit: bool = True
