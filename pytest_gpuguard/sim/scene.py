"""The cards of a boot as the predictor and the gates see them: one box of equal GPUs, linked or not. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..facts.catalogue import MIB
from ..facts.gpu import Rig
from ..predict.values import Box


def box_of(rig: Rig, gpus: Sequence[int]) -> Box:
    """The cards that a boot may use, as the predictor takes them."""
    chosen = [rig.gpus[index] for index in gpus]
    card = chosen[0]
    reserved = card.memory.reserved
    return Box(
        name=card.name,
        count=len(chosen),
        total_mib=(card.memory.total or 0) / MIB,
        reserved_mib=None if reserved is None else reserved / MIB,
        sm=card.sm or None,
        nvlink=linked(rig, gpus),
    )


def linked(rig: Rig, gpus: Sequence[int]) -> bool:
    """Whether every pair of these GPUs has NVLink."""
    uuids = [rig.gpus[index].uuid for index in gpus]
    return len(uuids) > 1 and all(rig.nvlink.get((a, b), 0) > 0 for a in uuids for b in uuids if a != b)
