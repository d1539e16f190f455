"""Stands in for scripts/device_check/workload.py where there is no GPU: takes memory of the NVML stand-in's machine.

It shows that the checks run, and that they notice what is wrong; what torch and a driver do, it cannot show.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.standin import standin

MIB, GIB = 1 << 20, 1 << 30
CONTEXT = 512 * MIB

#: As torch prints it, with the frames of workload.py; {} is the function.
_OOM = """Traceback (most recent call last):
  File "/checkout/scripts/device_check/workload.py", line 171, in <module>
    main(sys.argv[1:])
  File "/checkout/scripts/device_check/workload.py", line 99, in run_out
    {{"load": load_model, "capture": capture_graphs, "run": execute_model}}[where](torch)
  File "/checkout/scripts/device_check/workload.py", line 66, in {}
    weights.append(torch.empty(_PIECE, dtype=torch.uint8, device="cuda"))
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 139.80 GiB
"""


class Holder:
    """As the real one, without torch. DEVICE_CHECK_LIES names what it gets wrong."""

    def __init__(self) -> None:
        self._rig = standin.open_rig(Path(os.environ["GPUGUARD_FAKE_RIG"]))
        self._gpu: Any = self._rig.gpu[int(os.environ["CUDA_VISIBLE_DEVICES"])]
        self._lies = os.environ.get("DEVICE_CHECK_LIES", "").split(",")
        self._slot = next(one for one in self._gpu.process if one.pid == 0)
        self._slot.start, self._slot.sticky = standin.start_time(os.getpid()), "sticky" in self._lies
        self._slot.bytes = CONTEXT if "context" not in self._lies else 0
        self._slot.pid = os.getpid()
        self._most = self._taken = 0

    def _free(self) -> int:
        alive = [one.bytes for one in self._gpu.process if one.pid == os.getpid()]
        return int(self._gpu.total - self._gpu.reserved - sum(alive))

    def info(self) -> dict[str, Any]:
        off = GIB if "total" in self._lies else 0
        free = self._free() - (GIB if "free" in self._lies else 0)
        sizes = {"free": free, "total": self._gpu.total - self._gpu.reserved - off}
        reserved = self._most + (GIB if "peak" in self._lies else 0)
        return {**sizes, "torch": "none", "cuda": None, "allocated": self._most, "reserved": reserved}

    def _grow(self, nbytes: int) -> None:
        self._taken += nbytes
        self._slot.bytes += nbytes if "unseen" not in self._lies else 0
        self._most = max(self._most, self._taken)

    def take(self, bytes: int) -> dict[str, Any]:
        self._grow(bytes if bytes >= 0 else self._free() + bytes)
        return {"taken": self._taken}

    def spike(self, bytes: int, seconds: float) -> dict[str, Any]:
        self._grow(bytes)
        time.sleep(seconds)
        self._grow(-bytes)
        return {"held_s": seconds, "all_s": 0.137 if "slow" in self._lies else seconds}


def main(words: list[str]) -> None:
    if words[0] == "oom":
        name = {"load": "load_model", "capture": "capture_graphs", "run": "execute_model"}[words[1]]
        print(_OOM.format(name), flush=True)
        sys.exit(1)
    holder = Holder()
    print(json.dumps({"ready": True, **holder.info()}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(holder, order.pop("do"))(**order)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
