"""What a prediction starts from, whatever the engine and the flags: model, card, known numbers. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .config import Config
from .quant import Quantization
from .shape import Shape
from .values import Box

#: Numbers that a person may know better than the rules.
MEASURED: Final = (
    "weights_gib",
    "avail_before_gib",
    "avail_after_weights_gib",
    "kv_cell_bytes",
    "graph_gib",
    "draft_gib",
)


@dataclass(frozen=True, slots=True)
class Facts:
    """``cache_fp8``: the checkpoint carries scales for an fp8 cache."""

    config: Config
    shape: Shape
    quantization: Quantization
    box: Box
    measured: Mapping[str, float]
    cache_fp8: bool

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What had to be assumed about the model."""
        return self.shape.assumptions + self.quantization.assumptions

    @property
    def understood(self) -> bool:
        """Whether nothing about the model had to be guessed; else every bar is wider."""
        return not self.assumptions
