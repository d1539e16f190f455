"""The local GPU lease: all of the wanted GPUs or none, one flock per UUID, gathered by one process at a time.

It must never hold a GPU while it waits for another (that deadlocks), and never let small leases starve a big one:
whoever waits stands in the door, and others pass it only with GPUs that the one in the door does not want.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .flocks import HeldLocks, Holder, Locks, OnWait, wait_for

DOOR: Final = "gpu-door"
#: Even who does not want to wait waits so long: another one may be in the door for the millisecond that it needs.
DOOR_PATIENCE_S: Final = 0.5


class GpuLease(HeldLocks):
    """GPUs reserved on this host, in the caller's order of preference."""

    def __init__(self, locks: dict[str, int]) -> None:
        super().__init__(locks.values())
        self.uuids = tuple(locks)


def lease_gpus(
    candidates: Sequence[str],
    n: int,
    wait_s: float = 0.0,
    on_wait: OnWait | None = None,
    *,
    test: str = "",
    directory: Path | None = None,
) -> GpuLease:
    """Reserve the first ``n`` free ones of the candidate UUIDs, waiting at most ``wait_s`` seconds.

    ``on_wait(holders, waited_s)`` is called at the first wait and every 30 s; a holder named ``gpu-door`` waits before
    us. Whether the GPUs are *clean* is another question: see ``clean.wait_until_clean``. Raises LeaseTimeout, which
    names the holders; ValueError when there are fewer candidates than wanted; LockDirError; UnsupportedPlatform.
    """
    wanted = list(dict.fromkeys(candidates))
    if not 0 < n <= len(wanted):
        raise ValueError(f"{n} of {len(wanted)} candidate GPUs cannot be leased")
    locks = Locks(test, directory)
    names = {uuid: _lock_name(uuid) for uuid in wanted}
    door = HeldLocks()

    def gather() -> GpuLease | None:
        if door.released:
            fd = locks.attempt(DOOR, candidates=wanted)
            if fd is not None:
                door.add(fd)
            elif not set(wanted).isdisjoint(locks.record(DOOR).get("candidates", wanted)):
                return None
        got = locks.attempt_all(list(names.values()), n)
        return GpuLease({uuid: got[name] for uuid, name in names.items() if name in got}) if got else None

    def in_the_way() -> Sequence[Holder]:
        return locks.holders([*names.values(), DOOR] if door.released else names.values())

    what = f"{n} GPU(s) of {', '.join(wanted)}"
    with door:
        return wait_for(gather, what, in_the_way, max(wait_s, DOOR_PATIENCE_S), on_wait)


def _lock_name(uuid: str) -> str:
    return "gpu-" + re.sub(r"[^A-Za-z0-9._-]", "_", uuid)
