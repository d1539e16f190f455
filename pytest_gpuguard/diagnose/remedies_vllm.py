"""What would cure a vLLM boot that ran out of memory: the lengths and shares that its own messages imply, in GiB.

Like ``remedies`` it advises nothing that the numbers contradict.
"""

from __future__ import annotations

import re
from typing import Final

from ..claims.observation import LogReading, MemoryTable
from .allocation import Allocation, size
from .slack import STEP, up

_NEEDED: Final = re.compile(
    r"\((\d{1,6}(?:\.\d{1,6})?) ?Gi?B KV cache is needed"
    r".{0,80}available KV cache memory \((-?\d{1,6}(?:\.\d{1,6})?) ?G"
)
_LENGTH: Final = re.compile(
    r"estimated maximum model length is (\d{1,9})|tokens that can be stored in KV cache \((\d{1,9})\)"
)
#: No more of a card can be given: a process needs some of it for its CUDA context.
_MOST: Final = 0.99


def pool(reading: LogReading, text: str, known: Allocation) -> list[str]:
    """The KV cache has no room, or too little for one sequence of the longest length."""
    found: list[str] = []
    match = _LENGTH.search(text)
    if match is not None and int(match[1] or match[2]) > 0:
        found.append(f"--max-model-len {match[1] or match[2]} or less")
    needed = _NEEDED.search(text)
    available = reading.memory.kv_gib
    short = float(needed[1]) - float(needed[2]) if needed is not None else None
    if short is None and available is not None and available < 0:
        short = -available
    if short is not None and short > 0:
        found.append(_utilization(reading.memory, short))
    elif known.tried_gib is not None:
        missing = known.short_gib
        return later(reading, f"the KV cache was short by at least {size(missing)}" if missing else "")
    return [found[0], *(f"or {one}" for one in found[1:])] if found else []


def later(reading: LogReading, missing: str) -> list[str]:
    """Torch's allocator ran out of memory; ``missing`` says by how much, or is empty."""
    cures = ["a lower --gpu-memory-utilization"]
    if reading.outcome == "oom.graph_capture":
        cures = ["a smaller --max-num-seqs or fewer --cuda-graph-sizes", "a lower --gpu-memory-utilization"]
    return [f"{missing}: {cures[0]}" if missing else cures[0], *(f"or {one}" for one in cures[1:])]


def _utilization(memory: MemoryTable, more_gib: float) -> str:
    """What ``--gpu-memory-utilization`` would have to be for so much more KV cache."""
    current, total = memory.gpu_memory_utilization, memory.total_gib
    if current is None or total is None or total <= 0:
        return f"a higher --gpu-memory-utilization: {size(more_gib)} are missing"
    least = up(current + more_gib / total + STEP)
    if least >= _MOST:
        return f"no --gpu-memory-utilization helps: {size(more_gib)} more than at {current:.2f} is not on the card"
    return f"--gpu-memory-utilization of at least {least:.2f} ({size(more_gib)} are missing at {current:.2f})"
