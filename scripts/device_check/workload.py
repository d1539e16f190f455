"""What the checks let torch do, in processes of their own: fill a GPU, hold memory, make a spike, run out of it.

It is run as a file by the python that has torch, and imports nothing of ours. ``main`` says which mode there is.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

GIB = 1 << 30
#: Of this is allocated at a time; smaller pieces where less is left.
_PIECE = 8 * GIB
_LEAST = 2 << 20


def die_with_parent() -> None:
    """Be killed when whoever started us is gone: nothing of a check may outlive it. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def say(**said: Any) -> None:
    """One line of JSON to whoever started us."""
    print(json.dumps(said), flush=True)


def fill(torch: Any, leave: int) -> list[Any]:
    """Take memory until about ``leave`` bytes are free; returns what holds it."""
    held: list[Any] = []
    while True:
        free, _ = torch.cuda.mem_get_info()
        piece = min(_PIECE, free - leave)
        if piece < _LEAST:
            return held
        try:
            held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            return held  # the driver keeps more for itself than it says is free


# ------------------------------------------------------------------------------------- running out of memory, for real


def load_model(torch: Any) -> list[Any]:
    """As a loader does: one weight after the other, until there is no room."""
    weights = []
    while True:
        weights.append(torch.empty(_PIECE, dtype=torch.uint8, device="cuda"))
        print(f"loaded {len(weights)} tensors", flush=True)


def capture_graphs(torch: Any) -> None:
    """As a runner does after its pools: what a graph needs in its capture is not there any more."""
    held = fill(torch, GIB)
    print(f"pools take {len(held)} tensors", flush=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.empty(4 * GIB, dtype=torch.uint8, device="cuda").fill_(1)


def execute_model(torch: Any) -> None:
    """As a batch does that is too long: activations that grow from step to step."""
    activations: list[Any] = fill(torch, 4 * GIB)
    while True:
        activations.append(torch.ones(GIB // 4, dtype=torch.float32, device="cuda") * 2)


def run_out(where: str) -> None:
    """Load, capture or serve until memory runs out, which ends this process as it ends an engine."""
    import torch

    if where != "load":
        print("ready to serve", flush=True)
    {"load": load_model, "capture": capture_graphs, "run": execute_model}[where](torch)


# ------------------------------------------------------------------------------------------------------ told what to do


class Holder:
    """Does with GPU memory what it is told, one line of JSON at a time."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.cuda.init()
        torch.empty(1, dtype=torch.uint8, device="cuda").fill_(1)  # context and kernel are there now
        torch.cuda.synchronize()
        self._held: list[Any] = []

    def info(self) -> dict[str, Any]:
        """Free and total bytes as the CUDA driver says, and what torch's allocator took at most."""
        torch = self._torch
        free, total = torch.cuda.mem_get_info()
        return {
            "free": free,
            "total": total,
            "name": torch.cuda.get_device_name(0),
            "capability": list(torch.cuda.get_device_capability(0)),
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }

    def take(self, bytes: int) -> dict[str, Any]:
        """Allocate so much, or all but so much where it is negative, and write to it."""
        torch = self._torch
        if bytes < 0:
            self._held += fill(torch, -bytes)
        else:
            self._held.append(torch.empty(bytes, dtype=torch.uint8, device="cuda").fill_(1))
        torch.cuda.synchronize()
        return {"taken": sum(one.numel() for one in self._held)}

    def spike(self, bytes: int, seconds: float) -> dict[str, Any]:
        """Hold so much for so long, and give it back to the driver."""
        torch = self._torch
        began = time.monotonic()
        held = torch.empty(bytes, dtype=torch.uint8, device="cuda")
        had = time.monotonic()
        time.sleep(max(0.0, seconds))
        freeing = time.monotonic()
        del held
        torch.cuda.empty_cache()
        return {"held_s": freeing - had, "all_s": time.monotonic() - began}


def obey() -> None:
    """Orders on stdin, answers on stdout, until stdin ends."""
    holder = Holder()
    say(ready=True, pid=os.getpid(), **holder.info())
    for line in sys.stdin:
        order = json.loads(line)
        say(**getattr(holder, order.pop("do"))(**order))


def main(words: list[str]) -> None:
    """``obey``, or ``oom load|capture|run``."""
    die_with_parent()
    if words == ["obey"]:
        obey()
    elif words[:1] == ["oom"]:
        run_out(words[1])
    else:
        sys.exit(f"no such mode: {' '.join(words)}")


if __name__ == "__main__":
    main(sys.argv[1:])
