"""What one check found: figures, and what did not hold. A check that could not be made does not hold either."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from pytest_gpuguard.claims.units import GIB

MIB: Final = 1 << 20
#: What a clean GPU may have in use.
BASELINE: Final = GIB
#: The user's own settings of torch's allocator: with them it would not be the default one that is measured.
_ALLOCATOR: Final = frozenset(
    {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_LAUNCH_BLOCKING"}
)


@dataclass
class Findings:
    """Figures by name, and problems in one line each; ``headline`` is what is said when all is well."""

    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    headline: str = ""
    #: What is worth keeping of logs.
    log: str = ""

    def expect(self, holds: bool, otherwise: str) -> bool:
        """Note a problem unless something holds; returns whether it does."""
        if not holds:
            self.problems.append(otherwise)
        return holds

    @property
    def said(self) -> str:
        """The line of this check."""
        return "; ".join(self.problems) or self.headline


@dataclass(frozen=True)
class Result:
    """One check as the JSON file has it; ``seconds`` is what it took."""

    name: str
    ok: bool
    seconds: float
    said: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**asdict(self), "seconds": round(self.seconds, 2)}


@dataclass(frozen=True)
class Device:
    """The GPU that is checked, and where files may be made meanwhile. ``visible`` is for CUDA_VISIBLE_DEVICES."""

    uuid: str
    visible: str
    scratch: Path

    @property
    def env(self) -> dict[str, str]:
        """The environment of processes that use it, without settings that change how torch allocates."""
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": self.visible}
        ours = {name: value for name, value in os.environ.items() if name not in _ALLOCATOR}
        return {**ours, **order, "PYTHONUNBUFFERED": "1"}


def gib(nbytes: float) -> float:
    """Bytes as GiB, to a MiB."""
    return round(nbytes / GIB, 3)
