"""One of two who want the same GPU: leases it through our code, has torch fill it, gives it back; tells each step.

It is run as a module. Like pytest it never makes a CUDA context itself; its worker inherits the lock, as servers do.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_gpuguard.claims.gpuset import GpuChoice
from pytest_gpuguard.facts.faults import HostFault
from pytest_gpuguard.facts.nvml import NvmlChild
from pytest_gpuguard.lease.clean import CleanRoom
from pytest_gpuguard.lease.cleanroom import hand_out, take_back
from pytest_gpuguard.lease.warden import read_proc

from .result import Device
from .work import Worker
from .workload import die_with_parent


def main(words: Sequence[str]) -> None:
    """``uuid visible rounds bytes hold_s``: so many leases, each with so many bytes for so long."""
    die_with_parent()
    uuid, visible, rounds, size, hold_s = words[0], words[1], int(words[2]), int(words[3]), float(words[4])
    device = Device(uuid, visible, Path())

    def say(event: str, **more: Any) -> None:
        print(json.dumps({"event": event, "at": time.monotonic(), **more}), flush=True)

    with NvmlChild() as child:

        def used(uuids: Sequence[str]) -> dict[str, int | HostFault | None]:
            return {one: memory.used for one, memory in child.memory(uuids).items()}

        room = CleanRoom(used, child.processes, reclaim_s=60.0, poll_s=0.02)
        for _ in range(rounds):
            lease = hand_out(GpuChoice((uuid,)), 1, room, 90.0, test=f"device-check {size}")
            say("leased", used=used([uuid])[uuid])
            with Worker(device.env, pass_fds=tuple(lease.fds)) as worker:
                mine = read_proc(worker.pid)
                worker.do("take", bytes=size)
                say("taken", used=used([uuid])[uuid])
                time.sleep(hold_s)
                say("ending")
            gone = time.monotonic()  # before the lock is: whoever waits may have it before take_back returns
            ours = {mine.pid: mine.start} if mine is not None else {}
            leak = take_back(lease, room, "after the check", ours=ours)
            say("given_back", at=gone, leak=leak)


if __name__ == "__main__":
    main(sys.argv[1:])
