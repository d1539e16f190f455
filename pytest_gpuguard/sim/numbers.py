"""The memory of each rank at each step of a boot, from one prediction: what the log prints and what the GPU holds.

Pure. Sizes are GiB. It adds nothing to the prediction: what that does not know is zero here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..predict.values import Box, Prediction
from .log import Rank


@dataclass(frozen=True, slots=True)
class Steps:
    """Free memory of one rank's GPU before anything (``whole``) and before the weights, and what each step takes."""

    whole: float
    before: float
    weights: float
    pool: float
    graph: float

    @property
    def after(self) -> float:
        """Free once the weights are loaded."""
        return self.before - self.weights

    @property
    def with_pool(self) -> float:
        """Free once the KV pool is allocated."""
        return self.after - self.pool

    @property
    def end(self) -> float:
        """Free when it is ready."""
        return self.with_pool - self.graph


def steps_of(prediction: Prediction, box: Box, ranks: Sequence[Rank]) -> dict[Rank, Steps]:
    """The steps of every rank; those of one pipeline stage are alike."""
    whole = box.torch_gib
    before = prediction.avail_before_gib if prediction.avail_before_gib is not None else whole
    weights = prediction.weights_gib or 0.0
    fullest = before - weights
    pool = (prediction.kv_gib or 0.0) + (prediction.state_gib or 0.0) + (prediction.req_to_token_gib or 0.0)
    graph = prediction.graph_gib or 0.0
    if prediction.margin_gib is not None and prediction.kv_gib is not None:
        pool = fullest - graph - prediction.margin_gib  # whatever else lies beside the pool is held by then
    stages = prediction.stages_gib
    found = {}
    for rank in ranks:
        own = stages[rank.pp] if rank.pp < len(stages) > 1 else weights
        found[rank] = Steps(whole, before, own, pool, graph)
    return found


def size(gib: float) -> str:
    """As torch prints it: ``672.00 MiB``, ``94.97 GiB``."""
    return f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 1024:.2f} MiB"


def last_allocation(steps: Steps, layers: int) -> tuple[float, float]:
    """(what is asked for, what is free) when weights that do not fit are loaded layer by layer."""
    each = max(steps.weights / max(layers, 1), 1 / 1024)
    loaded = int(steps.before / each)
    free = steps.before - loaded * each
    return (each, free) if free < each else (each, max(0.0, free - each))
