"""What the claims of test_hopper_memory.py run on a GPU, by the python of the stack: torch, and no engine.

``load``, ``capture`` and ``run`` use memory up in code that looks like an engine's; ``hold GIB`` takes so much and
waits; ``facts`` prints what CUDA says of the card, and waits.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

GIB = 1 << 30


def take(torch: Any, nbytes: int) -> Any:
    """So many bytes of the GPU."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def fill(torch: Any, leave: int) -> list[Any]:
    """Nearly all of the GPU, but for about so many bytes."""
    held = []
    while (free := torch.cuda.mem_get_info()[0]) > leave + (2 << 20):
        held.append(take(torch, min(8 * GIB, free - leave)))
    return held


def load_model(torch: Any) -> None:
    """One weight after the other."""
    weights = []
    while True:
        weights.append(take(torch, 8 * GIB))


def capture_graphs(torch: Any) -> None:
    """What a graph needs is not there any more."""
    pools = fill(torch, GIB)
    print(f"{len(pools)} pools", flush=True)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        take(torch, 4 * GIB)


def execute_model(torch: Any) -> None:
    """A batch whose activations grow."""
    activations = fill(torch, 2 * GIB)
    while True:
        activations.append(take(torch, GIB))


def main(words: list[str]) -> None:
    """See above."""
    import torch

    if words[0] in ("hold", "facts"):
        held = take(torch, int(float(words[1]) * GIB)) if words[0] == "hold" else None
        free, total = torch.cuda.mem_get_info()
        facts = {"free": free, "total": total, "capability": torch.cuda.get_device_capability(0)}
        print(f"facts: {json.dumps(facts)}", flush=True)
        print(f"up, with {0 if held is None else held.numel()} bytes", flush=True)
        time.sleep(3600)
    else:
        {"load": load_model, "capture": capture_graphs, "run": execute_model}[words[0]](torch)


if __name__ == "__main__":
    main(sys.argv[1:])
