"""What is free on a card before the weights: its size without what the driver, CUDA and the communicators take.

Pure. Measured on boots of real people, where a log printed it ("Load weight begin. avail mem"); never a card's size.
"""

from __future__ import annotations

from typing import Final

from .values import Box

#: A CUDA context with torch's modules: 0.70 to 0.75 GiB on H100, RTX PRO 6000 and MI355X (one rank).
CONTEXT_GIB: Final = 0.72
#: A smaller card runs a smaller context: it is mostly one stack for each multiprocessor.
_SMALL_GIB: Final = 40.0
_SMALL_CONTEXT_GIB: Final = 0.5
#: Buffers of the communicators for each further rank: over PCIe 0.2 GiB with eight ranks (two boots, 0.89 and 0.98
#: GiB below torch's total), over NVLink 0.8 and 1.2 GiB with eight (H20, H200), 2.3 with four on B200 (multicast),
#: over AMD's links 3.7 with eight (MI355X).
_PCIE_GIB: Final = 0.03
_NVLINK_GIB: Final = 0.14
_MULTICAST_GIB: Final = 0.55
_XGMI_GIB: Final = 0.5


def reserve_mib(box: Box) -> float:
    """MiB that the driver keeps: as recorded, else by the sizes that were recorded (479 of 81559 … 726 of 183359)."""
    if box.reserved_mib is not None:
        return box.reserved_mib
    return 0.0 if box.sm is None else 400 + 0.0018 * box.total_mib


def available_before_gib(box: Box, ranks: int) -> float:
    """GiB free on the fullest rank before the weights, with ``ranks`` in the world."""
    total = box.torch_gib
    context = CONTEXT_GIB if total > _SMALL_GIB else _SMALL_CONTEXT_GIB
    return total - context - _each_gib(box) * (ranks - 1)


def _each_gib(box: Box) -> float:
    if box.amd:  # large cards of AMD are joined all to all
        return _XGMI_GIB if box.torch_gib > _SMALL_GIB else _PCIE_GIB
    if not box.nvlink:
        return _PCIE_GIB
    return _MULTICAST_GIB if box.sm in ("100", "103") else _NVLINK_GIB
