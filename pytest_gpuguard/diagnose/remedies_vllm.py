"""What would cure a vLLM boot that ran out of memory: the lengths and shares that its own messages imply, in GiB.

Like ``remedies`` it advises nothing that the numbers contradict.
"""

from __future__ import annotations

import re
from typing import Final

from ..claims.observation import LogReading, MemoryTable
from .allocation import Allocation, size
from .slack import STEP, down, up

_NEEDED: Final = re.compile(
    r"\((\d{1,6}(?:\.\d{1,6})?) ?Gi?B KV cache is needed"
    r".{0,80}available KV cache memory \((-?\d{1,6}(?:\.\d{1,6})?) ?G"
)
_LENGTH: Final = re.compile(
    r"estimated maximum model length is (\d{1,9})|tokens that can be stored in KV cache \((\d{1,9})\)"
)
#: Both lengths in one message: what one sequence needs, and what there is.
_TOO_FEW: Final = re.compile(r"max seq len \((\d{1,9})\).{0,80}stored in KV cache \((\d{1,9})\)")
_NOT_FREE: Final = re.compile(
    r"Free memory on device [\w:]{0,12} {0,2}\((\d{1,6}(?:\.\d{1,6})?)/(\d{1,6}(?:\.\d{1,6})?) ?GiB\)"
)
#: What a process itself takes of a GPU before anything is loaded.
_OWN_GIB: Final = 1.0
#: No more of a card can be given: a process needs some of it for its CUDA context.
_MOST: Final = 0.99


def pool(reading: LogReading, text: str, known: Allocation, share: float | None = None) -> list[str]:
    """The KV cache has no room, or too little for one sequence of the longest length.

    ``share`` is the present ``--gpu-memory-utilization``, where the log's own numbers do not hold it.
    """
    found: list[str] = []
    match = _LENGTH.search(text)
    if match is not None and int(match[1] or match[2]) > 0:
        found.append(f"--max-model-len {match[1] or match[2]} or less")
    needed = _NEEDED.search(text)
    available = reading.memory.kv_gib
    short = float(needed[1]) - float(needed[2]) if needed is not None else None
    if short is None and available is not None and available < 0:
        short = -available
    few = _TOO_FEW.search(text)
    if short is None and few is not None and available is not None and available > 0 and int(few[2]) > 0:
        short = available * (int(few[1]) / int(few[2]) - 1)
    if short is not None and short > 0:
        found.append(_utilization(reading.memory, known, share, short))
    elif known.tried_gib is not None:
        missing = known.short_gib
        return later(reading, f"the KV cache was short by at least {size(missing)}" if missing else "")
    return [found[0], *(f"or {one}" for one in found[1:])] if found else []


def later(reading: LogReading, missing: str) -> list[str]:
    """Torch's allocator ran out of memory; ``missing`` says by how much, or is empty."""
    cures = ["a lower --gpu-memory-utilization"]
    if reading.outcome == "oom.runtime" and not _has_pool(reading):
        # A profiling run takes what it takes at any utilization, which only decides what is left to the KV cache.
        cures = ["a smaller --max-num-batched-tokens or --max-num-seqs"]
    elif reading.outcome == "oom.graph_capture":
        cures = ["a smaller --max-num-seqs or fewer --cuda-graph-sizes", "a lower --gpu-memory-utilization"]
    return [f"{missing}: {cures[0]}" if missing else cures[0], *(f"or {one}" for one in cures[1:])]


def not_free(text: str) -> list[str]:
    """The card has less free memory than vLLM was to take."""
    match = _NOT_FREE.search(text)
    if match is None:
        return []
    free, total = float(match[1]), float(match[2])
    if not 0 <= free < total:
        return []
    said = f"{match[1]} of {match[2]} GiB are free"
    most = down(free / total)
    share = f"--gpu-memory-utilization of at most {most:.2f}" if most > 0 else ""
    if total - free > _OWN_GIB:
        return [f"{said}: something else holds {size(total - free)}", *([f"or {share}"] if share else [])]
    return [f"{said}: {share}"] if share else []


def _has_pool(reading: LogReading) -> bool:
    """Whether the KV cache was there when memory ran out."""
    memory = reading.memory
    there = memory.kv_tokens is not None or (memory.kv_gib is not None and memory.kv_gib > 0)
    return there or reading.ready_line or reading.phase in ("graph_capture", "ready", "serving")


def _utilization(memory: MemoryTable, known: Allocation, share: float | None, more_gib: float) -> str:
    """What ``--gpu-memory-utilization`` would have to be for so much more KV cache."""
    current = memory.gpu_memory_utilization if memory.gpu_memory_utilization is not None else share
    total = memory.total_gib if memory.total_gib is not None else known.total_gib
    if current is None or total is None or total <= 0:
        now = f" than {current:g}" if current is not None else ""
        return f"a higher --gpu-memory-utilization{now}: {size(more_gib)} are missing"
    least = up(current + more_gib / total + STEP)
    if least >= _MOST:
        return f"no --gpu-memory-utilization helps: {size(more_gib)} more than at {current:.2f} is not on the card"
    return f"--gpu-memory-utilization of at least {least:.2f} ({size(more_gib)} are missing at {current:.2f})"
