"""The fractions that work: what SGLang keeps free for graphs and activations, and the window that it leaves.

A window is of whole hundredths, strictly inside what the numbers allow; one that is empty says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

#: Just above the least fraction the pool is a few MiB, which serves nobody: a window begins this much higher.
STEP: Final = 0.002
#: What a prefill chunk and the captured requests can be turned down to.
LEAST_CHUNK: Final = 2048
LEAST_GRAPH: Final = 8
#: SGLang keeps at least so much of a card beyond so many GiB.
_FLOOR_GIB: Final = 10.0
_LARGE_GIB: Final = 60.0
#: The whole card is no fraction.
_MOST: Final = 0.99
#: Far outside of all fractions.
_BEYOND: Final = 1e6


def own_reserve_gib(chunk: int, graph_bs: int, gpus: int, replicas: int = 1) -> float:
    """What SGLang itself keeps free for graphs and activations, in GiB.

    512 MiB + 1.5 MiB a token of a prefill chunk + 2 MiB a captured request + 1 GiB a group of eight GPUs, and with
    ``replicas`` of attention (dp-attention) 3 MiB a captured request for each of them, 4.5 above 300 requests
    (sglang/srt/server_args.py, 0.5.3 and later).
    """
    padding = graph_bs * replicas * (4.5 if graph_bs > 300 else 3) if replicas > 1 else 0
    return (512 + max(chunk, LEAST_CHUNK) * 1.5 + graph_bs * 2 + gpus / 8 * 1024 + padding) / 1024


def defaults(card_gib: float, tp: int) -> tuple[int, int]:
    """SGLang's default chunk and largest captured batch size (sglang/srt/server_args.py, 0.5.3 to 0.5.20)."""
    rows: tuple[tuple[float, int, int, int], ...] = (
        (20, 2048, 8, 8),
        (35, 2048, 24, 80),
        (60, 4096, 32, 160),
        (160, 8192, 256, 512),
        (math.inf, 16384, 512, 512),
    )
    _, chunk, few, many = next(row for row in rows if card_gib < row[0])
    return chunk, few if tp < 4 else many


@dataclass(frozen=True, slots=True)
class Window:
    """Fractions that work: ``low`` gives the pool some room, ``high`` leaves ``slack_gib`` for everything else."""

    low: float
    high: float
    slack_gib: float = 0.0

    @property
    def empty(self) -> bool:
        """Whether no hundredth lies in it."""
        return self.low > self.high + 1e-9

    @property
    def middle(self) -> float:
        """The hundredth in the middle."""
        return min(max(math.floor((self.low + self.high) * 50 + 0.5) / 100, self.low), self.high)

    def over(self, fraction: float | None) -> Window:
        """The part of it above the present fraction, if there is one."""
        return self if fraction is None else replace(self, low=max(self.low, above(fraction)))

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.low:.2f}"
        return f"between {self.low:.2f} and {self.high:.2f}"


def window(
    before: float, f_min: float, chunk: int, graph_bs: int, gpus: int, replicas: int = 1, floor: bool = True
) -> Window:
    """The window for ``before`` GiB free before the weights; ``floor``: SGLang's least for large cards counts too."""
    slack = own_reserve_gib(chunk, graph_bs, gpus, replicas)
    if floor and before > _LARGE_GIB:
        slack = max(slack, _FLOOR_GIB)
    return Window(up(f_min + STEP), min(down(1 - slack / before), _MOST), slack)


def up(fraction: float) -> float:
    """The hundredth at or above."""
    return math.ceil(_within(fraction, _BEYOND) * 100 - 1e-6) / 100


def down(fraction: float) -> float:
    """The hundredth at or below."""
    return math.floor(_within(fraction, -_BEYOND) * 100 + 1e-6) / 100


def above(fraction: float) -> float:
    """The next hundredth that is higher."""
    return (math.floor(_within(fraction, _BEYOND) * 100 + 1e-6) + 1) / 100


def below(fraction: float) -> float:
    """The next hundredth that is lower."""
    return (math.ceil(_within(fraction, -_BEYOND) * 100 - 1e-6) - 1) / 100


def _within(fraction: float, nowhere: float) -> float:
    """A number that can be rounded. What is no number (NaN) is ``nowhere``, from where no fraction is reached."""
    return nowhere if math.isnan(fraction) else min(max(fraction, -_BEYOND), _BEYOND)
