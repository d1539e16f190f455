"""How far off the numbers were on the boots that they were checked on. Pure.

docs/prediction.md has the table; benchmarks/predict.py makes it anew. A guess about the model widens every bar.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: 90th percentile of the error of the weights, as a share (benchmarks/predict.py); and what a load leaves beside them.
WEIGHTS: Final = 0.03
LOAD_GIB: Final = 0.15
#: Free memory before the weights: within so many GiB for one rank, and so many more for each further one.
BEFORE_GIB: Final = 0.15
PCIE_RANK_GIB: Final = 0.03
NVLINK_RANK_GIB: Final = 0.2
#: A model that is not wholly understood.
GUESS: Final = 0.25


@dataclass(frozen=True, slots=True)
class Bars:
    """Errors (±) in GiB, and in tokens."""

    weights: float
    before: float
    rest: float
    tokens: float
    graph: float
    after: float
    reserved: float
    margin: float
    f_min: float

    def as_dict(self) -> dict[str, float]:
        """By the names of the numbers that they belong to."""
        return {
            "weights_gib": round(self.weights, 3),
            "avail_before_gib": round(self.before, 3),
            "avail_after_weights_gib": round(self.after, 3),
            "reserved_gib": round(self.reserved, 3),
            "rest_gib": round(self.rest, 3),
            "kv_gib": round(self.rest, 3),
            "kv_tokens": round(self.tokens),
            "graph_gib": round(self.graph, 3),
            "margin_gib": round(self.margin, 3),
            "f_min": round(self.f_min, 4),
        }


def bars_of(
    *,
    weights: float,
    ranks: int,
    linked: bool,
    fraction: float,
    cell: float,
    graph: float,
    understood: bool,
    weights_known: bool,
    before_known: bool,
    before: float,
    graph_known: bool = False,
) -> Bars:
    """The bars of a prediction; a number that was measured has none."""
    share = WEIGHTS if understood else GUESS
    weights_bar = 0.0 if weights_known else weights * share + LOAD_GIB
    each = NVLINK_RANK_GIB if linked else PCIE_RANK_GIB
    before_bar = 0.0 if before_known else BEFORE_GIB + each * (ranks - 1)
    rest = before_bar * fraction + weights_bar
    tokens = rest * (1 << 30) / cell if cell else 0.0
    graph_bar = 0.0 if graph_known else max(graph, 0.5)
    reserved = before_bar * (1 - fraction)
    f_min = (weights_bar + before_bar * weights / before) / before if before > 0 else 0.0
    return Bars(
        weights_bar,
        before_bar,
        rest,
        tokens,
        graph_bar,
        weights_bar + before_bar,
        reserved,
        reserved + graph_bar,
        f_min,
    )
