"""Named slots of one host: at most one holder at a time, whichever process or user asks.

A boot with ``--device cpu`` takes the slot ``CPU_SERVER``, so that ``-n 2`` never starts two big servers at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from .flocks import HeldLocks, Locks, OnWait, wait_for

CPU_SERVER: Final = "cpu-server"


class SlotLease(HeldLocks):
    """A slot that is ours."""

    def __init__(self, name: str, fd: int) -> None:
        super().__init__([fd])
        self.name = name


def lease_slot(
    name: str = CPU_SERVER,
    wait_s: float = 0.0,
    on_wait: OnWait | None = None,
    *,
    test: str = "",
    directory: Path | None = None,
    check: Callable[[], None] = lambda: None,
) -> SlotLease:
    """Take the slot, waiting at most ``wait_s`` seconds; ``on_wait`` and ``check`` as in ``lease_gpus``.

    Raises LeaseTimeout, which names the holder; ValueError for a name that is no plain word; LockDirError;
    UnsupportedPlatform.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"{name!r} is not a slot name: use letters, digits, '.', '_' and '-'")
    locks = Locks(test, directory)
    file = f"slot-{name}"

    def take() -> SlotLease | None:
        check()
        fd = locks.attempt(file)
        return None if fd is None else SlotLease(name, fd)

    return wait_for(take, f"The slot {name!r}", lambda: locks.holders([file]), wait_s, on_wait)
