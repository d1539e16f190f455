"""What a stand-in's log says that it has no rule for. Reads the head of one log; never judges."""

from __future__ import annotations

from .effects import NO_RULE

#: The stand-in says it before anything else.
_HEAD = 1 << 18


def unknown_in(log: str | None) -> tuple[str, ...]:
    """The settings without a rule, in the order in which they were told; empty for no log."""
    if log is None:
        return ()
    try:
        with open(log, encoding="utf-8", errors="replace") as file:
            lines = file.read(_HEAD).splitlines()
    except OSError:
        return ()
    return tuple(line.removeprefix(NO_RULE) for line in lines if line.startswith(NO_RULE))
