"""The cards of a boot as the predictor and the gates see them: one box of equal GPUs, linked or not. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..facts.gpu import Rig
from ..predict import boxes
from ..predict.values import Box


def box_of(rig: Rig, gpus: Sequence[int]) -> Box:
    """The cards that a boot may use, by their indices, as the predictor takes them."""
    return boxes.box_of(rig, _uuids(rig, gpus))[0]


def linked(rig: Rig, gpus: Sequence[int]) -> bool:
    """Whether every pair of these GPUs has NVLink."""
    return boxes.linked(rig, _uuids(rig, gpus))


def _uuids(rig: Rig, gpus: Sequence[int]) -> list[str]:
    return [rig.gpus[index].uuid for index in gpus]
