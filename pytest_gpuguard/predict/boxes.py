"""The cards of a rig as the predictor takes them: equal ones, or as many as there are of the smallest.

Reads values only; no device is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..facts.gpu import Gpu, Rig
from .values import Box, PredictError

_MIB = 1 << 20


def box_of(rig: Rig, uuids: Iterable[str] | None = None) -> tuple[Box, tuple[str, ...]]:
    """The box of a rig's usable GPUs, or of these; and what had to be assumed. Raises PredictError without GPUs.

    Where cards differ the smallest counts, because an engine's budget is that of its poorest rank.
    """
    cards = [gpu for gpu in rig.usable if gpu.memory.total] if uuids is None else [rig.gpu(uuid) for uuid in uuids]
    if not cards:
        raise PredictError(
            f"this rig has {_nothing(rig)}, so nothing can be predicted for it; name another one, such as "
            "--rig sim:rtx-pro-6000-server:8"
        )
    least = min(cards, key=lambda gpu: gpu.memory.total or 0)
    # Only NVML's v2 numbers tell what the driver keeps; the older "used" has it inside.
    reserved = least.memory.reserved if least.memory.version == 2 else None
    box = Box(
        name=least.name,
        count=len(cards),
        total_mib=(least.memory.total or 0) / _MIB,
        reserved_mib=None if reserved is None else reserved / _MIB,
        sm=least.sm or None,
        nvlink=linked(rig, [gpu.uuid for gpu in cards]),
    )
    return box, tuple(_notes(rig, cards, least))


def _nothing(rig: Rig) -> str:
    if rig.faults:
        return f"no usable GPUs ({'; '.join(fault.cause for fault in rig.faults)})"
    return f"no GPUs ({rig.reason})" if rig.reason else "no GPUs"


def _notes(rig: Rig, cards: list[Gpu], least: Gpu) -> Iterable[str]:
    kinds = {(gpu.name, gpu.memory.total) for gpu in cards}
    if len(kinds) > 1:
        yield f"the {len(cards)} cards are not equal: all are counted as the smallest, {least.name}"
    broken = len(rig.gpus) - len(rig.usable)
    if broken:
        yield f"{broken} of {len(rig.gpus)} GPUs are broken and left out"


def linked(rig: Rig, uuids: Sequence[str]) -> bool:
    """Whether every pair of these GPUs has NVLink; False for a single one."""
    pairs = [(one, other) for one in uuids for other in uuids if one != other]
    return bool(pairs) and all(rig.nvlink.get(pair, 0) > 0 for pair in pairs)
