"""Whether a process is there that /proc does not show: with ``hidepid`` it shows nobody else's."""

from __future__ import annotations

import os


def is_there(pid: int) -> bool:
    """Whether a process of this number is there, whoever's it is. It is not signalled, and may wait to be reaped."""
    if pid <= 0:  # that would mean groups of processes
        return False
    try:
        os.kill(pid, 0)  # no signal, only the kernel's answer
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
