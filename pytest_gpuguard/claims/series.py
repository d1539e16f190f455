"""What was measured of a rate under one load, as frozen values: samples, what was not counted and why, a baseline.

Rates are output tokens per second, or a ratio of two such rates. Nothing here decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Baseline:
    """What was verified first on these GPUs: ``rate``, in the unit of the samples, and when (epoch, seconds)."""

    rate: float
    when: float


@dataclass(frozen=True, slots=True)
class Series:
    """The samples of one load, in the order in which they were taken.

    ``rejected`` says of each sample that was not counted why; ``failed`` of each run in which a request failed what it
    failed with, and ``ours`` what kept the meter itself from measuring. ``doubts`` are things to know about the
    figures. ``latencies`` are medians over the samples, in seconds: ``ttft``, ``itl``, ``e2e``.
    """

    samples: tuple[float, ...] = ()
    rejected: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    ours: str | None = None
    doubts: tuple[str, ...] = ()
    latencies: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    baseline: Baseline | None = None
    #: The meter was short of CPU: the true rate may be higher. In a comparison, of either server.
    understated: bool = False
    others_understated: bool = False
    #: Why nothing was measured although it was claimed: the kind of an unmet need, and the words.
    unmet: tuple[str, str] | None = None
    #: How the two servers of a comparison ran: "both up at once", "one after the other".
    how: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """With stable keys, for JSON."""
        return {
            "samples": list(self.samples),
            "rejected": list(self.rejected),
            "failed": list(self.failed),
            "ours": self.ours,
            "doubts": list(self.doubts),
            "understated": self.understated or self.others_understated,
            "latencies_s": dict(self.latencies),
            "baseline": {"rate": self.baseline.rate, "when": self.baseline.when} if self.baseline else None,
            "unmet": self.unmet[1] if self.unmet is not None else None,
            "how": self.how,
        }
