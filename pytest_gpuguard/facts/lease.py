"""What one boot may use, as a value: engines see this, and never the locks behind it.

The live handles (descriptors, wardens) stay in ``lease``. This module never opens a file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass


class UnsupportedPlatform(RuntimeError):
    """Something was asked of an operating system that cannot do it."""


def require_linux(what: str) -> None:
    """Raise UnsupportedPlatform, naming ``what`` cannot be done, anywhere but on Linux."""
    if sys.platform != "linux":
        raise UnsupportedPlatform(
            f"Linux only: {what} needs Linux's process and lock facilities, and this is {sys.platform}. "
            "Everything that needs no server works here; run claims that boot one on a Linux machine."
        )


@dataclass(frozen=True, slots=True)
class PortRange:
    """``size`` consecutive TCP ports from ``base`` on. The server listens on ``base``, its helpers above it."""

    base: int
    size: int

    def __contains__(self, port: object) -> bool:
        return isinstance(port, int) and self.base <= port < self.base + self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.base, self.base + self.size))

    def __len__(self) -> int:
        return self.size

    def __str__(self) -> str:
        return f"{self.base}-{self.base + self.size - 1}"


@dataclass(frozen=True, slots=True)
class Lease:
    """GPUs and ports reserved for one boot.

    ``uuids`` and ``indices`` (PCI bus order, as CUDA_VISIBLE_DEVICES with CUDA_DEVICE_ORDER=PCI_BUS_ID wants them) are
    parallel; both are empty for a boot on the CPU. ``host`` is the machine, ``test`` the pytest node id. ``visible``
    goes into CUDA_VISIBLE_DEVICES in place of the indices, when a MIG device is leased.
    """

    uuids: tuple[str, ...]
    indices: tuple[int, ...]
    ports: PortRange
    host: str
    test: str
    visible: tuple[str, ...] = ()

    @property
    def cuda_visible_devices(self) -> str:
        """What CUDA_VISIBLE_DEVICES is set to, under CUDA_DEVICE_ORDER=PCI_BUS_ID; "" for a boot on the CPU."""
        return ",".join(self.visible or map(str, self.indices))
