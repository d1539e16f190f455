"""Whether leased GPUs are clean: drivers give memory back some time after the process that had it is gone.

It never asks NVML itself: the readers are passed in, so that a reading can hang, fail or be simulated elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ..facts.faults import HostFault, NvmlTimeout
from ..facts.holders import describe_dirty, host_pids
from .pids import is_there
from .warden import read_proc

GIB: Final = 1 << 30
_UNASKED: Final = "the driver could not be asked by whom"

Reading = int | None | HostFault
ReadMemory = Callable[[Sequence[str]], Mapping[str, Reading]]
Processes = Sequence[tuple[int, int | None]]
ReadProcesses = Callable[[Sequence[str]], Mapping[str, Processes]]


@dataclass(frozen=True, slots=True)
class Dirt:
    """A GPU that is not clean: ``used`` bytes (None: not known), or the fault that it answers with.

    ``processes`` is None where the driver could not be asked who has the memory: that is not nobody.
    """

    uuid: str
    used: int | None
    fault: HostFault | None = None
    processes: tuple[tuple[int, int | None], ...] | None = ()

    def __str__(self) -> str:
        if self.fault is not None:
            return f"{self.uuid}: {self.fault}"
        told = describe_dirty(self.uuid, self.used, list(self.processes or ()))
        return told if self.processes is not None else f"{told.partition(' in use: ')[0]} in use: {_UNASKED}"

    @property
    def hangs(self) -> bool:
        """Whether it only did not answer in time: it may the next time, unlike one that is lost."""
        return isinstance(self.fault, NvmlTimeout)

    def strangers(self, ours: Mapping[int, int] = MappingProxyType({}), *, doubt: bool = True) -> bool:
        """Whether somebody else may have the memory: a living process that is none of ``ours`` (pid → start time).

        In a container NVML names pids of the host, or none: nobody can be told apart there, and the answer is
        ``doubt``, as it is where the driver could not be asked.
        """
        if not host_pids() or self.processes is None:
            return doubt
        return any(_is_strange(pid, ours) for pid, _ in self.processes)


def _is_strange(pid: int, ours: Mapping[int, int]) -> bool:
    """Whether a process lives and is none of ``ours``: those are always shown to us."""
    one = read_proc(pid)
    if one is None:
        return is_there(pid)
    return not one.dead and ours.get(pid) != one.start


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

        A lost GPU is not waited for: it does not come back by itself. One that only did not answer in time is asked
        again: drivers are slow while they take down a process that had much memory.
        """
        deadline = time.monotonic() + (self.reclaim_s if seconds is None else seconds)
        while True:
            found = self.read(uuids) if uuids else {}
            faults = {uuid: one for uuid, one in found.items() if isinstance(one, HostFault)}
            dirty = [uuid for uuid in uuids if uuid in faults or not self._is_clean(found, uuid)]
            final = {uuid for uuid, fault in faults.items() if not isinstance(fault, NvmlTimeout)}
            left = deadline - time.monotonic()
            if set(dirty) <= final or left <= 0:
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

    def _named(self, uuids: Sequence[str]) -> dict[str, tuple[tuple[int, int | None], ...] | None]:
        """Who has memory on each, or None: each is asked apart, so that one that fails hides nothing of the others."""
        named: dict[str, tuple[tuple[int, int | None], ...] | None] = {}
        for uuid in uuids:
            try:
                named[uuid] = tuple(self.processes([uuid])[uuid])
            except HostFault:
                named[uuid] = None
        return named
