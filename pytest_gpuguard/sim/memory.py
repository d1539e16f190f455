"""The memory of simulated GPUs: each boot notes in a file what it uses, and what a dead process used is free.

One folder belongs to one run. It never says anything of real GPUs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..facts.gpu import GpuMemory, Rig
from ..files import write_json
from ..lease.warden import read_proc


def note(folder: Path, used: Mapping[str, int]) -> None:
    """Note what this process uses of each GPU, in bytes by UUID; replaces what it noted before."""
    proc = read_proc(os.getpid())
    said = {"pid": os.getpid(), "start": proc.start if proc is not None else None, "used": dict(used)}
    write_json(folder / f"{os.getpid()}.json", said)


class SimulatedGpus:
    """What NVML's child process is for real GPUs: who uses how much of the GPUs of a simulated rig, now."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self._rig = rig
        self._folder = folder

    def memory(self, uuids: Iterable[str]) -> dict[str, GpuMemory]:
        """Memory of GPUs, now, in bytes."""
        found = {}
        boots = list(self._boots())
        for uuid in uuids:
            whole = self._rig.gpu(uuid).memory
            used = sum(one["used"].get(uuid, 0) for one in boots)
            room = (whole.total or 0) - (whole.reserved or 0)
            found[uuid] = GpuMemory(whole.total, used, max(0, room - used), whole.reserved, whole.version)
        return found

    def processes(self, uuids: Iterable[str]) -> dict[str, list[tuple[int, int | None]]]:
        """Who holds each GPU: (pid, bytes)."""
        boots = list(self._boots())
        return {uuid: [(one["pid"], one["used"][uuid]) for one in boots if one["used"].get(uuid)] for uuid in uuids}

    def _boots(self) -> Iterable[dict[str, Any]]:
        for file in sorted(self._folder.glob("*.json")):
            try:
                said = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            proc = read_proc(said["pid"])
            if proc is not None and not proc.dead and said["start"] in (None, proc.start):
                yield said
