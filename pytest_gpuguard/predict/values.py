"""What a prediction is made of and what it says. Frozen values; all sizes in GiB unless a name says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ..claims.layout import Layout


class PredictError(ValueError):
    """Input that no prediction can be made from; the message names the cause and the cure."""


@dataclass(frozen=True, slots=True)
class Box:
    """Equal cards of one machine: ``total_mib`` is NVML's total, ``reserved_mib`` what the driver keeps of it.

    ``sm`` is "120", or None for a card that has no such number (AMD) and for a mere size; ``nvlink``: every pair is
    linked.
    """

    name: str
    count: int
    total_mib: float
    reserved_mib: float | None = None
    sm: str | None = None
    nvlink: bool = False

    @property
    def size_only(self) -> bool:
        """Whether nothing is known of the card but its size: the name that a rig gives to one."""
        return self.sm is None and self.name.startswith("a card of ")

    @property
    def amd(self) -> bool:
        """Whether it is a card of AMD's."""
        return self.sm is None and not self.size_only

    @property
    def torch_gib(self) -> float:
        """What torch calls the card's total: NVML's total without the driver's reserve."""
        from .free_memory import reserve_mib

        return (self.total_mib - reserve_mib(self)) / 1024


@dataclass(frozen=True, slots=True)
class Rejection:
    """A boot that the engine refuses: its own words, and the phase that they come in ("args", "weights"…)."""

    text: str
    phase: str = "args"
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What would happen, per GPU of the fullest rank. A number that cannot be known is None.

    ``rules`` is the release whose rules were used, ``version`` the one that was asked for. ``bars`` are the errors
    (±, in the number's own unit; tokens in tokens) that the number had on the boots that it was checked on.
    ``rest_gib`` is what the KV pool may take: free after weights minus ``reserved_gib``, which is held back.
    """

    engine: str
    version: str | None
    rules: str
    layout: Layout
    gpus_used: int
    verdict: str
    phase: str
    explanation: str
    mem_fraction_static: float | None = None
    avail_before_gib: float | None = None
    weights_gib: float | None = None
    avail_after_weights_gib: float | None = None
    reserved_gib: float | None = None
    rest_gib: float | None = None
    kv_cell_bytes: float | None = None
    kv_tokens: int | None = None
    kv_gib: float | None = None
    state_gib: float | None = None
    req_to_token_gib: float | None = None
    graph_gib: float | None = None
    margin_gib: float | None = None
    f_min: float | None = None
    f_max: float | None = None
    stages_gib: tuple[float, ...] = ()
    parts_gib: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    resolved: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    bars: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    rejections: tuple[Rejection, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the verdict is "fits"."""
        return self.verdict == "fits"

    def to_dict(self) -> dict[str, Any]:
        """The keys of ``gpuguard predict --json`` (docs/prediction.md)."""
        return {
            "gpus_used": self.gpus_used,
            "mem_fraction_static": self.mem_fraction_static,
            "weights_gib": self.weights_gib,
            "avail_before_gib": self.avail_before_gib,
            "avail_after_weights_gib": self.avail_after_weights_gib,
            "reserved_gib": self.reserved_gib,
            "rest_gib": self.rest_gib,
            "kv_tokens": self.kv_tokens,
            "f_min": self.f_min,
            "f_max": self.f_max,
            "verdict": self.verdict,
            "explanation": self.explanation,
            "assumptions": list(self.assumptions),
            "phase": self.phase,
            "engine": self.engine,
            "engine_version": self.version,
            "rules": self.rules,
            "layout": str(self.layout),
            "kv_cell_bytes": self.kv_cell_bytes,
            "kv_gib": self.kv_gib,
            "state_gib": self.state_gib,
            "req_to_token_gib": self.req_to_token_gib,
            "graph_gib": self.graph_gib,
            "margin_gib": self.margin_gib,
            "stages_gib": list(self.stages_gib),
            "parts_gib": dict(self.parts_gib),
            "resolved": dict(self.resolved),
            "bars": dict(self.bars),
            "rejections": [{"text": one.text, "phase": one.phase, "source": one.source} for one in self.rejections],
        }
