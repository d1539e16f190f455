"""Whether leased GPUs are clean: drivers give memory back some time after the process that had it is gone.

It never asks NVML itself: the readers are passed in, so that a reading can hang, fail or be simulated elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ..facts.faults import HostFault
from ..facts.holders import describe_dirty, host_pids
from .warden import read_proc

GIB: Final = 1 << 30

Reading = int | None | HostFault
ReadMemory = Callable[[Sequence[str]], Mapping[str, Reading]]
ReadProcesses = Callable[[Sequence[str]], Mapping[str, list[tuple[int, int | None]]]]


@dataclass(frozen=True, slots=True)
class Dirt:
    """A GPU that is not clean: ``used`` bytes (None: not known), or the fault that it answers with."""

    uuid: str
    used: int | None
    fault: HostFault | None = None
    processes: tuple[tuple[int, int | None], ...] = ()

    def __str__(self) -> str:
        if self.fault is not None:
            return f"{self.uuid}: {self.fault}"
        return describe_dirty(self.uuid, self.used, list(self.processes))

    def strangers(self, ours: Mapping[int, int] = MappingProxyType({}), *, doubt: bool = True) -> bool:
        """Whether somebody else may have the memory: a living process that is none of ``ours`` (pid → start time).

        In a container NVML names pids of the host, or none: nobody can be told apart there, and the answer is
        ``doubt``.
        """
        if not host_pids():
            return doubt
        there = (read_proc(pid) for pid, _ in self.processes)
        return any(one is not None and not one.dead and ours.get(one.pid) != one.start for one in there)


@dataclass(frozen=True, slots=True)
class CleanRoom:
    """How GPUs are looked at. ``read`` gives used bytes (NVML v2), None where a device has no such reading, or a fault.

    ``baseline_bytes`` is what a clean GPU may show; ``reclaim_s`` how long the driver may take to give memory back.
    A GPU whose reading is None passes for clean (unified memory has none).
    """

    read: ReadMemory
    processes: ReadProcesses
    baseline_bytes: int = GIB
    reclaim_s: float = 180.0
    poll_s: float = 0.5

    def look(self, uuids: Sequence[str]) -> list[Dirt]:
        """The ones that are not clean now."""
        return self.wait(uuids, 0.0)

    def wait(self, uuids: Sequence[str], seconds: float | None = None) -> list[Dirt]:
        """The ones that are still not clean after at most ``seconds`` (default: ``reclaim_s``).

        A fault is not waited for: a GPU that does not answer does not come back by itself.
        """
        deadline = time.monotonic() + (self.reclaim_s if seconds is None else seconds)
        while True:
            found = self.read(uuids) if uuids else {}
            faults = {uuid: one for uuid, one in found.items() if isinstance(one, HostFault)}
            dirty = [uuid for uuid in uuids if uuid in faults or not self._is_clean(found, uuid)]
            left = deadline - time.monotonic()
            if set(dirty) <= set(faults) or left <= 0:
                break
            time.sleep(min(self.poll_s, left))
        named = self._named([uuid for uuid in dirty if uuid not in faults])
        return [
            Dirt(uuid, None if uuid in faults else self._bytes(found, uuid), faults.get(uuid), named.get(uuid, ()))
            for uuid in dirty
        ]

    def _is_clean(self, found: Mapping[str, Reading], uuid: str) -> bool:
        used = self._bytes(found, uuid)
        return uuid in found and (used is None or used <= self.baseline_bytes)

    @staticmethod
    def _bytes(found: Mapping[str, Reading], uuid: str) -> int | None:
        used = found.get(uuid)
        return used if isinstance(used, int) else None

    def _named(self, uuids: Sequence[str]) -> dict[str, tuple[tuple[int, int | None], ...]]:
        try:
            return {uuid: tuple(found) for uuid, found in self.processes(uuids).items()} if uuids else {}
        except HostFault:
            return {}  # lost since it was read: the next look says so
